"""Which keys the pool has, asked from a thread that must not wait and answered by one that may.

vLLM asks its tiers for one key at a time, on the scheduler's thread, and asks again at the next step when the answer
is "later". Here a key is "later" for at most ``timeout_s``; then it is absent, whatever becomes of the answer.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

log = logging.getLogger("stemkv")

ABSENT_S = 1.0
"""How long "absent" is believed when another request asks for the same key."""
Find = Callable[[Sequence[bytes]], Sequence[bool]]


class _Entry:
    """What is known about one key."""

    __slots__ = ("asked", "found", "requests")

    def __init__(self, now: float) -> None:
        self.asked = now
        self.found: bool | None = None
        self.requests: set[str] = set()


class Lookups:
    """Answers of one pool. All methods but the thread's are for the scheduler's thread; none blocks or raises.

    ``find`` says for each of some keys whether it is there; it may block and fail. ``most`` bounds how many keys may
    wait for it; beyond that, and while it has been at work on one batch for longer than ``timeout_s``, new keys are
    absent at once. ``counts`` has how keys were answered: ``hit``, ``miss``, ``late`` and ``refused``.
    """

    def __init__(self, find: Find, *, timeout_s: float, most: int = 65536) -> None:
        self._find, self._timeout_s, self._most = find, timeout_s, most
        self._entries: dict[bytes, _Entry] = {}
        self._keys_of: dict[str, set[bytes]] = {}
        self._batch: list[tuple[bytes, _Entry]] = []
        self._questions: queue.SimpleQueue[list[tuple[bytes, _Entry]] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[list[tuple[bytes, _Entry]], Sequence[bool]]] = queue.SimpleQueue()
        self._waiting = 0
        self._busy_since = 0.0
        self._late = False
        self.counts: Counter[str] = Counter()
        threading.Thread(target=self._work, name="stemkv-tier-lookup", daemon=True).start()

    def ask(self, key: bytes, request: str) -> bool | None:
        """Whether ``key`` is there; None for "ask again at the next step"."""
        self._take_answers()
        now = time.monotonic()
        entry = self._entries.get(key)
        if entry is None or (request not in entry.requests and entry.found is False and now > entry.asked + ABSENT_S):
            entry = self._asked(key, now, entry)
        if request not in entry.requests:
            entry.requests.add(request)
            self._keys_of.setdefault(request, set()).add(key)
        if entry.found is None and now > entry.asked + self._timeout_s:
            entry.found, self._late = False, True
            self.counts["late"] += 1
        return entry.found

    def _asked(self, key: bytes, now: float, old: _Entry | None) -> _Entry:
        entry = self._entries[key] = _Entry(now)
        if old is not None:
            entry.requests = old.requests
        if self._waiting + len(self._batch) >= self._most or self.stuck:
            entry.found = False
            self.counts["refused"] += 1
        else:
            self._batch.append((key, entry))
        return entry

    @property
    def stuck(self) -> bool:
        """Whether ``find`` takes longer than a lookup may, or has not answered since a key was late."""
        since = self._busy_since
        return self._late or (bool(since) and time.monotonic() > since + self._timeout_s)

    def step(self) -> None:
        """Send what was asked since the last step."""
        self._take_answers()
        batch, self._batch = [(k, e) for k, e in self._batch if self._entries.get(k) is e], []
        if batch:
            self._waiting += len(batch)
            self._questions.put(batch)

    def _take_answers(self) -> None:
        while not self._answers.empty():
            asked, found = self._answers.get()
            self._late = False
            self._waiting -= len(asked)
            for (_, entry), here in zip(asked, found, strict=True):
                if entry.found is None:  # else it was late, or something newer is known
                    entry.found = here
                    self.counts["hit" if here else "miss"] += 1

    def note(self, keys: Iterable[bytes], *, here: bool) -> None:
        """What a transfer has shown about ``keys``: stored, or not to be loaded."""
        now = time.monotonic()
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None:
                entry.found, entry.asked = here, now

    def forget(self, request: str) -> None:
        """``request`` is over."""
        for key in self._keys_of.pop(request, ()):
            entry = self._entries.get(key)
            if entry is not None:
                entry.requests.discard(request)
                if not entry.requests:
                    del self._entries[key]

    def clear(self) -> None:
        """Forget all answers; the next lookups ask anew."""
        for entry in self._entries.values():
            entry.found = False  # an answer on its way is no longer wanted
        self._entries.clear()
        self._keys_of.clear()
        self._batch.clear()

    def close(self) -> None:
        """End the thread once it is done with what it was asked; does not wait for it."""
        self._questions.put(None)

    def _work(self) -> None:
        while (asked := self._questions.get()) is not None:
            self._busy_since = time.monotonic()
            try:
                found = list(self._find([key for key, _ in asked]))
                if len(found) != len(asked):
                    raise ValueError(f"{len(found)} answers for {len(asked)} keys")
            except Exception:  # the engine's boundary: what cannot be looked up is not there
                log.warning("a lookup of %d keys failed", len(asked), exc_info=True)
                found = [False] * len(asked)
            self._busy_since = 0.0
            self._answers.put((asked, found))
