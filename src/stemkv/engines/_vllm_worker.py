"""The worker's half of the vLLM connector: loads blocks into KV memory that a request waits for, and stores new ones.

A load runs on a thread. Each block is verified before it is copied into pages that nobody reads until the load is
reported as finished; a load that is given up writes nothing any more from that moment.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from stemkv.block import record_bytes
from stemkv.config import open_pool, read_secret
from stemkv.engines._vllm_identity import Plan
from stemkv.engines._vllm_lookup import Scopes, chain_of
from stemkv.engines._vllm_messages import Handshake, Load, Prompt, Report, Save, Step, Stored
from stemkv.engines._vllm_options import Options
from stemkv.engines._vllm_pages import DeviceCopies, HostCopies, check_memory, copies_of
from stemkv.engines._vllm_threads import Threads
from stemkv.keys import Chain
from stemkv.misses import Cause
from stemkv.tiers.base import Sink
from stemkv.writer import Job

log = logging.getLogger("stemkv")
_THREADS = 2
_TOO_LATE = -1
_NULL_PAGE = 0
"""vLLM's id for a page that is outside a window."""


class Ended(NamedTuple):
    """Loads that have ended."""

    all: set[str]
    failed: set[str]
    pages: set[int]
    """Engine blocks of the failed ones."""


class _GivenUpError(Exception):
    """The load was given up; its pages may be somebody else's by now."""


class _Pages(Sink):
    """Copies verified blocks into pages, until it is given up."""

    def __init__(self, plan: Plan, load: Load, refs: list[Any]) -> None:
        self._plan, self._load, self._refs = plan, load, refs
        self._changed = threading.Condition()
        self._writing = 0
        self._given_up = False

    def accept(self, index: int, payload: memoryview) -> None:
        with self._changed:
            if self._given_up:
                raise _GivenUpError
            self._writing += 1
        try:
            self._write(self._refs[index], payload)
        finally:
            with self._changed:
                self._writing -= 1
                self._changed.notify_all()

    def _write(self, ref: Any, payload: memoryview) -> None:
        group = self._plan.groups[ref.group]
        tokens, first = self._plan.page_tokens[ref.group], ref.index * group.per_block
        ids = self._load.pages[ref.group][first : first + group.per_block]
        # Pages before ``start`` are the engine's own and others may be reading them.
        wanted = [(first + i) * tokens >= self._load.start and page != _NULL_PAGE for i, page in enumerate(ids)]
        group.write(ids, wanted, payload)

    def give_up(self) -> None:
        """Returns when nothing is being written and nothing will be."""
        with self._changed:
            self._given_up = True
            self._changed.wait_for(lambda: not self._writing)


class _Loading:
    """One load and what became of it."""

    def __init__(self, load: Load, deadline: float) -> None:
        self.load, self.deadline = load, deadline
        self.sink: _Pages | None = None
        self.done = False
        self.failed_at: int | None = None
        self._lock = threading.Lock()
        self._given_up = False

    def begin(self, sink: _Pages) -> bool:
        """Whether ``sink`` may be loaded into."""
        with self._lock:
            self.sink = sink
            return not self._given_up

    def give_up(self) -> None:
        with self._lock:
            self._given_up = True
        if self.sink is not None:
            self.sink.give_up()
        self.failed_at = _TOO_LATE


