"""A few daemon threads: a hung tier must neither hold up the engine nor keep the process from ending."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Threads:
    """Runs work on up to ``count`` daemon threads, started when first needed. Work must not raise."""

    def __init__(self, name: str, count: int) -> None:
        self._name, self._count = name, count
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._started = 0

    def submit(self, work: Callable[[], None]) -> None:
        """Queue ``work``; never blocks. One caller. Raises RuntimeError if there is no thread and none can start."""
        if self._started < self._count:
            thread = threading.Thread(target=self._run, name=f"{self._name}-{self._started}", daemon=True)
            try:
                thread.start()
                self._started += 1
            except RuntimeError:
                if not self._started:
                    raise
        self._queue.put(work)

    def _run(self) -> None:
        while True:
            self._queue.get()()
