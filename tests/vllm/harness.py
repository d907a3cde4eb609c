"""Engines in processes, prompts, stores: what the tests of the connector share."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
START_S = 240.0
ANSWER_S = 120.0
PAGE = 32
"""Tokens of an engine block in these tests."""
BLOCK = 64
"""Tokens of a stored block: two pages."""
VOCAB = 512


def prompt(seed: int, tokens: int, *, shared: int = 0) -> list[int]:
    """Random ids; the first ``shared`` of them are the same for all seeds."""
    head, tail = random.Random(0), random.Random(1000 + seed)
    return [head.randrange(5, VOCAB) for _ in range(shared)] + [
        tail.randrange(5, VOCAB) for _ in range(tokens - shared)
    ]


def connector(store: Path, **settings: Any) -> dict[str, Any]:
    """The kv-transfer-config for a store."""
    known = {"store": str(store), "reserve_bytes": 0, "lookup_timeout_s": 20.0, "load_timeout_s": 40.0} | settings
    return {
        "kv_connector": "StemKVConnector", "kv_connector_module_path": "stemkv.engines.vllm_connector",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"stemkv": known},
    }  # fmt: skip


class EngineProcess:
    """A vLLM engine. Use as a context manager; ``refused`` is set instead of being ready if it would not start."""

    def __init__(self, model: Path, transfer: dict[str, Any] | None, *, env: dict[str, str] | None = None,
                 **arguments: Any) -> None:  # fmt: skip
        settings = {"arguments": {"model": str(model)} | arguments, "connector": transfer}
        ours, theirs = os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._answers = os.fdopen(ours, "r")
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "engine_process.py"), json.dumps(settings), str(theirs)],
            stdin=subprocess.PIPE, stdout=self._log, stderr=self._log, text=True, pass_fds=[theirs],
            env={**os.environ, "PYTHONPATH": str(HERE), **(env or {})}, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        started = self._read(START_S)
        self.refused: str = started.get("refused", "")
        if self.refused:
            self.kill()

    def __enter__(self) -> EngineProcess:  # noqa: PYI034 - typing.Self is not in 3.10
        assert not self.refused, self.refused
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def ask(self, do: str, **fields: Any) -> Any:
        """Have something done and return its result."""
        self.tell(do, **fields)
        return self.hear()

    def tell(self, do: str, **fields: Any) -> None:
        """Have something done without waiting."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        """The result of the last :meth:`tell`."""
        answer = self._read(ANSWER_S)
        assert "result" in answer, f"{answer}\n{self.log()}"
        return answer["result"]

    def generate(self, *prompts: list[int], max_tokens: int = 8, **extra: Any) -> list[dict[str, Any]]:
        """Greedy answers, all prompts at once."""
        return self.ask("generate", prompts=[{"ids": p, **extra} for p in prompts], max_tokens=max_tokens)

    def one(self, ids: list[int], **extra: Any) -> dict[str, Any]:
        """The answer to one prompt."""
        return self.generate(ids, **extra)[0]

    def log(self) -> str:
        """What the engine wrote."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def kill(self) -> None:
        """End it and its worker at once, as kill -9 does."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for file in (self._process.stdin, self._answers, self._log):
            if file is not None:
                with contextlib.suppress(OSError):  # what was not sent yet
                    file.close()

    def _read(self, timeout_s: float) -> dict[str, Any]:
        ready, _, _ = select.select([self._answers], [], [], timeout_s)
        line = self._answers.readline() if ready else ""
        if not line:
            text = self.log()
            self.kill()
            raise AssertionError(f"the engine {'ended' if ready else 'did not answer'}:\n{text[-6000:]}")
        return json.loads(line)


def files(store: Path) -> list[Path]:
    """Block files, oldest first."""
    return sorted((store / "blocks").rglob("*.safetensors"), key=lambda p: p.stat().st_mtime_ns)


def wait_stored(store: Path, count: int, timeout_s: float = 20.0) -> None:
    """Wait until ``count`` blocks are stored (and a moment for their rows)."""
    deadline = time.monotonic() + timeout_s
    while len(files(store)) < count:
        assert time.monotonic() < deadline, f"{len(files(store))} blocks stored, not {count}"
        time.sleep(0.02)
    time.sleep(0.1)