class WorkerSide:
    """State of a worker's half."""

    def __init__(self, options: Options, plan: Plan, *, events: bool) -> None:
        settings = options.settings
        self._options, self._plan = options, plan
        check_memory(plan.groups)
        self.pool = open_pool(settings)
        self._scopes = Scopes([plan.identity], generation=settings.generation, root=read_secret(settings))
        self._threads = Threads("stemkv-load", _THREADS)
        self._prompts: dict[str, Prompt] = {}
        self._chains: dict[str, Chain] = {}
        self._loading: dict[str, _Loading] = {}
        self._report = Report()
        self._events = events
        self._stored: deque[Stored] = deque()
        self._began = time.perf_counter()

    def handshake(self) -> Handshake:
        """Who this worker is."""
        return Handshake(identity=msgspec.msgpack.encode(self._plan.identity))

    def begin(self, step: Step) -> None:
        """A step begins."""
        self._began = time.perf_counter()
        self._prompts.update(step.prompts)
        for name in step.prompts:
            self._chains.pop(name, None)
        for name in step.forget:
            self._prompts.pop(name, None)
            self._chains.pop(name, None)

    # -- loading -------------------------------------------------------------------------------------------------

    def start_loads(self, loads: Iterable[Load]) -> None:
        """Begin loading; never blocks, never raises: a load that cannot begin is one that failed."""
        for load in loads:
            loading = _Loading(load, time.monotonic() + self._options.load_timeout_s)
            self._loading[load.request] = loading
            try:
                prompt = self._prompts[load.request]
                self._threads.submit(lambda loading=loading, prompt=prompt: self._load(loading, prompt))  # type: ignore[misc]
            except Exception:  # a waiting request must be answered, whatever happens
                log.exception("a load could not be started")
                loading.failed_at, loading.done = 0, True

    def _load(self, loading: _Loading, prompt: Prompt) -> None:
        try:
            loading.failed_at = self._load_blocks(loading, prompt)
        except Exception:  # the same
            log.exception("a load failed")
            loading.failed_at = 0
        loading.done = True

    def _load_blocks(self, loading: _Loading, prompt: Prompt) -> int | None:
        """The first block that could not be had, or None if all are there."""
        load = loading.load
        (namespace,) = self._scopes.of(prompt.adapter)
        size = namespace.identity.block_tokens
        match = self.pool.match(chain_of(namespace, prompt, load.stop + 1))
        try:
            if match.tokens < load.stop:
                return match.blocks
            wanted = [i for i, ref in enumerate(match.refs) if (ref.index + 1) * size > load.start]
            part = msgspec.structs.replace(
                match,
                refs=tuple(match.refs[i] for i in wanted),
                where=tuple(match.where[i] for i in wanted),
            )
            sink = _Pages(self._plan, load, list(part.refs))
            if not loading.begin(sink):
                return _TOO_LATE
            lost = self.pool.load(part, sink, deadline=loading.deadline)
            late = any(miss.cause is Cause.DEADLINE for miss in lost.values())
            return _TOO_LATE if late else min((r.index for r in part.refs if r.key in lost), default=None)
        finally:
            self.pool.release(match)

    def poll(self) -> Ended:
        """Loads that have ended since the last call."""
        now = time.monotonic()
        ended: set[str] = set()
        failed: set[str] = set()
        pages: set[int] = set()
        for name, loading in list(self._loading.items()):
            if not loading.done and now < loading.deadline + 0.05:
                continue
            if not loading.done:
                loading.give_up()
            del self._loading[name]
            ended.add(name)
            if loading.failed_at is not None:
                failed.add(name)
                pages.update(page for group in loading.load.pages for page in group)
                self._report.failed[name] = loading.failed_at
        return Ended(ended, failed, pages)

    def in_flight(self) -> set[str]:
        """Requests that are being loaded."""
        return set(self._loading)

    # -- storing -------------------------------------------------------------------------------------------------

    def save(self, step: Step) -> None:
        """Copy out what ``step`` completed and queue it. Returns when the engine may overwrite its blocks."""
        if not step.saves:
            return
        cost_s = (time.perf_counter() - self._began) * self._plan.identity.block_tokens / max(1, step.tokens)
        for save in step.saves:
            copies = copies_of(self._plan.groups)
            chain = self._chain(save.request)
            blocks = self._copy(chain, save, copies)
            copies.taken()
            if blocks and self.pool.store(chain, blocks, copies, cost_s=cost_s) and self._events:
                self._tell_when_stored(self._prompts[save.request].tokens, chain, blocks)

    def _chain(self, name: str) -> Chain:
        if name not in self._chains:
            prompt = self._prompts[name]
            (namespace,) = self._scopes.of(prompt.adapter)
            self._chains[name] = chain_of(namespace, prompt)
        return self._chains[name]

    def _copy(self, chain: Chain, save: Save, copies: HostCopies | DeviceCopies) -> list[tuple[int, int]]:
        """Copy the blocks of ``save`` that are not being stored already; the (group, index) pairs copied."""
        copied: list[tuple[int, int]] = []
        for at, index in enumerate(range(save.first, save.stop)):
            if self.pool.writer.pending(chain.keys[index]):
                continue
            if not self._room():
                self._dropped(len(self._plan.groups))
                continue
            for number, group in enumerate(self._plan.groups):
                ids = save.pages[number][at * group.per_block : (at + 1) * group.per_block]
                if len(ids) == group.per_block and _NULL_PAGE not in ids:
                    copies.take(number, index, ids)
                    copied.append((number, index))
        return copied

    def _room(self) -> bool:
        """Whether the queue would take another block: what it would refuse need not be copied."""
        nbytes = sum(record_bytes(spec) for spec in self._plan.identity.groups)
        queued = self.pool.writer.queued_bytes
        return not queued or queued + nbytes <= self._options.settings.queue_bytes

    def _dropped(self, blocks: int) -> None:
        self.pool.metrics.add("offered_blocks", blocks)
        self.pool.metrics.add("unstored_blocks", blocks, tier="queue", cause=Cause.DROPPED.value, by="store")

    def _tell_when_stored(self, packed: bytes, chain: Chain, blocks: list[tuple[int, int]]) -> None:
        """Report the blocks of the first group, for events, once they are stored: the queue is first in, first out."""
        indexes = [index for group, index in blocks if group == 0]

        def tell() -> None:
            keys = [chain.keys[i] for i in indexes]
            here = [any(found) for found in zip(*(tier.contains(keys) for tier in self.pool.tiers), strict=True)]
            size = chain.namespace.identity.block_tokens
            for i, stored in zip(indexes, here, strict=True):
                if stored:
                    parent = chain.keys[i - 1] if i else b""
                    tokens = packed[4 * i * size : 4 * (i + 1) * size]
                    self._stored.append(Stored(chain.keys[i], parent, tokens))

        self.pool.writer.submit(Job(tell, 0, ()))

    def report(self) -> Report | None:
        """What the scheduler should know."""
        report, self._report = self._report, Report()
        while self._stored:
            report.stored.append(self._stored.popleft())
        return report if report.failed or report.stored else None

    def close(self) -> None:
        """End; what waits to be stored gets a moment."""
        self.pool.close(5.0)
