"""The background writer: stores blocks after the answer, through a queue that drops rather than blocks."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

log = logging.getLogger("stemkv")


class Job(NamedTuple):
    """Work for the writer thread; ``keys`` are pending until ``run`` returned."""

    run: Callable[[], None]
    nbytes: int
    keys: Sequence[bytes]


class Writer:
    """One daemon thread working off a queue bounded in bytes. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._queued_bytes = 0
        self._jobs: deque[Job] = deque()
        self._pending: dict[bytes, int] = {}
        self._busy = False
        self._closing = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def submit(self, job: Job) -> bool:
        """Queue ``job``; False (and nothing queued) if the queue has no room or is closing. Never blocks.

        A job larger than the whole queue is taken when the queue is empty.
        """
        with self._changed:
            full = self._queued_bytes + job.nbytes > self._max_bytes and (self._jobs or self._busy)
            if self._closing or full:
                return False
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="stemkv-writer", daemon=True)
                self._thread.start()
            self._jobs.append(job)
            self._queued_bytes += job.nbytes
            for key in job.keys:
                self._pending[key] = self._pending.get(key, 0) + 1
            self._changed.notify_all()
            return True

    def pending(self, key: bytes) -> bool:
        """Whether a queued or running job is to store ``key``."""
        return key in self._pending

    def wait_for(self, key: bytes, timeout_s: float) -> bool:
        """Wait until ``key`` is no longer pending; False if that took longer than ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: key not in self._pending, timeout_s)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until everything queued so far is done; False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._busy, timeout_s)

    def close(self, timeout_s: float = 30.0) -> bool:
        """Take no more, finish what is queued within ``timeout_s``; False if something was left undone."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        deadline = time.monotonic() + timeout_s
        done = self.flush(timeout_s)
        with self._changed:
            self._jobs.clear()
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        return done

    @property
    def queued_bytes(self) -> int:
        return self._queued_bytes

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closing)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._busy = True
            try:
                job.run()
            except Exception:  # the engine boundary: a store must never take the process down
                log.exception("storing %d blocks failed; they will be computed again", len(job.keys))
            finally:
                self._done(job)

    def _done(self, job: Job) -> None:
        with self._changed:
            self._busy = False
            self._queued_bytes -= job.nbytes
            self._forget(job.keys)
            self._changed.notify_all()

    def _forget(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._pending[key] -= 1
            if not self._pending[key]:
                del self._pending[key]
