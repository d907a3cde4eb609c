"""The background writer: stores blocks after the answer, through a queue that drops rather than blocks."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

log = logging.getLogger("stemkv")


def _nothing() -> None:
    pass


class Job(NamedTuple):
    """Work for the writer thread; ``keys`` are pending until it ran or was abandoned."""

    run: Callable[[], None]
    nbytes: int
    """Memory that is held until the job has run."""
    keys: Sequence[bytes]
    abandoned: Callable[[], None] = _nothing
    """Called instead of ``run`` if the writer was closed before there was time for it."""


class Writer:
    """One daemon thread working off a queue bounded in bytes, first in, first out. Thread-safe.

    The thread starts with the first job, so a pool that stores nothing has none.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._queued_bytes = 0
        self._jobs: deque[Job] = deque()
        self._pending: dict[bytes, int] = {}
        self._submitted = 0
        self._ran = 0
        self._abandoned = 0
        self._closing = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def submit(self, job: Job) -> bool:
        """Queue ``job``; False (and nothing queued) if the queue has no room or is closing. Never blocks.

        A job larger than the whole queue is taken when nothing else is queued or running.
        """
        with self._changed:
            waiting = self._submitted - self._ran
            full = self._queued_bytes + job.nbytes > self._max_bytes and waiting
            if self._closing or full or not self._started():
                return False
            self._jobs.append(job)
            self._submitted += 1
            self._queued_bytes += job.nbytes
            for key in job.keys:
                self._pending[key] = self._pending.get(key, 0) + 1
            self._changed.notify_all()
            return True

    def _started(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="stemkv-writer", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads, or the interpreter is going down
                return False
            self._thread = thread
        return True

    def pending(self, key: bytes) -> bool:
        """Whether a queued or running job is to store ``key``."""
        return key in self._pending

    def wait_for(self, key: bytes, timeout_s: float) -> bool:
        """Wait until ``key`` is no longer pending; False if that took longer than ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: key not in self._pending, timeout_s)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until everything queued before this call has run; False on timeout or if some was abandoned."""
        with self._changed:
            target = self._submitted
            self._changed.wait_for(lambda: self._ran + self._abandoned >= target, timeout_s)
            return self._ran >= target

    def close(self, timeout_s: float = 30.0) -> bool:
        """Take no more, finish what is queued within ``timeout_s``; False if something was left undone.

        What is left is abandoned, except a job that is running: it goes on. May be called twice.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self.flush(timeout_s)
        with self._changed:
            left = list(self._jobs)
            self._jobs.clear()
            self._abandoned += len(left)
            for job in left:
                self._forget(job)
            self._changed.notify_all()
        for job in left:
            job.abandoned()
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        return self._ran == self._submitted

    @property
    def closing(self) -> bool:
        """Whether :meth:`close` was called; nothing is taken any more."""
        return self._closing

    @property
    def queued_bytes(self) -> int:
        """Memory held by queued and running jobs."""
        return self._queued_bytes

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closing)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            try:
                job.run()
            except BaseException:  # not even SystemExit may end the only thread that stores
                log.exception("storing %d blocks failed; they will be computed again", len(job.keys))
            with self._changed:
                self._ran += 1
                self._forget(job)
                del job  # it holds the tensors of a request
                self._changed.notify_all()

    def _forget(self, job: Job) -> None:
        self._queued_bytes -= job.nbytes
        for key in job.keys:
            self._pending[key] -= 1
            if not self._pending[key]:
                del self._pending[key]
