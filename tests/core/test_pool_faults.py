"""Whatever a tier, a source or a sink does wrong costs blocks, never the request, and is counted."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from stemkv.block import Record
from stemkv.keys import BlockRef
from stemkv.misses import Cause, Miss
from stemkv.pool import Pool
from stemkv.sealing import Sealer
from stemkv.tiers.base import Sink
from stemkv.tiers.memory import MemoryTier

from . import make

CALLS = ("contains", "get", "record", "put", "explain", "touch", "lease", "release", "close")


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.CRITICAL, "stemkv"):
        yield


class Rotten(MemoryTier):
    """A tier that breaks its contract in the calls of :attr:`broken`."""

    def __init__(self, name: str = "rotten") -> None:
        super().__init__(1 << 24)
        self.name = name
        self.broken: dict[str, Callable[..., Any]] = {}

    def __getattribute__(self, name: str) -> Any:
        if name in CALLS and name in super().__getattribute__("broken"):
            return self.broken[name]
        return super().__getattribute__(name)


def fails(error: Exception) -> Callable[..., Any]:
    def call(*_: object, **__: object) -> Any:
        raise error

    return call


BROKEN: dict[str, Callable[..., Any]] = {
    "raises": fails(RuntimeError("boom")),
    "raises OSError": fails(OSError(5, "Input/output error")),
    "raises MemoryError": fails(MemoryError()),
    "returns nothing": lambda *_, **__: None,
    "returns too few": lambda *_, **__: [],
    "returns too many": lambda *_, **__: [None] * 99,
}


def check_sums(pool: Pool) -> None:
    """The sums of metrics.py, once nothing is queued."""
    count = pool.metrics.total
    assert count("wanted_blocks") == count("loaded_blocks") + count("lost_blocks")
    for name in [guard.name for guard in pool._guards]:
        ended = count("stored_blocks", tier=name, by="store") + count("known_blocks", tier=name)
        ended += count("unstored_blocks", tier=name, by="store") + count("unstored_blocks", tier="queue", by="store")
        assert count("offered_blocks") == ended, name


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("position", [0, 1])
def test_a_tier_that_breaks_its_contract_costs_only_itself(call: str, how: str, position: int) -> None:
    """The other tier still serves everything, byte for byte."""
    rotten, sound = Rotten(), MemoryTier(1 << 24)
    pool = Pool([rotten, sound] if position == 0 else [sound, rotten])
    prompt, other = make.chain(4), make.chain(4, first=100)
    make.store(pool, prompt)
    rotten.broken[call] = BROKEN[how]
    make.store(pool, other)
    for text in (prompt, other):
        assert make.fetched(pool, text) == (4, None)
    assert make.fetched(pool, make.chain(2, first=500))[0] == 0
    assert pool.flush(10)
    check_sums(pool)
    pool.close()
    tolerated = {"touch", "lease", "release", "close"} if how.startswith("returns") else set[str]()
    reached = call not in tolerated | {"record"} and (call != "get" or position == 0)
    if (call, how) == ("explain", "returns nothing"):
        return  # which is a fine answer
    assert (pool.metrics.total("tier_faults", tier="rotten", call=call) > 0) == reached


@pytest.mark.parametrize("call", ["contains", "get", "explain"])
def test_with_only_a_broken_tier_everything_is_a_miss_that_names_it(call: str) -> None:
    rotten = Rotten()
    with Pool([rotten]) as pool:
        prompt = make.chain(3)
        make.store(pool, prompt)
        rotten.broken[call] = BROKEN["raises"]
        expected = Miss(Cause.IO_ERROR, f"rotten {call} RuntimeError")
        if call == "get":
            match, sink = pool.match(prompt), make.Collected()
            assert pool.load(match, sink) == dict.fromkeys(prompt.keys, expected)
            assert not sink.payloads
        elif call == "contains":
            assert make.fetched(pool, prompt) == (0, expected)
        else:
            assert make.fetched(pool, make.chain(3, first=100)) == (0, expected)


def test_a_hit_that_was_never_handed_over_is_a_miss() -> None:
    """Otherwise the engine would compute on whatever is in its buffers."""
    rotten = Rotten()
    with Pool([rotten]) as pool:
        prompt = make.chain(4)
        make.store(pool, prompt)
        rotten.broken["get"] = lambda refs, *_, **__: [None] * len(refs)
        match, sink = pool.match(prompt), make.Collected()
        failed = pool.load(match, sink)
        assert set(failed) == set(prompt.keys)
        assert {m.cause for m in failed.values()} == {Cause.IO_ERROR}
        assert pool.metrics.total("loaded_blocks") == 0


def test_what_was_handed_over_before_a_tier_raised_counts() -> None:
    rotten = Rotten()
    with Pool([rotten], read_threads=1) as pool:
        prompt = make.chain(4)
        make.store(pool, prompt)

        def get(refs: Sequence[BlockRef], sink: Sink, *, sealer: Sealer, deadline: float | None) -> list[Miss | None]:
            MemoryTier.get(rotten, refs[:2], sink, sealer=sealer, deadline=deadline)
            raise RuntimeError

        rotten.broken["get"] = get
        match, sink = pool.match(prompt), make.Collected()
        assert set(pool.load(match, sink)) == set(prompt.keys[2:])
        assert sink.payloads == {i: make.content(match.refs[i]) for i in (0, 1)}
        assert pool.metrics.total("loaded_blocks") == 2


@pytest.mark.parametrize("error", [RuntimeError, OSError, MemoryError])
def test_a_sink_that_raises_costs_only_the_block(error: type[Exception]) -> None:
    class Picky(make.Collected):
        def accept(self, index: int, payload: memoryview) -> None:
            if index == 1:
                raise error
            super().accept(index, payload)

    with Pool([MemoryTier(1 << 20), MemoryTier(1 << 20)]) as pool:
        prompt = make.chain(4)
        make.store(pool, prompt)
        match, sink = pool.match(prompt), Picky()
        assert pool.load(match, sink) == {prompt.keys[1]: Miss(Cause.IO_ERROR, f"sink {error.__name__}")}
        assert sorted(sink.payloads) == [0, 2, 3]
        pool.release(match)
        assert make.fetched(pool, prompt) == (4, None), "the stored block is not to blame"
        check_sums(pool)


@pytest.mark.parametrize("error", [RuntimeError("gone"), MemoryError(), IndexError()])
def test_a_source_that_raises_costs_only_its_blocks_and_they_get_a_cause(error: Exception) -> None:
    class Broken(make.Source):
        def fill(self, ref: BlockRef, payload: memoryview) -> None:
            if ref.index == 2:
                raise error
            super().fill(ref, payload)

    with Pool([MemoryTier(1 << 20), Rotten("far")]) as pool:
        prompt, after = make.chain(4), make.chain(2, first=100)
        pool.store(prompt, make.all_blocks(prompt), Broken(), cost_s=0.1)
        make.store(pool, after)
        cause = Miss(Cause.NOT_CAPTURED, type(error).__name__)
        assert make.fetched(pool, prompt) == (2, cause)
        assert make.fetched(pool, after) == (2, None)
        for tier in ("memory", "far"):
            assert pool.metrics.total("unstored_blocks", tier=tier, cause="not-captured", by="store") == 1
        check_sums(pool)
        make.store(pool, prompt)
        assert make.fetched(pool, prompt) == (4, None)


def test_a_source_that_raises_where_one_tier_has_the_block_costs_only_the_other() -> None:
    far = Rotten("far")
    with Pool([MemoryTier(1 << 20), far]) as pool:
        prompt = make.chain(2)
        make.store(pool, prompt)
        far.delete(prompt.keys)
        pool.store(prompt, make.all_blocks(prompt), object(), cost_s=0.1)  # type: ignore[arg-type]
        assert pool.flush(10)
        check_sums(pool)
        assert make.fetched(pool, prompt) == (2, None)


@pytest.mark.parametrize("cause", [Cause.NO_SPACE, Cause.READ_ONLY, Cause.IO_ERROR])
def test_a_tier_that_cannot_store_says_so_in_the_next_miss(cause: Cause) -> None:
    class Full(MemoryTier):
        def put(self, records: Sequence[Record]) -> list[Miss | None]:
            return [Miss(cause, "why")] * len(records)

    with Pool([Full(1)]) as pool:
        prompt = make.chain(2)
        make.store(pool, prompt)
        assert make.fetched(pool, prompt) == (0, Miss(cause, "why"))
        assert pool.metrics.total("unstored_blocks", tier="memory", cause=cause.value, by="store") == 2
        check_sums(pool)


def test_failed_promotions_are_counted_and_cost_nothing() -> None:
    near, far = Rotten("near"), MemoryTier(1 << 20)
    with Pool([near, far]) as pool:
        prompt = make.chain(3)
        make.store(pool, prompt)
        near.delete(prompt.keys)
        near.broken["put"] = BROKEN["raises"]
        for _ in range(2):
            assert make.fetched(pool, prompt) == (3, None)
            assert pool.flush(10)
        assert pool.metrics.total("unstored_blocks", tier="near", by="promotion") == 6
        check_sums(pool)


def test_a_tier_that_answers_a_fault_is_not_asked_twice_about_one_block() -> None:
    """Failing is a reason to ask the tiers behind, not to repeat the question."""
    asked: list[bytes] = []

    class Counting(MemoryTier):
        def get(self, refs: Sequence[BlockRef], sink: Sink, **_: Any) -> list[Miss | None]:
            asked.extend(r.key for r in refs)
            return [Miss(Cause.IO_ERROR, "EIO")] * len(refs)

    with Pool([Counting(1 << 20), MemoryTier(1)]) as pool:
        prompt = make.chain(3)
        make.store(pool, prompt)
        match = pool.match(prompt)
        assert len(pool.load(match, make.Collected())) == 3
        assert sorted(asked) == sorted(prompt.keys)


def test_keyboard_interrupt_is_not_swallowed() -> None:
    rotten = Rotten()
    with Pool([rotten]) as pool:
        rotten.broken["contains"] = fails(KeyboardInterrupt())  # type: ignore[arg-type]
        with pytest.raises(KeyboardInterrupt):
            pool.match(make.chain(3))
        rotten.broken.clear()
        with contextlib.suppress(KeyboardInterrupt):
            assert pool.match(make.chain(3)).blocks == 0


def test_tiers_of_one_kind_are_counted_apart() -> None:
    """For example one file tier in shared memory and one on an SSD."""
    with Pool([MemoryTier(1 << 20), Rotten(), MemoryTier(1), MemoryTier(1 << 20)]) as pool:
        make.store(pool, make.chain(2))
        assert [pool.metrics.total("stored_blocks", tier=t) for t in ("memory", "memory-2", "memory-3")] == [2, 0, 2]


def test_a_block_that_several_tiers_fail_to_give_has_the_cause_of_the_nearest() -> None:
    class Failing(MemoryTier):
        def get(self, refs: Sequence[BlockRef], sink: Sink, **_: Any) -> list[Miss | None]:
            return [Miss(Cause.IO_ERROR, self.name)] * len(refs)

    near, far = Failing(1 << 20), Failing(1 << 20)
    near.name, far.name = "near", "far"
    with Pool([near, far]) as pool:
        prompt = make.chain(2)
        make.store(pool, prompt)
        match = pool.match(prompt)
        assert pool.load(match, make.Collected()) == dict.fromkeys(prompt.keys, Miss(Cause.IO_ERROR, "near"))
        assert pool.metrics.total("failed_blocks") == 4
        assert pool.metrics.total("lost_blocks") == 2


def test_a_tier_is_not_asked_for_blocks_that_it_does_not_have() -> None:
    """A farther tier that never had a block must not count a failure, nor look for a lost file."""
    near, far = Rotten("near"), Rotten("far")
    with Pool([near, far]) as pool:
        prompt = make.chain(2)
        make.store(pool, prompt)
        far.delete(prompt.keys)
        match = pool.match(prompt)
        near.broken["get"] = BROKEN["raises"]
        far.broken["get"] = BROKEN["raises"]
        assert len(pool.load(match, make.Collected())) == 2
        assert pool.metrics.total("failed_blocks", tier="far") == 0
        assert pool.metrics.total("tier_faults", tier="far") == 0
