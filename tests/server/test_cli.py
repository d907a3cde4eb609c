"""The command line: one sentence for everything that is wrong, exit code 2, never a traceback; signals."""

from __future__ import annotations

import importlib.util
import logging
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from stemkv.cli import serve
from stemkv.cli.main import VERBS, main
from stemkv.errors import StoreFormatError

from .harness import byte_tokenizer
from .process import Process
from .test_tiny_model import tiny_model


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """The command sets up logging for its process, which here is everybody's."""
    logger = logging.getLogger("stemkv")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before[0], before[1], before[2]


def refused(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The sentence that a bad command line gets."""
    assert main(arguments) == 2
    shown = capsys.readouterr()
    lines = shown.err.splitlines()
    assert len(lines) == 1, shown.err
    assert lines[0].startswith("stemkv: error: ")
    assert "unexpected" not in lines[0]
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "VERB"),
        (["srve"], "invalid choice: 'srve'"),
        (["serve"], "MODEL"),
        (["serve", "x", "--prot", "1"], "--prot"),
        (["serve", "x", "--port", "eighty"], "'eighty'"),
        (["serve", "x", "--port", "99999"], "port"),
        (["serve", "x", "--memory", "3parsecs"], "'3parsecs' is not a size"),
        (["serve", "x", "--durability", "maybe"], "durability"),
        (["serve", "x", "--config", "/nowhere.toml"], "/nowhere.toml"),
        (["serve", "x", "--host", "0.0.0.0"], "--api-key-file"),
        (["serve", "x", "--host", "::"], "--api-key-file"),
        (["serve", "x", "--api-key-file", "/nowhere.keys"], "/nowhere.keys"),
        (["serve", "x", "--seal"], "secret_file"),
    ],
)
def test_a_bad_command_line_gets_one_sentence(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(arguments, capsys)


def test_a_port_in_use_is_named_before_the_model_is_looked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        store = str(tmp_path / "store")
        sentence = refused(["serve", "no-such-model", "--port", str(port), "--store", store], capsys)
    assert f"port {port} on 127.0.0.1 is in use" in sentence
    assert "--port" in sentence


def test_a_model_that_does_not_exist_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sentence = refused(["serve", str(tmp_path / "nothing"), "--port", "0", "--store", str(tmp_path / "s")], capsys)
    assert "nothing" in sentence


def test_a_world_readable_key_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-0123456789abcdef\n")
    keys.chmod(0o644)
    assert f"chmod 600 {keys}".split()[0] in refused(["serve", "x", "--api-key-file", str(keys)], capsys)


def test_missing_extras_are_named_with_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    gone = {"torch", "uvicorn"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in gone else find(name))
    sentence = refused(["serve", "x"], capsys)
    assert "torch and uvicorn are not installed: pip install 'stemkv[transformers,server]'" in sentence


def test_errors_of_the_store_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def newer(_: Any) -> None:
        raise StoreFormatError("/store was written by a newer stemkv (format 9); use that one or another folder")

    monkeypatch.setattr(serve, "open_pool", newer)
    assert "newer stemkv" in refused(["serve", "x", "--port", "0", "--store", str(tmp_path)], capsys)


def test_an_unexpected_error_is_one_sentence_unless_debugging(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Any) -> int:
        raise ZeroDivisionError("some\nthing")

    monkeypatch.setattr(serve, "run", broken)
    assert main(["serve", "x"]) == 2
    error = capsys.readouterr().err
    assert error.splitlines() == [
        "stemkv: error: unexpected ZeroDivisionError: some thing; --debug shows where, please report it"
    ]
    with pytest.raises(ZeroDivisionError):
        main(["serve", "x", "--debug"])


def test_help_and_version_are_there_without_torch() -> None:
    code = (
        "import sys, stemkv.cli.main as m\n"
        "for arguments in (['--version'], ['--help'], ['serve', '--help']): assert m.main(arguments) == 0\n"
        "assert not {'torch', 'transformers', 'starlette'} & set(sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.startswith("stemkv ")
    for verb in VERBS:
        assert verb in shown
    assert "--api-key-file" in shown


# -- a process -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as a folder on disk."""
    path = tmp_path_factory.mktemp("tiny-llama")
    tiny_model().save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def test_what_a_person_sees_at_start_and_end(folder: Path, tmp_path: Path) -> None:
    with Process(folder, tmp_path / "store", "--model-name", "mine") as server:
        assert server.ask("Hello").json()["model"] == "mine"
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    out, err = server.output()
    assert 4 <= len(out.splitlines()) <= 6
    assert "model    mine, context 2,048 tokens, float32 on cpu" in out
    for word in ("store    ", "address  http://127.0.0.1:", "curl "):
        assert word in out
    assert "prompt tokens, 0 cached" in err
    assert "stopping: finishing writes" in err
    assert err.splitlines()[-1] == "stemkv: stopped; everything computed is stored"
    assert "Traceback" not in err


def test_a_second_signal_ends_at_once_and_loses_nothing_stored(folder: Path, tmp_path: Path) -> None:
    with Process(folder, tmp_path / "store", "--drain", "60") as server:
        stream = httpx.stream(
            "POST", f"{server.address}/v1/completions",
            json={"prompt": "x", "max_tokens": 2000, "stream": True, "logit_bias": {"256": -100}}, timeout=30,
        )  # fmt: skip
        with stream as response:
            next(response.iter_lines())
            server.signal(signal.SIGINT)
            assert server.sees("finishing 1 request (at most 60 s)")
            began = time.monotonic()
            server.signal(signal.SIGTERM)
            assert server.wait() == 128 + signal.SIGTERM
            assert time.monotonic() - began < 3


def test_keys_and_settings_files_work_together(folder: Path, tmp_path: Path) -> None:
    keys, config = tmp_path / "keys", tmp_path / "stemkv.toml"
    keys.write_text("sk-0123456789abcdef\n")
    keys.chmod(0o600)
    config.write_text('memory_bytes = "8MiB"\nmax_queue = 3\n')
    options = ("--host", "0.0.0.0", "--api-key-file", str(keys), "--config", str(config), "--quiet")
    with Process(folder, tmp_path / "store", *options) as server:
        assert server.ask("Hello").status_code == 401
        allowed = server.ask("Hello", headers={"authorization": "Bearer sk-0123456789abcdef"})
        assert allowed.status_code == 200
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    out, err = server.output()
    assert "8 MiB in memory" in out
    assert "Authorization: Bearer" in out
    assert "prompt tokens" not in err
