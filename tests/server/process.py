"""``stemkv serve`` as a process of its own, to be signalled and killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from .harness import eventually


class Process:
    """A running server; ends with the ``with`` block at the latest. Only the process started here is signalled."""

    def __init__(self, model: str | Path, store: Path, *options: str) -> None:
        self._out, self._err = (
            store.with_name(f"{store.name}.{os.urandom(4).hex()}.{kind}") for kind in ("out", "err")
        )
        command = [sys.executable, "-m", "stemkv.cli.main", "serve", str(model), "--port", "0", "--store", str(store)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = subprocess.Popen([*command, *options], stdout=out, stderr=err, env=environment)
        self.address = self._wait_for_address()

    def ask(self, prompt: str, *, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        """A greedy completion."""
        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
        return httpx.post(f"{self.address}/v1/completions", json=body, headers=headers, timeout=120)

    def signal(self, number: int) -> None:
        """Send a signal to the server."""
        self._process.send_signal(number)

    def wait(self, timeout_s: float = 60) -> int:
        """The exit code."""
        return self._process.wait(timeout_s)

    def sees(self, text: str) -> bool:
        """Whether stderr says ``text`` soon."""
        return eventually(lambda: text in self.output()[1])

    def stored(self) -> bool:
        """Whether everything computed is stored soon."""

        def queue() -> float:
            text = httpx.get(f"{self.address}/metrics").text
            found = re.search(r"^stemkv_write_queue_bytes (\S+)$", text, re.MULTILINE)
            return float(found[1]) if found else -1.0

        return eventually(lambda: queue() == 0, 20)

    def output(self) -> tuple[str, str]:
        """What it wrote so far to stdout and stderr."""
        return self._out.read_text(), self._err.read_text()

    def __enter__(self) -> Process:  # noqa: PYI034 - Self is younger than Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _wait_for_address(self) -> str:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            found = re.search(r"address +(http://\S+)/v1", self.output()[0])
            if found:
                return found[1].replace("0.0.0.0", "127.0.0.1")
            if self._process.poll() is not None:
                break
            time.sleep(0.05)
        raise AssertionError(f"the server did not start: {self.output()}")
