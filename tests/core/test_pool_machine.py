"""Random operations on a pool of two tiers with faults, against what the tiers really hold.

After every step: a hit is exactly the bytes that were stored for exactly these tokens, a match reaches exactly as far
as the tiers allow, every miss has a cause, leases are those of the matches held, and the counters add up.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stemkv import block
from stemkv.block import Record
from stemkv.identity import HitPolicy
from stemkv.keys import BlockRef, Chain
from stemkv.match import Match
from stemkv.misses import Cause, Miss
from stemkv.pool import Pool
from stemkv.tiers.base import Sink
from stemkv.tiers.memory import MemoryTier

from . import make
from .test_pool_faults import check_sums

GROUPS = (make.PREFIX, make.TRAILING, make.EXACT)
SPACES = [
    make.namespace(*GROUPS, tenant="a"),
    make.namespace(*GROUPS, tenant="b"),
    make.namespace(*GROUPS, tenant="a", generation=1),
    make.namespace(*GROUPS, tenant="a", kv_dtype="F16"),
]
# Prompts that share beginnings, of different lengths.
TEXTS = [[*range(25)], [*range(12), *range(50, 63)], [*range(9)], [*range(100, 117)], [*range(16)], []]
chains = st.builds(Chain, st.sampled_from(SPACES), st.sampled_from(TEXTS))
TIERS = (0, 1)


class Faulty(MemoryTier):
    """A memory tier whose next calls can be made to go wrong, within the contract or against it."""

    def __init__(self, name: str, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self.name = name
        self.faults: dict[str, str] = {}

    def _next(self, call: str) -> str:
        return self.faults.pop(call, "")

    def _misbehave(self, how: str, count: int) -> list[Any]:
        if how == "raise":
            raise RuntimeError("boom")
        if how == "short":
            return []
        if how == "lie":
            return [None] * count
        return [Miss(Cause.IO_ERROR, "EIO")] * count

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        how = self._next("contains")
        if how == "lie":
            return [True] * len(keys)
        return self._misbehave(how, len(keys)) if how in {"raise", "short"} else super().contains(keys)

    def get(self, refs: Sequence[BlockRef], sink: Sink, **options: Any) -> list[Miss | None]:
        how = self._next("get")
        return self._misbehave(how, len(refs)) if how else super().get(refs, sink, **options)

    def put(self, records: Sequence[Record]) -> list[Miss | None]:
        how = self._next("put")
        return self._misbehave(how, len(records)) if how and how != "lie" else super().put(records)

    def explain(self, ref: BlockRef) -> Miss | None:
        self._misbehave(self._next("explain").replace("short", "").replace("lie", ""), 0)
        return super().explain(ref)


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        logging.getLogger("stemkv").setLevel(logging.CRITICAL)
        size = block.record_bytes(make.PREFIX)
        self.tiers = [Faulty("near", 8 * size), Faulty("far", 40 * size)]
        self.pool = Pool(self.tiers, pending_wait_s=0.0)
        self.held: list[Match] = []
        self.ever_stored: set[bytes] = set()

    # What happens

    @rule(chain=chains, upto=st.integers(0, 7), states=st.booleans())
    def store(self, chain: Chain, upto: int, states: bool) -> None:
        blocks = [(g, i) for i in range(min(upto, len(chain))) for g in (0, 1)]
        if states and blocks:
            blocks.append((2, blocks[-1][1]))
        assert self.pool.store(chain, blocks, make.Source(), cost_s=0.1) == len(blocks)
        assert self.pool.flush(10)
        self.ever_stored.update(chain.ref(*b).key for b in blocks)

    @rule(chain=chains, bad=st.integers(0, 3))
    def store_from_a_broken_source(self, chain: Chain, bad: int) -> None:
        class Broken(make.Source):
            def fill(self, ref: BlockRef, payload: memoryview) -> None:
                payload[:] = b"\xee" * len(payload)
                raise ValueError

        self.pool.store(chain, [(0, i) for i in range(min(bad, len(chain)))], Broken(), cost_s=0.1)
        assert self.pool.flush(10)

    @rule(chain=chains, hold=st.booleans())
    def match_and_load(self, chain: Chain, hold: bool) -> None:
        sound = not any(tier.faults for tier in self.tiers)
        match = self.pool.match(chain)
        if sound:
            assert match.blocks == self.reachable(chain)
        assert (match.miss is None) == (match.blocks == match.limit > 0)
        sink = make.Collected()
        failed = self.pool.load(match, sink)
        assert len(failed) + len(sink.payloads) >= len(match.refs)
        for i, ref in enumerate(match.refs):
            if ref.key not in failed:
                assert sink.payloads[i] == make.content(ref), "a hit with other bytes"
                assert ref.key in self.ever_stored
        if failed:
            again = self.pool.match(chain, without=failed)
            assert not {r.key for r in again.refs} & set(failed)
            assert again.miss is not None
            self.pool.release(again)
        if hold:
            self.held.append(match)
        else:
            self.pool.release(match)
        assert self.pool.flush(10)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), twice=st.booleans())
    def release(self, data: st.DataObject, twice: bool) -> None:
        match = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        for _ in range(1 + twice):
            self.pool.release(match)

    # What goes wrong

    @rule(tier=st.sampled_from(TIERS), call=st.sampled_from(["contains", "get", "put", "explain"]),
          how=st.sampled_from(["raise", "short", "lie", "miss"]))  # fmt: skip
    def fault(self, tier: int, call: str, how: str) -> None:
        self.tiers[tier].faults[call] = how

    @rule(tier=st.sampled_from(TIERS), data=st.data())
    def corrupt(self, tier: int, data: st.DataObject) -> None:
        self.change(tier, data, lambda raw: raw.__setitem__(at := len(raw) // 2, raw[at] ^ 1))

    @rule(tier=st.sampled_from(TIERS), data=st.data())
    def swap(self, tier: int, data: st.DataObject) -> None:
        """Put another block's bytes under a key."""
        entries = self.tiers[tier]._entries
        if len(entries) > 1:
            one, other = data.draw(st.permutations(sorted(entries)))[:2]
            entries[one].record, entries[other].record = (
                block.Record(entries[a].record.ref, entries[b].record.data, entries[b].record.tag, 0.1, 0.0)
                for a, b in ((one, other), (other, one))
            )
            sizes = [len(entries[k].record.data) for k in entries]
            self.tiers[tier]._bytes = sum(sizes)

    def change(self, tier: int, data: st.DataObject, how: Callable[[bytearray], None]) -> None:
        entries = self.tiers[tier]._entries
        if entries:
            entry = entries[data.draw(st.sampled_from(sorted(entries)))]
            old = entry.record
            raw = bytearray(old.data)
            how(raw)
            entry.record = block.Record(old.ref, memoryview(bytes(raw)), old.tag, old.cost_s, old.created)

    @rule(tier=st.sampled_from(TIERS), data=st.data())
    def delete(self, tier: int, data: st.DataObject) -> None:
        keys = sorted(self.tiers[tier]._entries)
        if keys:
            self.tiers[tier].delete(data.draw(st.lists(st.sampled_from(keys), max_size=4)))

    # What always holds

    def reachable(self, chain: Chain) -> int:
        """The longest boundary for which some tier has each needed block, by brute force."""
        here = {key for tier in self.tiers for key in tier._entries}
        limit = max(0, chain.token_count - 1) // make.BLOCK_TOKENS

        def possible(n: int) -> bool:
            needed = [(0, range(n)), (1, range(max(0, n - 2), n)), (2, range(n - 1, n))]
            return all(k in here for g, indexes in needed for k in chain.group_keys(g, indexes))

        return max((n for n in range(1, limit + 1) if possible(n)), default=0)

    @invariant()
    def counters_add_up(self) -> None:
        check_sums(self.pool)
        assert self.pool.writer.queued_bytes == 0

    @invariant()
    def leases_are_those_of_the_matches_held(self) -> None:
        expected = Counter(ref.key for match in self.held for ref in match.refs)
        for tier in self.tiers:
            assert tier._leases == expected

    @invariant()
    def tiers_keep_their_bounds(self) -> None:
        for tier in self.tiers:
            stats = tier.stats()
            assert stats.bytes == sum(len(e.record.data) for e in tier._entries.values()) <= stats.max_bytes

    def teardown(self) -> None:
        assert self.pool.close(10)
        assert self.pool.match(Chain(SPACES[0], range(9))).miss == Miss(Cause.CLOSED)
        check_sums(self.pool)
        logging.getLogger("stemkv").setLevel(logging.NOTSET)


assert [g.policy for g in GROUPS] == [HitPolicy.PREFIX, HitPolicy.TRAILING, HitPolicy.EXACT]
PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
TestPoolMachine = PoolMachine.TestCase
