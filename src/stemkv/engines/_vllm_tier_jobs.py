"""Loads and stores between rows of vLLM's host memory and a pool, each over by a deadline.

vLLM keeps the rows of a job in place until the job is reported, and may use them for anything right afterwards. So a
row is only ever touched under its job's lock and while the job is live; a job that takes too long is ended under the
same lock. What a hanging tier does later goes to memory of our own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from stemkv import writer
from stemkv.keys import BlockRef, Chain
from stemkv.match import Match
from stemkv.misses import Cause, Miss
from stemkv.pool import Pool
from stemkv.tiers.base import Sink

log = logging.getLogger("stemkv")


class Rows(Protocol):
    """The engine's memory."""

    def write(self, row: int, payload: memoryview) -> None:
        """Copy ``payload`` into a row."""

    def read(self, row: int, payload: memoryview) -> None:
        """Copy a row into ``payload``."""


class Done(NamedTuple):
    """One finished job; ``misses`` has the keys that failed."""

    id: int
    store: bool
    keys: Sequence[bytes]
    misses: dict[bytes, Miss]
    seconds: float


class _Job:
    """The keys and rows of one transfer, in the engine's order."""

    def __init__(
        self, number: int, keys: Sequence[bytes], rows: Sequence[int], timeout_s: float, *, store: bool
    ) -> None:
        self.id, self.keys, self.rows, self.store = number, keys, rows, store
        self.started = time.monotonic()
        self.deadline = self.started + timeout_s
        self.lock = threading.Lock()
        self.live = True
        """Set to False exactly once, under the lock; rows are not touched afterwards."""
        self.outcome: list[Miss | None] = [Miss(Cause.DEADLINE)] * len(keys)
        self.left = len(keys)

    def fail(self, miss: Miss) -> None:
        """Say why nothing of it was done."""
        with self.lock:
            if self.live:
                self.outcome = [miss] * len(self.keys)

    def done(self) -> Done:
        misses = {key: miss for key, miss in zip(self.keys, self.outcome, strict=True) if miss is not None}
        return Done(self.id, self.store, self.keys, misses, time.monotonic() - self.started)


class _RefChain(Chain):
    """Blocks that are named one by one, in the form that a pool stores."""

    def __init__(self, refs: Sequence[BlockRef]) -> None:  # what Chain derives from tokens is already in the refs
        self._refs = refs

    def ref(self, group: int, index: int) -> BlockRef:
        """Block ``index`` of the job."""
        return self._refs[index]


class _ToRow(Sink):
    """Copies a verified payload into a row, if its job is still live."""

    def __init__(self, job: _Job, index: int, rows: Rows) -> None:
        self._job, self._index, self._rows = job, index, rows

    def accept(self, index: int, payload: memoryview) -> None:
        with self._job.lock:
            if self._job.live:
                self._rows.write(self._job.rows[self._index], payload)


class _FromRow:
    """Copies rows into new blocks, while their job is live."""

    def __init__(self, job: _Job, refs: Sequence[BlockRef], rows: Rows) -> None:
        self._job, self._rows = job, rows
        self._row_of = {ref.key: row for ref, row in zip(refs, job.rows, strict=True)}

    def fill(self, ref: BlockRef, payload: memoryview) -> None:
        with self._job.lock:
            if not self._job.live:
                raise TimeoutError("the engine no longer holds this row")
            self._rows.read(self._row_of[ref.key], payload)


