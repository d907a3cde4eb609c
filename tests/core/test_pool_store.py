"""The pool: storing in the background, and closing, in sound tiers."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from stemkv import block
from stemkv.block import Record
from stemkv.identity import GroupSpec, HitPolicy, TensorSpec
from stemkv.misses import Cause, Miss, Reasons
from stemkv.pool import Pool, _rounds
from stemkv.tiers.file import FileTier

from . import make

SIZE = block.record_bytes(make.PREFIX)


def test_storing_does_not_block_and_a_full_queue_drops_with_a_cause() -> None:
    pool, _near, _far = make.two(queue_bytes=3 * SIZE, pending_wait_s=0.0)
    with pool:
        gate = make.Gated()
        assert pool.store(make.chain(2), [(0, 0), (0, 1)], gate, cost_s=0.1) == 2
        assert gate.entered.wait(10)
        other = make.chain(2, first=100)
        assert pool.store(other, [(0, 0), (0, 1)], make.Source(), cost_s=0.1) == 0
        assert pool.metrics.total("unstored_blocks", tier="queue", cause="dropped", by="store") == 2
        assert pool.match(other).miss == Miss(Cause.DROPPED)
        assert pool.match(make.chain(2)).miss == Miss(Cause.PENDING)
        gate.opened.set()
        assert pool.flush(10)
        assert pool.match(other).miss == Miss(Cause.DROPPED)
        make.store(pool, other)
        assert make.fetched(pool, other) == (2, None)
        assert make.fetched(pool, make.chain(2)) == (2, None)


def test_a_match_waits_for_blocks_that_are_just_being_written() -> None:
    pool, _near, _far = make.two(pending_wait_s=10)
    with pool:
        prompt = make.chain(3)
        for i in range(3):  # three jobs, as an engine stores chunk by chunk
            pool.store(prompt, [(0, i)], make.Slow(0.03), cost_s=0.1)
        assert make.fetched(pool, prompt) == (3, None)


def test_a_match_does_not_wait_longer_than_it_may() -> None:
    pool, _near, _far = make.two(pending_wait_s=0.05)
    with pool:
        gate, prompt = make.Gated(), make.chain(1)
        pool.store(prompt, [(0, 0)], gate, cost_s=0.1)
        began = time.monotonic()
        assert pool.match(prompt).miss == Miss(Cause.PENDING)
        assert time.monotonic() - began < 5
        gate.opened.set()


def test_known_blocks_are_not_copied_again() -> None:
    pool, _near, _far = make.two()
    with pool:
        make.store(pool, make.chain(3))
        source = make.Source()
        pool.store(make.chain(4), make.all_blocks(make.chain(4)), source, cost_s=0.1)
        assert pool.flush(10)
        assert [r.index for r in source.filled] == [3]
        assert pool.metrics.total("known_blocks", tier="near") == 3


def test_a_block_that_one_tier_has_is_given_to_the_others() -> None:
    pool, _near, far = make.two()
    with pool:
        prompt = make.chain(2)
        make.store(pool, prompt)
        far.delete(prompt.keys[1:])
        make.store(pool, prompt)
        assert all(far.contains(prompt.keys))


@pytest.mark.parametrize("blocks", [[(0, 5)], [(1, 0)], [(0, -1)]])
def test_storing_a_block_that_the_chain_does_not_have_is_an_error(blocks: list[tuple[int, int]]) -> None:
    with make.two()[0] as pool, pytest.raises(IndexError):
        pool.store(make.chain(3), blocks, make.Source(), cost_s=0.1)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 9, 40])
def test_rounds_cover_all_blocks_in_order_with_bounded_memory(count: int) -> None:
    spec = GroupSpec(HitPolicy.PREFIX, (0,), (TensorSpec("k", "U8", (20 << 20,)),))
    refs = [make.chain(40, ns=make.namespace(spec)).ref(0, i) for i in range(count)]
    rounds = list(_rounds(refs))
    assert [r for share in rounds for r in share] == refs
    assert all(1 <= len(share) <= 3 for share in rounds)


# Closing


def test_after_close_everything_is_a_miss_and_nothing_raises() -> None:
    pool, _near, _far = make.two()
    prompt = make.chain(3)
    make.store(pool, prompt)
    match = pool.match(prompt)
    assert pool.close()
    assert pool.close()
    sink = make.Collected()
    assert pool.load(match, sink) == dict.fromkeys(prompt.keys, Miss(Cause.CLOSED))
    assert not sink.payloads
    pool.release(match)
    assert pool.match(prompt).miss == Miss(Cause.CLOSED)
    assert pool.store(prompt, [(0, 0)], make.Source(), cost_s=0.1) == 0
    assert pool.metrics.total("unstored_blocks", tier="queue", cause="closed") == 1
    assert pool.flush(1)


def test_close_counts_what_there_was_no_time_for() -> None:
    pool, _near, _far = make.two()
    gate = make.Gated()
    pool.store(make.chain(1), [(0, 0)], gate, cost_s=0.1)
    assert gate.entered.wait(10)
    pool.store(make.chain(2, first=100), [(0, 0), (0, 1)], make.Source(), cost_s=0.1)
    assert not pool.close(0.01)
    assert pool.metrics.total("unstored_blocks", tier="queue", cause="closed", by="store") == 2
    gate.opened.set()
    pool.writer.close(10)
    assert pool.metrics.total("unstored_blocks", tier="near", cause="closed", by="store") == 1


def test_closing_while_loads_run_gives_blocks_or_misses(tmp_path: Path) -> None:
    prompt = make.chain(60)
    for _ in range(5):
        pool = Pool([make.Named("near", 10), FileTier(tmp_path, max_bytes=1 << 22, reserve_bytes=0)])
        make.store(pool, prompt)
        outcome: list[tuple[int, set[Cause]]] = []

        def load(pool: Pool = pool, outcome: list[tuple[int, set[Cause]]] = outcome) -> None:
            match, sink = pool.match(prompt), make.Collected()
            failed = pool.load(match, sink)
            assert all(sink.payloads[i] == make.content(match.refs[i]) for i in sink.payloads)
            assert len(failed) + len(sink.payloads) == len(match.refs)
            outcome.append((len(sink.payloads), {m.cause for m in failed.values()}))

        threads = [threading.Thread(target=load) for _ in range(3)]
        for thread in threads:
            thread.start()
        pool.close()
        for thread in threads:
            thread.join(10)
        assert len(outcome) == 3
        assert all(causes <= {Cause.CLOSED, Cause.EVICTED} for _, causes in outcome)


# Reasons


def test_reasons_are_bounded_and_keep_the_latest() -> None:
    reasons = Reasons(limit=3)
    for i in range(5):
        reasons.remember(bytes([i]), Miss(Cause.DROPPED))
    reasons.remember(b"\2", Miss(Cause.EVICTED))
    reasons.remember(b"\5", Miss(Cause.DROPPED))
    assert [reasons.get(bytes([i])) is not None for i in range(6)] == [False, False, True, False, True, True]
    assert reasons.get(b"\2") == Miss(Cause.EVICTED)
    reasons.forget([b"\2", b"unknown"])
    assert reasons.get(b"\2") is None


def test_records_are_what_tiers_are_given() -> None:
    """A tier sees finished records with the cost and the key of what was asked to be stored."""
    seen: list[Record] = []

    class Watching(make.Named):
        def put(self, records: Sequence[Record]) -> list[Miss | None]:
            seen.extend(records)
            return super().put(records)

    with Pool([Watching("near")]) as pool:
        prompt = make.chain(2)
        pool.store(prompt, [(0, 0), (0, 1)], make.Source(), cost_s=0.25)
        assert pool.flush(10)
    assert [(r.ref.key, r.cost_s) for r in seen] == [(k, 0.25) for k in prompt.keys]
