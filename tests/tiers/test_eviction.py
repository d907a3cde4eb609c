"""Any sequence of stores, uses, leases and deletes: leaf first, nothing leased, under the cap, the clock only rises."""

import contextlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stemkv import policy
from stemkv.identity import HitPolicy
from stemkv.keys import Namespace
from stemkv.misses import Cause, Miss
from stemkv.testing import samples
from stemkv.tiers.base import Tier
from stemkv.tiers.file import FileTier
from stemkv.tiers.memory import MemoryTier

from .harness import check_consistent

SIZES = {"memory": 5056, "file": 8192}
CHAINS = [samples.chain(5, seed=seed, shared=seed % 3) for seed in range(5)]
REFS = list({r.key: r for chain in CHAINS for r in samples.refs(chain)}.values())
BY_KEY = {r.key: r for r in REFS}
ROOM = 8

indexes = st.lists(st.integers(0, len(REFS) - 1), min_size=1, max_size=4, unique=True)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), indexes, st.sampled_from([0.0, 0.01, 1.0, 50.0])),
        st.tuples(st.sampled_from(["touch", "lease", "release", "delete"]), indexes, st.just(0.0)),
    ),
    max_size=40,
)


@contextmanager
def tier_of(kind: str, blocks: int) -> Iterator[Tier]:
    with contextlib.ExitStack() as stack:
        if kind == "memory":
            yield MemoryTier(blocks * SIZES[kind])
        else:
            root = stack.enter_context(tempfile.TemporaryDirectory(prefix="stemkv-test-", dir="/dev/shm"))
            tier = FileTier(root, max_bytes=blocks * SIZES[kind], reserve_bytes=0)
            stack.callback(tier.close)
            yield tier
            check_consistent(tier)


def clock(tier: Tier) -> float:
    if isinstance(tier, MemoryTier):
        return tier._clock
    assert isinstance(tier, FileTier)
    reader = tier._store.opened.reader
    assert reader is not None
    return float(reader.query("SELECT clock FROM totals")[0][0])


def present(tier: Tier) -> set[bytes]:
    keys = list(BY_KEY)
    return {key for key, here in zip(keys, tier.contains(keys), strict=True) if here}


@pytest.mark.parametrize("kind", SIZES)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=steps)
def test_whatever_happens_eviction_keeps_its_promises(kind: str, steps: list[tuple[str, list[int], float]]) -> None:
    with tier_of(kind, ROOM) as tier:
        before, time, evicted = set[bytes](), 0.0, 0
        for what, some, cost_s in steps:
            refs = [REFS[i] for i in some]
            keys = [r.key for r in refs]
            if what == "put":
                tier.put(samples.records(refs, cost_s=cost_s))
            else:
                getattr(tier, what)(keys)
            now, stats = present(tier), tier.stats()
            gone = before - now - (set(keys) if what == "delete" else set())
            assert not any(tier.leased(key) for key in gone)
            assert not any(BY_KEY[key].needs in gone for key in now if key in before)
            assert stats.bytes == len(now) * SIZES[kind] <= ROOM * SIZES[kind]
            assert stats.blocks == len(now)
            assert what == "put" or not gone
            assert stats.evicted >= evicted + len(gone)
            assert clock(tier) >= time
            before, time, evicted = now, clock(tier), stats.evicted


@pytest.mark.parametrize("kind", SIZES)
def test_what_costs_most_to_compute_stays(kind: str) -> None:
    with tier_of(kind, 4) as tier:
        firsts = [samples.chain(1, seed=seed).ref(0, 0) for seed in range(8)]
        for cost, ref in zip([50.0, 1.0, 40.0, 2.0, 3.0, 3.5, 0.5, 0.1], firsts, strict=True):
            tier.put([samples.record(ref, cost_s=cost)])
        kept = tier.contains([r.key for r in firsts])
        assert kept[0]
        assert kept[2]
        assert kept[7], "the newest always finds room"


@pytest.mark.parametrize("kind", SIZES)
def test_unused_blocks_age_however_dear_they_were(kind: str) -> None:
    with tier_of(kind, 3) as tier:
        dear = samples.chain(1, seed=1000).ref(0, 0)
        tier.put([samples.record(dear, cost_s=10.0)])
        for seed in range(60):
            tier.put([samples.record(samples.chain(1, seed=seed).ref(0, 0), cost_s=1.0)])
        assert tier.contains([dear.key]) == [False]


@pytest.mark.parametrize("kind", SIZES)
def test_a_chain_longer_than_the_tier_keeps_its_beginning_in_one_put(kind: str) -> None:
    with tier_of(kind, 4) as tier:
        refs = samples.refs(samples.chain(7))
        assert tier.put(samples.records(refs)) == [None] * 4 + [Miss(Cause.NO_SPACE)] * 3
        assert tier.contains([r.key for r in refs]) == [True] * 4 + [False] * 3


@pytest.mark.parametrize("kind", SIZES)
def test_the_blocks_of_a_window_find_room_without_those_before_it(kind: str) -> None:
    """A sliding-window group stores only its last blocks; nothing before them is ever there."""
    space = Namespace(samples.identity(groups=2, policy=HitPolicy.TRAILING))
    with tier_of(kind, 4) as tier:
        tier.put(samples.records(samples.refs(samples.chain(4, of=space))))
        window = samples.refs(samples.chain(6, seed=1, of=space), group=1)[-2:]
        assert tier.put(samples.records(window)) == [None, None]


@pytest.mark.parametrize("kind", SIZES)
def test_a_smaller_cap_is_met_by_the_next_put(kind: str) -> None:
    with tier_of(kind, 8) as tier:
        tier.put(samples.records(samples.refs(samples.chain(8))))
        tier._max_bytes = 3 * SIZES[kind]  # type: ignore[attr-defined]
        assert tier.put(samples.records(samples.refs(samples.chain(1, seed=1)))) == [None]
        assert tier.stats().blocks == 3


def test_priority_rises_with_use_and_cost_and_falls_with_size() -> None:
    base = policy.priority(1.0, 1, 0.1, 1 << 20)
    assert base > 1.0
    assert policy.priority(1.0, 2, 0.1, 1 << 20) > base
    assert policy.priority(1.0, 1, 0.2, 1 << 20) > base
    assert policy.priority(1.0, 1, 0.1, 1 << 21) < base
    assert policy.priority(0.0, 2, 0.0, 4096) > policy.priority(0.0, 1, 0.0, 4096), "also when the cost is unknown"
