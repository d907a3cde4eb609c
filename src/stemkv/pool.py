"""The pool: ordered tiers behind match, load and store.

Nothing here raises for a fault of a tier, of a source or of a sink; every fault is a miss with a cause and a count.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol, TypeVar

from stemkv import block
from stemkv.guard import Guard, guarded
from stemkv.keys import BlockRef, Chain
from stemkv.match import ABSENT, Match, Presence, refs_to_load, usable_blocks
from stemkv.metrics import Metrics
from stemkv.misses import Cause, Miss, Reasons
from stemkv.sealing import Sealer
from stemkv.tiers.base import Sink, Tier
from stemkv.writer import Job, Writer

log = logging.getLogger("stemkv")
_T = TypeVar("_T")
_ROUND_BLOCKS = 16
_ROUND_BYTES = 64 << 20
"""The writer copies, tags and stores new blocks in rounds of at most this much, but at least one block."""


class BlockSource(Protocol):
    """Where the bytes of new blocks come from. Called on the writer thread, after the answer."""

    def fill(self, ref: BlockRef, payload: memoryview) -> None:
        """Write the whole payload of ``ref`` (``ref.spec.payload_bytes`` bytes, tensors in spec order), or raise.

        A block whose fill raised is not stored; its cause is ``not-captured``.
        """


class _Seen(NamedTuple):
    """What one look at the tiers showed."""

    presence: Presence
    blocks: int
    """Usable blocks."""
    run: int
    """How far the keys and values of all PREFIX groups reach; the limit if there are no such groups."""
    gap: tuple[tuple[int, int], ...]
    """(group, index) of the absent blocks that a longer hit would need first."""
    fault: Miss | None
    """Set if a tier could not say what it has."""


class Pool:
    """Ordered tiers, nearest first. Thread-safe; the methods say which of them block. A context manager that closes.

    ``queue_bytes`` bounds the memory that waits to be stored; beyond it new blocks are dropped and counted.
    ``read_threads`` is how many threads share one load, the caller's among them. ``pending_wait_s`` is how long a
    match waits for a block that this process is just writing.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        sealer: Sealer | None = None,
        queue_bytes: int = 512 << 20,
        read_threads: int = 2,
        pending_wait_s: float = 0.25,
    ) -> None:
        self.tiers = tuple(tiers)
        self.sealer = sealer or Sealer()
        self.metrics = Metrics()
        self.writer = Writer(queue_bytes)
        self._guards = guarded(tiers, self.metrics)
        self._threads = ThreadPoolExecutor(read_threads, thread_name_prefix="stemkv-read")
        self._read_threads = read_threads
        self._pending_wait_s = pending_wait_s
        self._reasons = Reasons()
        self._leased: set[int] = set()
        self._closed = False

    def __enter__(self) -> Pool:  # noqa: PYI034 - typing.Self is not in 3.10
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def match(self, chain: Chain, *, without: Iterable[bytes] = ()) -> Match:
        """The longest run of ``chain`` that can be loaded, leaving at least one token to compute.

        Leases what it returns. ``without`` names keys to treat as absent (those that just failed to load).
        Blocks for a tier lookup and at most ``pending_wait_s``.
        """
        limit = min(len(chain), max(0, chain.token_count - 1) // chain.namespace.identity.block_tokens)
        gone = frozenset(without)
        deadline = time.monotonic() + self._pending_wait_s
        seen = self._look(chain, limit, gone)
        while self._wait_for_pending(chain, seen, gone, deadline):
            seen = self._look(chain, limit, gone)
        refs, where = refs_to_load(chain, seen.presence, seen.blocks)
        match = Match(chain, seen.blocks, refs, where, self._miss(chain, seen, limit), limit)
        if refs:
            self._leased.add(id(match))
            for tier in self._guards:
                tier.lease([r.key for r in refs])
        return match

    def release(self, match: Match) -> None:
        """End the lease of ``match``. Doing so again changes nothing."""
        try:
            self._leased.remove(id(match))
        except KeyError:
            return
        for tier in self._guards:
            tier.release([r.key for r in match.refs])

    def _look(self, chain: Chain, limit: int, gone: frozenset[bytes]) -> _Seen:
        """What the tiers have of the first ``limit`` blocks."""
        identity = chain.namespace.identity
        presence: dict[int, list[int]] = {}
        run, fault = limit, None
        gap: tuple[tuple[int, int], ...] = ()
        # PREFIX groups first: no other group needs looking up beyond their run.
        for group in sorted(range(len(identity.groups)), key=lambda g: not identity.prefix(g)):
            where, failed = self._where(chain.group_keys(group, range(run)), gone)
            fault = fault or failed
            if identity.prefix(group) and ABSENT in where:
                run = where.index(ABSENT)
                gap = ((group, run),)
            presence[group] = where
        by_group = tuple(presence[group] for group in range(len(identity.groups)))
        blocks = usable_blocks(identity.groups, by_group, run, identity.block_tokens)
        if blocks < run:
            gap = tuple(
                (group, index)
                for group, spec in enumerate(identity.groups)
                if not identity.prefix(group)
                for index in spec.blocks_needed(run, identity.block_tokens)
                if by_group[group][index] == ABSENT
            )
        return _Seen(by_group, blocks, run, gap, fault)

    def _where(self, keys: list[bytes], gone: frozenset[bytes]) -> tuple[list[int], Miss | None]:
        """For each key the first tier that has it, else ABSENT; and the first fault of a tier."""
        where, fault = [ABSENT] * len(keys), None
        open_ = [i for i, key in enumerate(keys) if key not in gone]
        for number, tier in enumerate(self._guards):
            if not open_ or self._closed:
                break
            here = tier.contains([keys[i] for i in open_])
            if isinstance(here, Miss):
                fault = fault or here
                continue
            for i, present in zip(open_, here, strict=True):
                if present:
                    where[i] = number
            open_ = [i for i, present in zip(open_, here, strict=True) if not present]
        return where, fault

    def _wait_for_pending(self, chain: Chain, seen: _Seen, gone: frozenset[bytes], deadline: float) -> bool:
        """Wait for the first block of the gap that is being written; False if there is none or it takes too long."""
        for group, index in seen.gap:
            (key,) = chain.group_keys(group, range(index, index + 1))
            if key not in gone and self.writer.pending(key):
                return self.writer.wait_for(key, deadline - time.monotonic())
        return False

    def _miss(self, chain: Chain, seen: _Seen, limit: int) -> Miss | None:
        if seen.blocks == limit:
            return None if limit else Miss(Cause.TOO_SHORT)
        if self._closed:
            return Miss(Cause.CLOSED)
        gap = [chain.ref(group, index) for group, index in seen.gap]
        if any(self.writer.pending(ref.key) for ref in gap):
            return Miss(Cause.PENDING)
        why = next((miss for ref in gap if (miss := self._reasons.get(ref.key)) is not None), seen.fault)
        if why is None and seen.blocks == seen.run:
            why = self._why_absent(gap[0], seen.blocks)
        return why or self._why_no_state(chain, gap[0], seen)

    def _why_absent(self, ref: BlockRef, blocks: int) -> Miss:
        for tier in self._guards:
            found = tier.explain(ref)
            if found is not None:
                return found
        return Miss(Cause.END_OF_STORED if blocks else Cause.UNSEEN)

    def _why_no_state(self, chain: Chain, ref: BlockRef, seen: _Seen) -> Miss:
        """A window or state ``ref`` is missing where keys and values (if the model has any) are there."""
        why = self._why_absent(ref, seen.blocks)
        if why.cause in (Cause.EVICTED, Cause.IO_ERROR):
            return why
        attention = any(chain.namespace.identity.prefix(g) for g in range(len(chain.namespace.identity.groups)))
        if attention or any(tier != ABSENT for where in seen.presence for tier in where[seen.blocks :]):
            return Miss(Cause.NO_STATE)
        # Nothing but states, and none of this text from here on: the text is as absent as it is elsewhere.
        return self._why_absent(chain.ref(0, seen.blocks), seen.blocks)

    def load(self, match: Match, sink: Sink, *, deadline: float | None = None) -> dict[bytes, Miss]:
        """Load every ref of ``match`` into ``sink`` (index = position in ``match.refs``); empty when all arrived.

        Otherwise the keys that failed, with their causes: release the match and match again ``without`` them.
        A block that one tier cannot give is asked of the tiers behind it. Blocks until done or ``deadline``
        (``time.monotonic`` seconds).
        """
        failed: dict[int, Miss] = {}
        given: dict[int, int] = {}
        for number in range(len(self._guards)):
            wanted = [i for i, w in enumerate(match.where) if w == number] + self._second_chance(number, match, failed)
            for i, miss in self._load_from(number, match, sorted(wanted), sink, deadline):
                if miss is None:
                    given[i] = number
                    failed.pop(i, None)
                else:
                    failed.setdefault(i, miss)
        self.metrics.add("wanted_blocks", len(match.refs))
        for i, miss in failed.items():
            self._reasons.remember(match.refs[i].key, miss)
            self.metrics.add("lost_blocks", cause=miss.cause.value)
        self._reasons.forget(match.refs[i].key for i in given)
        self._after_load(match, given)
        return {match.refs[i].key: miss for i, miss in failed.items()}

    def _second_chance(self, number: int, match: Match, failed: dict[int, Miss]) -> list[int]:
        """Which of the blocks that nearer tiers failed to give this tier has."""
        asked = list(failed)
        here = self._guards[number].here([match.refs[i].key for i in asked]) if asked else []
        return [i for i, present in zip(asked, here, strict=True) if present]

    def _load_from(
        self, number: int, match: Match, wanted: list[int], sink: Sink, deadline: float | None
    ) -> list[tuple[int, Miss | None]]:
        if not wanted:
            return []
        tier, started = self._guards[number], time.perf_counter()

        def read(share: list[int]) -> list[tuple[int, Miss | None]]:
            refs = [match.refs[i] for i in share]
            return list(zip(share, tier.get(refs, sink, share, sealer=self.sealer, deadline=deadline), strict=True))

        # Interleaved shares: neighbours in the file system are read by different threads.
        shares = [wanted[i :: self._read_threads] for i in range(min(self._read_threads, len(wanted)))]
        jobs = [self._submit(lambda share=share: read(share)) for share in shares[1:]]  # type: ignore[misc]
        results = read(shares[0])
        for job in jobs:
            results += job.result()
        loaded = [i for i, miss in results if miss is None]
        self.metrics.add("load_seconds", time.perf_counter() - started, tier=tier.name)
        self.metrics.add("loaded_blocks", len(loaded), tier=tier.name)
        self.metrics.add("loaded_bytes", sum(match.refs[i].spec.payload_bytes for i in loaded), tier=tier.name)
        for _, miss in results:
            if miss is not None:
                self.metrics.add("failed_blocks", tier=tier.name, cause=miss.cause.value)
        return results

    def _submit(self, work: Callable[[], _T]) -> Future[_T]:
        """Run ``work`` on a read thread, or here if the pool is being closed."""
        try:
            return self._threads.submit(work)
        except RuntimeError:
            done: Future[_T] = Future()
            done.set_result(work())
            return done

    def _after_load(self, match: Match, given: dict[int, int]) -> None:
        """Note the use, and copy what came from a farther tier into the nearer ones; both in the background.

        Both are worth having, not worth waiting for: when the queue is full they are left out.
        """
        keys = [match.refs[i].key for i in given]
        behind = [(match.refs[i], number) for i, number in given.items() if number]

        def later() -> None:
            for tier in self._guards:
                tier.touch(keys)
            for ref, number in behind:
                self._promote(ref, number)

        # Only one record is in memory at a time.
        nbytes = max((block.record_bytes(ref.spec) for ref, _ in behind), default=0)
        if given and not self.writer.submit(Job(later, nbytes, ())):
            for ref, number in behind:
                self._not_put(self._guards[:number], [ref], self._refused(), by="promotion")

    def _promote(self, ref: BlockRef, number: int) -> None:
        nearer = [tier for tier in self._guards[:number] if not all(tier.here([ref.key]))]
        if not nearer:
            return
        record = self._guards[number].record(ref, sealer=self.sealer)
        if isinstance(record, Miss):
            self._not_put(nearer, [ref], record, by="promotion")
            return
        for tier in nearer:
            self._put(tier, [record], by="promotion")

    def store(self, chain: Chain, blocks: Sequence[tuple[int, int]], source: BlockSource, *, cost_s: float) -> int:
        """Queue ``blocks`` ((group, index) pairs) for storing; never blocks. Returns how many were queued.

        ``cost_s`` is what computing one block took, for eviction. ``source`` must stay readable until the writer
        has called it for each block. Raises IndexError for a block that ``chain`` does not have.
        """
        refs = [chain.ref(group, index) for group, index in blocks]
        if not refs:
            return 0
        self.metrics.add("offered_blocks", len(refs))
        job = Job(
            run=lambda: self._store(refs, source, cost_s),
            nbytes=sum(block.record_bytes(r.spec) for r in refs),
            keys=[r.key for r in refs],
            abandoned=lambda: self._not_queued(refs, Miss(Cause.CLOSED)),
        )
        if self.writer.submit(job):
            return len(refs)
        self._not_queued(refs, self._refused())
        return 0

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until everything queued so far is stored (or has its cause); False on timeout."""
        return self.writer.flush(timeout_s)

    def close(self, timeout_s: float = 30.0) -> bool:
        """Finish writes within ``timeout_s`` and close the tiers; False if something was left undone.

        Later matches are misses, and so are the blocks that a running load has not read yet. May be called twice.
        """
        done = self.writer.close(timeout_s)
        self._closed = True
        self._threads.shutdown(wait=False)
        for tier in self._guards:
            tier.close()
        return done

    def _store(self, refs: Sequence[BlockRef], source: BlockSource, cost_s: float) -> None:
        reusable = not any(tier.keeps_records for tier in self.tiers)
        buffers: dict[int, bytearray] = {}
        for share in _rounds(refs):
            has = [tier.here([r.key for r in share]) for tier in self._guards]
            records: dict[int, block.Record] = {}
            for i, ref in enumerate(share):
                lacking = [tier for tier, here in zip(self._guards, has, strict=True) if not here[i]]
                if not lacking:
                    continue
                buffer = buffers.get(i)
                if reusable and (buffer is None or len(buffer) != block.record_bytes(ref.spec)):
                    buffer = buffers[i] = bytearray(block.record_bytes(ref.spec))
                record = self._capture(ref, source, cost_s, buffer)
                if isinstance(record, Miss):
                    self._not_put(lacking, [ref], record, by="store")
                else:
                    records[i] = record
            for tier, here in zip(self._guards, has, strict=True):
                self.metrics.add("known_blocks", sum(here), tier=tier.name)
                self._put(tier, [record for i, record in records.items() if not here[i]], by="store")

    def _capture(
        self, ref: BlockRef, source: BlockSource, cost_s: float, buffer: bytearray | None
    ) -> block.Record | Miss:
        try:
            data, payload = block.begin(ref, buffer)
            source.fill(ref, payload)
            return block.finish(ref, data, cost_s, self.sealer)
        except Exception as error:  # the engine's boundary: its fault costs this block, not the process
            log.warning("block %s could not be copied out of the engine", ref.key.hex()[:16], exc_info=True)
            return Miss(Cause.NOT_CAPTURED, type(error).__name__)

    def _put(self, tier: Guard, records: list[block.Record], *, by: str) -> None:
        for record, miss in zip(records, tier.put(records) if records else (), strict=True):
            if miss is None:
                self._reasons.forget([record.ref.key])
                self.metrics.add("stored_blocks", tier=tier.name, by=by)
                self.metrics.add("stored_bytes", len(record.data), tier=tier.name, by=by)
            else:
                self._not_put([tier], [record.ref], miss, by=by)

    def _not_put(self, tiers: Sequence[Guard], refs: Sequence[BlockRef], miss: Miss, *, by: str) -> None:
        for tier in tiers:
            self.metrics.add("unstored_blocks", len(refs), tier=tier.name, cause=miss.cause.value, by=by)
        if by == "store":  # what was to be promoted is still where it was
            for ref in refs:
                self._reasons.remember(ref.key, miss)

    def _not_queued(self, refs: Sequence[BlockRef], miss: Miss) -> None:
        self.metrics.add("unstored_blocks", len(refs), tier="queue", cause=miss.cause.value, by="store")
        for ref in refs:
            self._reasons.remember(ref.key, miss)

    def _refused(self) -> Miss:
        return Miss(Cause.CLOSED if self.writer.closing else Cause.DROPPED)


def _rounds(refs: Sequence[BlockRef]) -> Iterator[Sequence[BlockRef]]:
    """``refs`` in shares of bounded memory."""
    start = nbytes = 0
    for at, ref in enumerate(refs):
        size = block.record_bytes(ref.spec)
        if at > start and (at - start == _ROUND_BLOCKS or nbytes + size > _ROUND_BYTES):
            yield refs[start:at]
            start, nbytes = at, 0
        nbytes += size
    if refs:
        yield refs[start:]
