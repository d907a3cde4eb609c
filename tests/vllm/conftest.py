"""Tiny models once a run; one engine without the connector for reference answers, one with it for most tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .harness import EngineProcess, connector
from .models import tiny


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama."""
    return tiny(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="session")
def plain(model: Path) -> Iterator[EngineProcess]:
    """VLLM without the connector and without its own prefix cache."""
    with EngineProcess(model, None, enable_prefix_caching=False) as engine:
        yield engine


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of :func:`engine`."""
    return tmp_path_factory.mktemp("store") / "kv"


@pytest.fixture(scope="session")
def engine(model: Path, store: Path) -> Iterator[EngineProcess]:
    """VLLM with the connector."""
    with EngineProcess(model, connector(store)) as engine:
        yield engine
