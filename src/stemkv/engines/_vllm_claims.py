"""Who is computing what: replicas that start cold with one system prompt compute it once.

A claim is a locked file in the store's folder, named by the first block that is missing. The lock ends with the process
that holds it, whatever ends that, so a claim is never older than its owner. Claims only save work: where they cannot
be made, everybody computes.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

_LONGEST_S = 60.0
"""A claim is given up after so long, whatever became of its request."""


class Claims:
    """The claims of one engine. Thread-safe."""

    def __init__(self, store: Path) -> None:
        self._folder = store / "claims"
        self._lock = threading.Lock()
        self._mine: dict[bytes, tuple[int, float]] = {}

    def take(self, key: bytes) -> bool:
        """Claim ``key``; False if another engine has. True as well if that cannot be told."""
        with self._lock:
            if key in self._mine:
                return True  # vLLM itself shares what one engine computes
            try:
                handle = self._open(key)
            except BlockingIOError:
                return False
            except OSError:
                return True
            self._mine[key] = handle, time.monotonic()
            return True

    def _open(self, key: bytes) -> int:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        handle = os.open(self._path(key), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise
        return handle

    def release(self, key: bytes) -> None:
        """Give up a claim, if it is this engine's."""
        with self._lock:
            handle, _ = self._mine.pop(key, (-1, 0.0))
            if handle >= 0:
                with suppress(OSError):
                    self._path(key).unlink()
                os.close(handle)

    def expire(self) -> None:
        """Give up claims that are too old."""
        before = time.monotonic() - _LONGEST_S
        for key in [k for k, (_, since) in list(self._mine.items()) if since < before]:
            self.release(key)

    def _path(self, key: bytes) -> Path:
        return self._folder / key.hex()[:32]
