"""The pool: what a match covers, why it ends, what loading does, in sound tiers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from stemkv import block
from stemkv.identity import GroupSpec
from stemkv.keys import Chain
from stemkv.misses import Cause, Miss
from stemkv.pool import Pool
from stemkv.sealing import Sealer
from stemkv.tiers.base import Tier
from stemkv.tiers.file import FileTier
from stemkv.tiers.memory import MemoryTier

from . import make

SIZE = block.record_bytes(make.PREFIX)


def leased(tier: Tier) -> int:
    return sum(tier._leases.values())


# Matching


def test_nothing_stored_is_unseen_and_loads_nothing() -> None:
    with make.two()[0] as pool:
        match = pool.match(make.chain(3))
        assert (match.blocks, match.tokens, match.limit, match.refs, match.miss) == (0, 0, 3, (), Miss(Cause.UNSEEN))
        assert pool.load(match, make.Collected()) == {}


def test_a_pool_without_tiers_serves_and_stores_nothing() -> None:
    with Pool([]) as pool:
        source = make.Source()
        assert pool.store(make.chain(2), [(0, 0), (0, 1)], source, cost_s=0.1) == 2
        assert pool.flush(10)
        assert not source.filled, "nothing is copied for nobody"
        assert make.fetched(pool, make.chain(2)) == (0, Miss(Cause.UNSEEN))


def test_the_rest_of_a_longer_prompt_is_new() -> None:
    with make.two()[0] as pool:
        make.store(pool, make.chain(3))
        assert make.fetched(pool, make.chain(5)) == (3, Miss(Cause.END_OF_STORED))


def test_another_continuation_is_diverged_and_other_text_unseen() -> None:
    with make.two()[0] as pool:
        ns = make.namespace()
        make.store(pool, Chain(ns, range(17)))
        assert make.fetched(pool, Chain(ns, [*range(8), 99, 99, 99, 99, 99])) == (2, Miss(Cause.DIVERGED))
        assert make.fetched(pool, Chain(ns, [99] * 17)) == (0, Miss(Cause.UNSEEN))


def test_a_prompt_longer_than_a_tier_is_found_in_two() -> None:
    pool, near, _far = make.two(near=2)
    with pool:
        make.store(pool, make.chain(4))
        assert near.stats().blocks == 2
        match = pool.match(make.chain(4))
        assert match.blocks == 4
        assert sorted(match.where) in ([0, 0, 1, 1], [0, 1, 1, 1])
        pool.release(match)
        assert make.fetched(pool, make.chain(4)) == (4, None)


@pytest.mark.parametrize("gone", range(5))
def test_keys_named_as_failed_are_absent(gone: int) -> None:
    with make.two()[0] as pool:
        prompt = make.chain(5)
        make.store(pool, prompt)
        match = pool.match(prompt, without=iter([prompt.keys[gone]]))
        assert match.blocks == gone
        assert match.miss is not None
        pool.release(match)


def test_names_without_survive_the_wait_for_pending_blocks() -> None:
    """An iterator given as ``without`` must count in the second look too."""
    pool, _near, _far = make.two()
    with pool:
        prompt = make.chain(3)
        make.store(pool, prompt, [(0, 0), (0, 1)])
        pool.store(prompt, [(0, 2)], make.Slow(0.1), cost_s=0.1)
        assert pool.match(prompt, without=iter([prompt.keys[1]])).blocks == 1


# Groups with states and windows

HYBRID = (make.PREFIX, make.TRAILING, make.EXACT)


def test_keys_and_values_without_a_state_are_no_state() -> None:
    with make.two()[0] as pool:
        prompt = make.chain(6, ns=make.namespace(*HYBRID))
        make.store(pool, prompt, [(0, i) for i in range(6)] + [(1, i) for i in range(6)] + [(2, 2)])
        assert make.fetched(pool, prompt) == (3, Miss(Cause.NO_STATE))


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0), (1, 2, 0)])
def test_the_cause_does_not_depend_on_which_group_is_first(order: Sequence[int]) -> None:
    """Group 0 may be a window or a state; the attention group then is another."""
    groups = tuple(HYBRID[i] for i in order)
    attention = groups.index(make.PREFIX)
    ns = make.namespace(*groups)
    with make.two()[0] as pool:
        stored = Chain(ns, range(17))
        make.store(pool, stored)
        assert make.fetched(pool, stored) == (4, None)
        assert make.fetched(pool, Chain(ns, range(25))) == (4, Miss(Cause.END_OF_STORED))
        assert make.fetched(pool, Chain(ns, [99] * 25)) == (0, Miss(Cause.UNSEEN))
        other = make.namespace(*groups, kv_dtype="F16")
        assert make.fetched(pool, Chain(other, range(17))) == (0, Miss(Cause.IDENTITY, "kv_dtype"))
        for tier in pool.tiers:
            tier.delete(stored.group_keys(attention, range(3, 4)))
        assert make.fetched(pool, stored)[0] == 3


@pytest.mark.parametrize("groups", [(make.EXACT,), (make.TRAILING,), (make.TRAILING, make.EXACT)])
def test_models_without_attention_over_everything_have_sensible_causes(groups: tuple[GroupSpec, ...]) -> None:
    ns = make.namespace(*groups)
    with make.two()[0] as pool:
        stored = Chain(ns, range(17))
        assert make.fetched(pool, stored) == (0, Miss(Cause.UNSEEN))
        make.store(pool, stored)
        assert make.fetched(pool, stored) == (4, None)
        assert make.fetched(pool, Chain(ns, range(25))) == (4, Miss(Cause.END_OF_STORED))
        other = make.namespace(*groups, kv_dtype="F16")
        assert make.fetched(pool, Chain(other, range(17))) == (0, Miss(Cause.IDENTITY, "kv_dtype"))
        for tier in pool.tiers:
            tier.delete(stored.group_keys(len(groups) - 1, range(3, 4)))
        assert make.fetched(pool, stored)[0] == 3


def test_a_state_that_failed_to_load_says_why_rather_than_no_state() -> None:
    pool, _near, far = make.two(near=1, far=1000)
    with pool:
        prompt = make.chain(3, ns=make.namespace(*HYBRID))
        make.store(pool, prompt)
        (state,) = prompt.group_keys(2, range(2, 3))
        damage(far, state)
        match = pool.match(prompt)
        failed = pool.load(match, make.Collected())
        pool.release(match)
        assert failed == {state: Miss(Cause.BAD_TAG)}
        again = pool.match(prompt, without=failed)
        assert (again.blocks, again.miss) == (2, Miss(Cause.BAD_TAG))


def damage(tier: MemoryTier, key: bytes) -> None:
    """Change a payload byte of a stored record behind the tier's back."""
    rec = tier._entries[key].record
    data = bytearray(rec.data)
    data[-1] ^= 1
    tier._entries[key].record = block.Record(rec.ref, memoryview(bytes(data)), rec.tag, rec.cost_s, rec.created)


