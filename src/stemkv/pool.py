"""The pool: ordered tiers behind match, load and store.

Nothing here raises for a fault of a tier; every fault is a miss with a cause and a count.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from stemkv import block
from stemkv.keys import BlockRef, Chain
from stemkv.match import ABSENT, Match, Presence, refs_to_load, usable_blocks
from stemkv.metrics import Metrics
from stemkv.misses import Cause, Miss
from stemkv.sealing import Sealer
from stemkv.tiers.base import Sink, Tier
from stemkv.writer import Job, Writer

_REMEMBERED = 65536
"""How many reasons for absent keys are remembered; a reason takes about 300 bytes."""


class BlockSource(Protocol):
    """Where the bytes of new blocks come from. Called on the writer thread, after the answer."""

    def fill(self, ref: BlockRef, payload: memoryview) -> None:
        """Write the payload of ``ref`` (``ref.spec.payload_bytes`` bytes, tensors in spec order)."""


class Pool:
    """Ordered tiers, nearest first. Thread-safe; the methods say which of them block.

    ``queue_bytes`` bounds the memory that waits to be stored; beyond it new blocks are dropped and counted.
    ``pending_wait_s`` is how long a match waits for a block that this process is just writing.
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
        self._threads = ThreadPoolExecutor(read_threads, thread_name_prefix="stemkv-read")
        self._read_threads = read_threads
        self._pending_wait_s = pending_wait_s
        self._reasons: OrderedDict[bytes, Miss] = OrderedDict()
        self._closed = False

    # -- match ---------------------------------------------------------------------------------------------

    def match(self, chain: Chain, *, without: Iterable[bytes] = ()) -> Match:
        """The longest run of ``chain`` that can be loaded, leaving at least one token to compute.

        Leases what it returns. ``without`` names keys to treat as absent (those that just failed to load).
        Blocks for a tier lookup and at most ``pending_wait_s``.
        """
        identity = chain.namespace.identity
        limit = min(len(chain), max(0, chain.token_count - 1) // identity.block_tokens)
        presence, blocks, run = self._look(chain, limit, without)
        if run < limit and self._wait_for_pending(chain, run):
            presence, blocks, run = self._look(chain, limit, without)
        refs, where = refs_to_load(chain, presence, blocks)
        match = Match(chain, blocks, refs, where, self._miss(chain, blocks, run, limit), limit)
        for tier in self.tiers:
            tier.lease([r.key for r in refs])
        return match

    def release(self, match: Match) -> None:
        """End the lease of ``match``."""
        for tier in self.tiers:
            tier.release([r.key for r in match.refs])

    def _look(self, chain: Chain, limit: int, without: Iterable[bytes]) -> tuple[Presence, int, int]:
        """(presence, usable blocks, length of the run of keys and values) of the first ``limit`` blocks."""
        identity, gone = chain.namespace.identity, frozenset(without)
        presence: dict[int, list[int]] = {}
        run = limit
        # PREFIX groups first: no other group needs looking up beyond their run.
        for group in sorted(range(len(identity.groups)), key=lambda g: not identity.prefix(g)):
            where = self._where(chain.group_keys(group, range(run)), gone)
            if identity.prefix(group):
                run = next((i for i, tier in enumerate(where) if tier == ABSENT), run)
            presence[group] = where
        by_group = tuple(presence[group] for group in range(len(identity.groups)))
        return by_group, usable_blocks(identity.groups, by_group, run, identity.block_tokens), run

    def _where(self, keys: list[bytes], gone: frozenset[bytes]) -> list[int]:
        """For each key the first tier that has it, else ABSENT."""
        where = [ABSENT] * len(keys)
        for number, tier in enumerate(self.tiers):
            open_ = [i for i, t in enumerate(where) if t == ABSENT]
            if not open_:
                break
            for i, here in zip(open_, tier.contains([keys[i] for i in open_]), strict=True):
                if here and keys[i] not in gone:
                    where[i] = number
        return where

    def _wait_for_pending(self, chain: Chain, run: int) -> bool:
        key = chain.keys[run]
        return self.writer.pending(key) and self.writer.wait_for(key, self._pending_wait_s)

    def _miss(self, chain: Chain, blocks: int, run: int, limit: int) -> Miss | None:
        if limit == 0:
            return Miss(Cause.TOO_SHORT)
        if blocks == limit:
            return None
        if self._closed:
            return Miss(Cause.CLOSED)
        if blocks < run:
            return Miss(Cause.NO_STATE)
        return self._why_absent(chain, run)

    def _why_absent(self, chain: Chain, index: int) -> Miss:
        ref = chain.ref(0, index)
        if self.writer.pending(ref.key):
            return Miss(Cause.PENDING)
        if ref.key in self._reasons:
            return self._reasons[ref.key]
        for tier in self.tiers:
            found = tier.explain(ref)
            if found is not None:
                return found
        return Miss(Cause.END_OF_STORED if index else Cause.UNSEEN)

    # -- load ----------------------------------------------------------------------------------------------

    def load(self, match: Match, sink: Sink, *, deadline: float | None = None) -> dict[bytes, Miss]:
        """Load every ref of ``match`` into ``sink`` (index = position in ``match.refs``); empty when all arrived.

        Otherwise the keys that failed, with their causes: release the match and match again ``without`` them.
        A block that one tier cannot give is asked of the tiers behind it. Blocks until done or ``deadline``.
        """
        failed: dict[int, Miss] = {}
        for number in range(len(self.tiers)):
            wanted = [i for i, w in enumerate(match.where) if w == number or (i in failed and w < number)]
            if not wanted:
                continue
            for i, miss in zip(wanted, self._load_from(number, match, wanted, sink, deadline), strict=True):
                failed.pop(i, None)
                if miss is not None:
                    failed[i] = miss
        for i, miss in failed.items():
            self._remember(match.refs[i].key, miss)
        self._after_load(match, failed)
        return {match.refs[i].key: miss for i, miss in failed.items()}

    def _load_from(
        self, number: int, match: Match, wanted: list[int], sink: Sink, deadline: float | None
    ) -> list[Miss | None]:
        tier, started = self.tiers[number], time.perf_counter()
        # Interleaved shares: neighbours in the file system are read by different threads.
        shares = [wanted[i :: self._read_threads] for i in range(min(self._read_threads, len(wanted)))]
        jobs = [
            self._threads.submit(
                tier.get,
                [match.refs[i] for i in share],
                _Renumbered(sink, share),
                sealer=self.sealer,
                deadline=deadline,
            )
            for share in shares[1:]
        ]
        results = dict(zip(shares[0], tier.get([match.refs[i] for i in shares[0]], _Renumbered(sink, shares[0]),
                           sealer=self.sealer, deadline=deadline), strict=True))  # fmt: skip
        for share, job in zip(shares[1:], jobs, strict=True):
            results.update(zip(share, job.result(), strict=True))
        loaded = [i for i in wanted if results[i] is None]
        self.metrics.add("load_seconds", time.perf_counter() - started, tier=tier.name)
        self.metrics.add("loaded_blocks", len(loaded), tier=tier.name)
        self.metrics.add("loaded_bytes", sum(match.refs[i].spec.payload_bytes for i in loaded), tier=tier.name)
        for i in wanted:
            miss = results[i]
            if miss is not None:
                self.metrics.add("failed_blocks", tier=tier.name, cause=miss.cause.value)
        return [results[i] for i in wanted]

    def _after_load(self, match: Match, failed: dict[int, Miss]) -> None:
        """Note the use, and copy what came from a farther tier into the nearer ones; both in the background."""
        refs = [r for i, r in enumerate(match.refs) if i not in failed]
        behind = [i for i, w in enumerate(match.where) if w > 0 and i not in failed]
        keys = [r.key for r in refs]

        def later() -> None:
            for tier in self.tiers:
                tier.touch(keys)
            for i in behind:
                self._promote(match.refs[i], match.where[i])

        self.writer.submit(Job(later, sum(block.record_bytes(match.refs[i].spec) for i in behind), ()))

    def _promote(self, ref: BlockRef, number: int) -> None:
        record = self.tiers[number].record(ref, sealer=self.sealer)
        if isinstance(record, block.Record):
            for tier in self.tiers[:number]:
                self._put(tier, [record])

    # -- store ---------------------------------------------------------------------------------------------

    def store(self, chain: Chain, blocks: Sequence[tuple[int, int]], source: BlockSource, *, cost_s: float) -> int:
        """Queue ``blocks`` ((group, index) pairs) for storing; never blocks. Returns how many were queued.

        ``cost_s`` is what computing one block took, for eviction. ``source`` must stay readable until the writer
        has called it for each block.
        """
        refs = [chain.ref(group, index) for group, index in blocks]
        nbytes = sum(block.record_bytes(r.spec) for r in refs)
        job = Job(lambda: self._store(refs, source, cost_s), nbytes, [r.key for r in refs])
        if refs and not self.writer.submit(job):
            self.metrics.add("unstored_blocks", len(refs), tier="queue", cause=Cause.DROPPED.value)
            for ref in refs:
                self._remember(ref.key, Miss(Cause.DROPPED))
            return 0
        return len(refs)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until everything queued is stored; False on timeout."""
        return self.writer.flush(timeout_s)

    def close(self, timeout_s: float = 30.0) -> bool:
        """Finish writes within ``timeout_s`` and close the tiers. Later matches are misses. May be called twice."""
        done = self.writer.close(timeout_s)
        self._closed = True
        self._threads.shutdown(wait=True)
        for tier in self.tiers:
            tier.close()
        return done

    def _store(self, refs: Sequence[BlockRef], source: BlockSource, cost_s: float) -> None:
        for start in range(0, len(refs), 16):  # bounds the memory of one round
            share = refs[start : start + 16]
            missing = [tier.contains([r.key for r in share]) for tier in self.tiers]
            records = {}
            for i, ref in enumerate(share):
                if all(here[i] for here in missing):
                    continue
                data, payload = block.begin(ref)
                source.fill(ref, payload)
                records[i] = block.finish(ref, data, cost_s, self.sealer)
            for tier, here in zip(self.tiers, missing, strict=True):
                self._put(tier, [record for i, record in records.items() if not here[i]])

    def _put(self, tier: Tier, records: list[block.Record]) -> None:
        if not records:
            return
        for record, miss in zip(records, tier.put(records), strict=True):
            if miss is None:
                self._reasons.pop(record.ref.key, None)
                self.metrics.add("stored_blocks", tier=tier.name)
                self.metrics.add("stored_bytes", len(record.data), tier=tier.name)
            else:
                self._remember(record.ref.key, miss)
                self.metrics.add("unstored_blocks", tier=tier.name, cause=miss.cause.value)

    def _remember(self, key: bytes, miss: Miss) -> None:
        self._reasons[key] = miss
        while len(self._reasons) > _REMEMBERED:
            self._reasons.popitem(last=False)


class _Renumbered(Sink):
    """A share of another sink's indexes."""

    def __init__(self, sink: Sink, indexes: Sequence[int]) -> None:
        self._sink, self._indexes = sink, indexes

    def buffer(self, index: int, nbytes: int) -> memoryview | None:
        return self._sink.buffer(self._indexes[index], nbytes)

    def accept(self, index: int, payload: memoryview) -> None:
        self._sink.accept(self._indexes[index], payload)
