"""Who is computing what: replicas that start cold with one system prompt compute it once.

A claim is a locked file in the store's folder that lists the blocks its request is about to compute. The lock ends with
the process that holds it, whatever ends that, so a claim is never older than its owner. Claims only save work: where
they cannot be made, everybody computes.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_LONGEST_S = 60.0
"""A claim is given up after so long, whatever became of its request."""
_STORING_S = 1.0
"""What storing the last blocks of a prompt may take."""
_GATE_S = 0.1
"""How long to wait for others that are just making a claim."""
_MOST_BYTES = 1 << 20


class Claims:
    """The claims of one engine. Thread-safe."""

    def __init__(self, store: Path) -> None:
        self._folder = store / "claims"
        self._lock = threading.Lock()
        self._done: deque[tuple[float, bytes]] = deque()
        self._mine: dict[bytes, tuple[Path, int, float]] = {}

    def take(self, keys: Sequence[bytes]) -> bytes | None:
        """Claim ``keys``, the blocks a request lacks, in order; None if another engine is computing the first of them.

        Otherwise a name for :meth:`release`, which is empty if no claim could be made.
        """
        try:
            with self._lock, self._gate():
                if self._computed_elsewhere(keys[0]):
                    return None
                name = os.urandom(16)
                path = self._folder / name.hex()
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                self._mine[name] = path, handle, time.monotonic()
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.write(handle, b"".join(keys))
                return name
        except OSError:
            return b""

    @contextmanager
    def _gate(self) -> Iterator[None]:
        """One engine at a time looks and claims. Raises OSError where that takes too long."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        handle = os.open(self._folder / "gate", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + _GATE_S
        try:
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.001)
            yield
        finally:
            os.close(handle)

    def _computed_elsewhere(self, key: bytes) -> bool:
        own = {path.name for path, _, _ in self._mine.values()}
        return any(key in self._claimed(p) for p in self._folder.iterdir() if p.name not in own and p.name != "gate")

    def _claimed(self, path: Path) -> frozenset[bytes]:
        """What a claim of another engine lists; nothing, and the file goes, if its owner has ended."""
        try:
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return frozenset()
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            listed = os.pread(handle, _MOST_BYTES, 0)
            return frozenset(listed[i : i + 32] for i in range(0, len(listed), 32))
        else:
            path.unlink(missing_ok=True)
            return frozenset()
        finally:
            os.close(handle)

    def release(self, name: bytes) -> None:
        """Give up a claim."""
        with self._lock:
            path, handle, _ = self._mine.pop(name, (None, -1, 0.0))
        if path is not None:
            with suppress(OSError):
                path.unlink()
            os.close(handle)

    def done(self, name: bytes) -> None:
        """The blocks are computed; the claim ends when they have had time to be stored."""
        self._done.append((time.monotonic() + _STORING_S, name))

    def expire(self) -> None:
        """Give up claims that are done or too old. Called now and then; costs nothing where there are none."""
        if not self._mine:
            return
        now = time.monotonic()
        while self._done and self._done[0][0] < now:
            self.release(self._done.popleft()[1])
        for name in [n for n, (_, _, since) in list(self._mine.items()) if since < now - _LONGEST_S]:
            self.release(name)