class Jobs:
    """Transfers of one pool. ``load``, ``store`` and ``finished`` never block; nothing raises for a fault of the pool.

    ``name`` makes a block of one of the engine's keys. ``present`` says which blocks are stored (asked once after each
    store). ``threads`` load in parallel. At most ``most`` blocks wait for these threads, and as many for storing: what
    does not fit fails at once.
    """

    def __init__(
        self,
        pool: Pool,
        rows: Rows,
        name: Callable[[bytes], BlockRef],
        present: Callable[[Sequence[bytes]], Sequence[bool]],
        *,
        threads: int,
        most: int = 65536,
    ) -> None:
        self._pool, self._rows, self._name, self._present, self._most = pool, rows, name, present, most
        self._changed = threading.Condition()
        self._live: dict[int, _Job] = {}
        self._over: deque[Done] = deque()
        self._loads: deque[tuple[_Job, int]] = deque()
        self._stores: deque[tuple[_Job, Callable[[], Sequence[BlockRef]]]] = deque()
        self._to_store = 0
        self._closing = False
        # Daemons, so that a hanging read does not keep the process from ending.
        for number in range(threads):
            threading.Thread(target=self._work_on_loads, name=f"stemkv-tier-load-{number}", daemon=True).start()
        threading.Thread(target=self._work_on_stores, name="stemkv-tier-store", daemon=True).start()

    def load(self, number: int, keys: Sequence[bytes], rows: Sequence[int], timeout_s: float) -> None:
        """Begin to load the blocks of ``keys`` into ``rows``."""
        job = _Job(number, keys, rows, timeout_s, store=False)
        if self._admit(job, len(self._loads)):
            with self._changed:
                self._loads.extend((job, index) for index in range(len(keys)))
                self._changed.notify_all()

    def store(
        self,
        number: int,
        keys: Sequence[bytes],
        rows: Sequence[int],
        timeout_s: float,
        blocks: Callable[[], Sequence[BlockRef]],
    ) -> None:
        """Begin to store ``rows`` as ``blocks()``, those of ``keys``, which is called on a thread of ours."""
        job = _Job(number, keys, rows, timeout_s, store=True)
        if self._admit(job, self._to_store):
            with self._changed:
                self._stores.append((job, blocks))
                self._to_store += len(keys)
                self._changed.notify_all()

    def _admit(self, job: _Job, waiting: int) -> bool:
        with self._changed:
            self._live[job.id] = job
        if self._closing or waiting + len(job.keys) > self._most:
            job.fail(Miss(Cause.CLOSED if self._closing else Cause.DROPPED))
        elif job.keys:
            return True
        self._end(job)
        return False

    def finished(self) -> list[Done]:
        """Jobs that are over since the last call, those that ran out of time among them."""
        now = time.monotonic()
        for job in list(self._live.values()):
            if now >= job.deadline:
                self._end(job)
        over = []
        while self._over:
            over.append(self._over.popleft())
        return over

    def drain(self, timeout_s: float | None = None) -> None:
        """Wait until every job is over, which their deadlines or ``timeout_s`` bring about; then rows are at rest."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._changed:
                jobs = list(self._live.values())
                if not jobs:
                    return
                until = min(job.deadline for job in jobs)
                until = until if end is None else min(until, end)
                if self._changed.wait(max(0.0, until - time.monotonic())):
                    continue
            now = time.monotonic()
            for job in jobs:
                if now >= job.deadline or (end is not None and now >= end):
                    self._end(job)

    def close(self, timeout_s: float) -> None:
        """Finish within ``timeout_s`` what has begun, end the rest; no row is touched afterwards."""
        with self._changed:
            self._closing = True
        self.drain(timeout_s)
        with self._changed:
            self._loads.clear()
            self._stores.clear()
            self._changed.notify_all()

    # -- on threads of ours --------------------------------------------------------------------------------------------

    def _work_on_loads(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._loads or self._closing)
                if not self._loads:
                    return
                job, index = self._loads.popleft()
            if job.live:
                self._loaded(job, index, self._load_one(job, index))

    def _load_one(self, job: _Job, index: int) -> Miss | None:
        try:
            ref = self._name(job.keys[index])
            match = Match(Chain(ref.namespace, ()), 0, (ref,), (0,), None, 0)
            return self._pool.load(match, _ToRow(job, index, self._rows), deadline=job.deadline).get(ref.key)
        except Exception as error:  # the engine's boundary: a fault costs this block, not the process
            log.exception("a block could not be loaded")
            return Miss(Cause.IO_ERROR, type(error).__name__)

    def _loaded(self, job: _Job, index: int, miss: Miss | None) -> None:
        with job.lock:
            if not job.live:
                return
            job.outcome[index] = miss
            job.left -= 1
            last = not job.left
        if last:
            self._end(job)

    def _work_on_stores(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stores or self._closing)
                if not self._stores:
                    return
                job, blocks = self._stores.popleft()
                self._to_store -= len(job.keys)
            if job.live:
                try:
                    self._begin_store(job, blocks())
                except Exception as error:  # the engine's boundary, as above
                    log.exception("%d blocks could not be stored", len(job.keys))
                    job.fail(Miss(Cause.NOT_CAPTURED, type(error).__name__))
                    self._end(job)

    def _begin_store(self, job: _Job, refs: Sequence[BlockRef]) -> None:
        source = _FromRow(job, refs, self._rows)
        queued = self._pool.store(_RefChain(refs), [(0, i) for i in range(len(refs))], source, cost_s=0.0)
        # First in, first out: this runs right after the blocks were stored.
        after = writer.Job(run=lambda: self._stored(job, refs), nbytes=0, keys=(), abandoned=lambda: self._end(job))
        if queued < len(refs) or not self._pool.writer.submit(after):
            job.fail(Miss(Cause.DROPPED))
            self._end(job)

    def _stored(self, job: _Job, refs: Sequence[BlockRef]) -> None:
        here = self._present([ref.key for ref in refs])
        with job.lock:
            if job.live:
                job.outcome = [None if found else Miss(Cause.UNSEEN) for found in here]  # the pool counts why
        self._end(job)

    def _end(self, job: _Job) -> None:
        """Report ``job``, once. Its rows are not touched from here on."""
        with job.lock:
            if not job.live:
                return
            job.live = False
        with self._changed:
            self._live.pop(job.id, None)
            self._over.append(job.done())
            self._changed.notify_all()