# Leases


def test_a_match_leases_its_blocks_in_every_tier_until_released_once() -> None:
    pool, near, far = make.two()
    with pool:
        make.store(pool, make.chain(3))
        one, other = pool.match(make.chain(3)), pool.match(make.chain(3))
        assert leased(near) == leased(far) == 6
        pool.release(one)
        pool.release(one)  # must not take the other's lease away
        assert leased(near) == leased(far) == 3
        assert all(near.leased(k) for k in make.chain(3).keys)
        pool.release(other)
        assert leased(near) == leased(far) == 0


def test_a_match_that_found_nothing_leases_nothing() -> None:
    pool, near, far = make.two()
    with pool:
        match = pool.match(make.chain(3))
        assert leased(near) == leased(far) == 0
        pool.release(match)


def test_leased_blocks_are_not_evicted_while_they_are_loaded() -> None:
    pool, _near, _far = make.two(near=4, far=4)
    with pool:
        make.store(pool, make.chain(4))
        match = pool.match(make.chain(4))
        make.store(pool, make.chain(4, first=100))
        assert pool.load(match, make.Collected()) == {}
        pool.release(match)


# Loading


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("sealed", [False, True])
def test_every_block_arrives_once_at_its_place(threads: int, sealed: bool) -> None:
    sealer = Sealer(make.SECRET, seal=sealed)
    with Pool([make.Named("near", 3), make.Named("far")], sealer=sealer, read_threads=threads) as pool:
        for blocks in (1, 2, 3, 9):
            prompt = make.chain(blocks, first=100 * blocks, ns=make.namespace(*HYBRID))
            make.store(pool, prompt)
            assert make.fetched(pool, prompt) == (blocks, None)


