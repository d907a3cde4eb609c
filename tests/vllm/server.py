"""A real vLLM server with SmolLM2 over HTTP: scheduler and worker are processes of their own. Also for bench/."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

START_S = 300.0
_QUIET = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "2",
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
}  # fmt: skip


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Server:
    """``python -m vllm.entrypoints.openai.api_server`` on a free port of 127.0.0.1, as a context manager."""

    def __init__(self, model: Path, transfer: dict[str, Any] | None, *arguments: str) -> None:
        port = free_port()
        flags = ["--model", str(model), "--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port)]
        flags += ["--enforce-eager", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log", *arguments]
        if transfer is not None:
            flags += ["--kv-transfer-config", json.dumps(transfer)]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags],
            stdout=self._log, stderr=self._log, stdin=subprocess.DEVNULL, env={**os.environ, **_QUIET},
            cwd=tempfile.gettempdir(), start_new_session=True,
        )  # fmt: skip
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300, trust_env=False)
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            try:
                if self.http.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            if self._process.poll() is not None or time.monotonic() > deadline:
                text = self.log()
                self.kill()
                raise AssertionError(f"the server did not start:\n{text[-6000:]}")
            time.sleep(0.1)

    def __enter__(self) -> Server:  # noqa: PYI034 - typing.Self is not in 3.10
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def complete(self, ids: list[int], max_tokens: int = 8, **extra: Any) -> dict[str, Any]:
        """The answer to a prompt of token ids: ``text``, ``cached`` tokens and ``token_ids``."""
        body = {"model": "m", "prompt": ids, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True} | extra
        answer = self.http.post("/v1/completions", json=body).raise_for_status().json()
        details = answer["usage"].get("prompt_tokens_details") or {}
        return {"text": answer["choices"][0]["text"], "cached": details.get("cached_tokens") or 0}

    def times(self, ids: list[int], max_tokens: int) -> tuple[float, float]:
        """Seconds to the first token and to the end of a streamed answer."""
        body = {"model": "m", "prompt": ids, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
                "stream": True}  # fmt: skip
        started, first = time.perf_counter(), 0.0
        with self.http.stream("POST", "/v1/completions", json=body) as answer:
            for line in _data(answer):
                if not first and json.loads(line)["choices"]:
                    first = time.perf_counter() - started
        return first, time.perf_counter() - started

    def forget(self) -> None:
        """Empty vLLM's own prefix cache."""
        assert self.http.post("/reset_prefix_cache").json()["success"]

    def metrics(self) -> dict[str, float]:
        """Counters by name, summed over labels."""
        found: dict[str, float] = {}
        for line in self.http.get("/metrics").text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                key = name.partition("{")[0]
                found[key] = found.get(key, 0.0) + float(value)
        return found

    def cpu_seconds(self) -> float:
        """Processor time of all its processes so far."""
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            if int(fields[2]) == self._process.pid:
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def log(self) -> str:
        """What the server wrote."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def kill(self) -> None:
        """End it and its children as kill -9 does."""
        self.http.close()
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # the group is its own, its workers are in it
        self._process.wait()
        self._log.close()


def _data(answer: httpx.Response) -> Iterator[str]:
    for line in answer.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield line[6:]
