"""vLLM lives in an environment of its own; elsewhere these tests are not collected."""

from __future__ import annotations

import importlib.util
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = importlib.util.find_spec("vllm") is not None
collect_ignore_glob = [] if HERE else ["test_*.py"]

if HERE:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    with warnings.catch_warnings():  # what importing vLLM warns of is not ours
        warnings.simplefilter("ignore")
        import vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector
        import vllm.engine.arg_utils  # noqa: F401

    from .harness import Engine, make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the configuration and (never computed with) weights of a small model."""
    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    return folder


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Any]:
    """Starts engines that are shut down at the end; the pool is in ``tmp_path / "pool"`` unless told otherwise."""
    engines: list[Any] = []

    def one(stemkv: dict[str, Any] | None = None, **more: Any) -> Any:
        settings = {"store": str(tmp_path / "pool"), "reserve_bytes": 0, **(stemkv or {})}
        engine = Engine(more.pop("model", model), settings, **more)
        engines.append(engine)
        return engine

    yield one
    for engine in engines:
        engine.stop()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes what the user has."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in list(os.environ):
        if name.startswith("STEMKV_"):
            monkeypatch.delenv(name)


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Callable[[], None]]]:
    """Lets a method of the file tier wait; returns what ends the wait. All waits end with the test."""
    from stemkv.tiers.file import FileTier  # noqa: PLC0415

    gates: list[threading.Event] = []

    def one(method: str) -> Callable[[], None]:
        gate, original = threading.Event(), getattr(FileTier, method)
        gates.append(gate)

        def waiting(*args: Any, **kwargs: Any) -> Any:
            gate.wait()
            return original(*args, **kwargs)

        monkeypatch.setattr(FileTier, method, waiting)
        return gate.set

    yield one
    for gate in gates:
        gate.set()