def test_a_damaged_block_is_taken_from_the_next_tier_and_mended() -> None:
    pool, near, _far = make.two()
    with pool:
        prompt = make.chain(4)
        make.store(pool, prompt)
        damage(near, prompt.keys[1])
        assert make.fetched(pool, prompt) == (4, None)
        assert pool.flush(10)
        assert pool.metrics.total("failed_blocks", tier="near", cause="bad-tag") == 1
        assert pool.metrics.total("lost_blocks") == 0
        assert near.stats().quarantined == 1
        assert all(near.contains(prompt.keys)), "the good copy came back"
        assert make.fetched(pool, prompt) == (4, None)


def test_a_block_damaged_everywhere_is_reported_with_the_nearest_cause_and_computed_again() -> None:
    pool, near, far = make.two()
    with pool:
        prompt = make.chain(4)
        make.store(pool, prompt)
        damage(near, prompt.keys[2])
        damage(far, prompt.keys[2])
        match, sink = pool.match(prompt), make.Collected()
        failed = pool.load(match, sink)
        assert failed == {prompt.keys[2]: Miss(Cause.BAD_TAG)}
        assert sink.payloads == {i: make.content(r) for i, r in enumerate(match.refs) if i != 2}
        pool.release(match)
        again = pool.match(prompt, without=failed)
        assert (again.blocks, again.miss) == (2, Miss(Cause.BAD_TAG))
        pool.release(again)
        make.store(pool, prompt)
        assert make.fetched(pool, prompt) == (4, None)


def test_a_block_that_vanished_after_the_match_keeps_its_own_cause() -> None:
    pool, near, far = make.two(near=4, far=4)
    with pool:
        prompt = make.chain(2)
        make.store(pool, prompt)
        match = pool.match(prompt)
        near.delete(prompt.keys)
        far.delete(prompt.keys)
        assert set(pool.load(match, make.Collected()).values()) == {Miss(Cause.EVICTED)}


def test_what_loads_again_forgets_its_old_reason() -> None:
    pool, near, far = make.two()
    with pool:
        prompt = make.chain(1)
        make.store(pool, prompt)
        match = pool.match(prompt)
        late = pool.load(match, make.Collected(), deadline=time.monotonic() - 1)
        assert late == {prompt.keys[0]: Miss(Cause.DEADLINE)}
        assert make.fetched(pool, prompt) == (1, None)
        near.delete(prompt.keys)
        far.delete(prompt.keys)
        assert pool.match(prompt).miss == Miss(Cause.UNSEEN)


def test_a_deadline_that_has_passed_reads_nothing() -> None:
    pool, _near, _far = make.two()
    with pool:
        prompt = make.chain(5)
        make.store(pool, prompt)
        match, sink = pool.match(prompt), make.Collected()
        failed = pool.load(match, sink, deadline=time.monotonic())
        assert not sink.payloads
        assert failed == dict.fromkeys(prompt.keys, Miss(Cause.DEADLINE))
        assert pool.metrics.total("lost_blocks", cause="deadline") == 5


def test_blocks_from_a_farther_tier_are_promoted_verbatim() -> None:
    pool, near, far = make.two()
    with pool:
        prompt = make.chain(3)
        make.store(pool, prompt)
        near.delete(prompt.keys)
        before = {k: far._entries[k].record for k in prompt.keys}
        assert make.fetched(pool, prompt) == (3, None)
        assert pool.flush(10)
        for key, rec in before.items():
            copied = near._entries[key].record
            assert (bytes(copied.data), copied.tag) == (bytes(rec.data), rec.tag)
            assert copied.cost_s == rec.cost_s
            assert copied.created == pytest.approx(rec.created, abs=1e-3)
        assert pool.metrics.total("stored_blocks", tier="near", by="promotion") == 3
        assert set(pool.match(prompt).where) == {0}


def test_promotion_from_files_keeps_the_seal(tmp_path: Path) -> None:
    sealer = Sealer(make.SECRET, seal=True)
    near, far = make.Named("near"), FileTier(tmp_path, max_bytes=1 << 20, reserve_bytes=0)
    with Pool([near, far], sealer=sealer) as pool:
        prompt = make.chain(3)
        make.store(pool, prompt)
        near.delete(prompt.keys)
        assert make.fetched(pool, prompt) == (3, None)
        assert pool.flush(10)
        for i, key in enumerate(prompt.keys):
            assert make.content(prompt.ref(0, i)) not in bytes(near._entries[key].record.data)
        assert make.fetched(pool, prompt) == (3, None)
