"""Any sequence of calls against a tier, compared with a dictionary. Needs hypothesis."""

from __future__ import annotations

import errno
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

from stemkv.keys import BlockRef, Namespace
from stemkv.misses import Cause, Miss
from stemkv.testing import samples
from stemkv.testing.mutations import flip

if TYPE_CHECKING:
    from stemkv.testing.conformance import TierConformance

try:
    from hypothesis import HealthCheck, settings
    from hypothesis import strategies as st
    from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
except ImportError:
    raise ImportError("stemkv.testing.machine needs hypothesis: pip install hypothesis") from None

ROOM = 7
"""How many sample blocks the tier under test has room for."""
_SPACE = Namespace(samples.identity())
# A tree: four chains that share their first two blocks, and one of its own.
_CHAINS = [samples.chain(4, seed=s, of=_SPACE, shared=2) for s in range(4)] + [samples.chain(5, seed=9, of=_SPACE)]
REFS = list({ref.key: ref for chain in _CHAINS for ref in samples.refs(chain)}.values())
_BY_KEY = {ref.key: ref for ref in REFS}

_ref = st.sampled_from(REFS)
_some = st.lists(_ref, min_size=1, max_size=5)
_different = st.lists(_ref, min_size=1, max_size=5, unique_by=lambda ref: ref.key)
_COSTS = st.sampled_from([0.0, 0.001, 0.1, 10.0])


class TierMachine(RuleBasedStateMachine):
    """The model is the set of keys that are there; which of them a tier evicts is its own business, within rules."""

    suite: TierConformance
    room: int

    def __init__(self) -> None:
        super().__init__()
        self.check = _check
        self.tier = self.suite.make_tier(self.room)
        self.here: set[bytes] = set()
        self.leases: list[list[bytes]] = []
        self.evicted = self.quarantined = 0
        self.fault: ExitStack | None = None

    # -- rules ---------------------------------------------------------------------------------------------

    @rule(refs=_different, cost_s=_COSTS)
    def put(self, refs: list[BlockRef], cost_s: float) -> None:
        before = set(self.here)
        results = self.tier.put(self.suite.records(refs, cost_s=cost_s))
        self.check(len(results) == len(refs), "one result for every record")
        now = self._look()
        asked = {r.key for r in refs}
        self.check(now <= before | asked, "nothing appears by itself")
        self._judge_evictions(before - now)
        for ref, miss in zip(refs, results, strict=True):
            if miss is None:
                self.check(ref.key in now, "put said that the block is here, and it is not")
            else:
                faulty = self.fault is not None
                self.check(faulty or miss.cause is Cause.NO_SPACE, f"without a fault put said {miss}")
                self.check(ref.key not in now or ref.key in before, f"{miss}, but the block is there")
        self.here = now

    @rule(refs=_some, buffered=st.booleans())
    def get(self, refs: list[BlockRef], buffered: bool) -> None:
        results, _ = self.suite.get(self.tier, refs, buffered=buffered)
        for ref, miss in zip(refs, results, strict=True):
            self.check((miss is None) == (ref.key in self.here), f"get said {miss}, the model {ref.key in self.here}")

    @rule(refs=_some)
    def touch(self, refs: list[BlockRef]) -> None:
        self.tier.touch([r.key for r in refs])

    @precondition(lambda self: self.fault is None)
    @rule(refs=_some)
    def delete(self, refs: list[BlockRef]) -> None:
        keys = {r.key for r in refs}
        self.check(self.tier.delete([r.key for r in refs]) == len(keys & self.here), "delete counts what was there")
        self.here -= keys

    @rule(refs=_some)
    def lease(self, refs: list[BlockRef]) -> None:
        keys = [r.key for r in refs]
        self.tier.lease(keys)
        self.leases.append(keys)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        self.tier.release(self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1))))

    @precondition(lambda self: self.here and self.fault is None)
    @rule(data=st.data(), at=st.integers(-960, -1), bit=st.integers(0, 7))
    def corrupt(self, data: Any, at: int, bit: int) -> None:
        ref = _BY_KEY[data.draw(st.sampled_from(sorted(self.here)))]
        self.suite.alter(self.tier, ref, lambda raw: flip(len(raw) + at, bit)(raw))
        results, _ = self.suite.get(self.tier, [ref])
        self.check(results == [Miss(Cause.BAD_TAG)], f"a flipped bit came out as {results}")
        self.here.discard(ref.key)
        self.quarantined += 1

    @precondition(lambda self: self.fault is None)
    @rule(number=st.sampled_from([errno.ENOSPC, errno.EIO, errno.EACCES]))
    def break_it(self, number: int) -> None:
        self.fault = ExitStack()
        context: AbstractContextManager[object] = self.suite.failing(self.tier, OSError(number, "injected"))
        self.fault.enter_context(context)

    @precondition(lambda self: self.fault is not None)
    @rule()
    def mend_it(self) -> None:
        if self.fault is not None:
            self.fault.close()
            self.fault = None

    # -- what always holds ---------------------------------------------------------------------------------

    @invariant()
    def the_same_keys_are_there(self) -> None:
        self.check(self._look() == self.here, "the tier and the model have different keys")

    @invariant()
    def the_numbers_are_right(self) -> None:
        stats = self.tier.stats()
        self.check(stats.blocks == len(self.here), f"{stats.blocks} blocks, not {len(self.here)}")
        self.check(stats.bytes == len(self.here) * self.room // ROOM, f"{stats.bytes} bytes do not fit the blocks")
        self.check(stats.bytes <= self.room, f"{stats.bytes} bytes are above the cap")
        self.check(stats.quarantined == self.quarantined, f"{stats.quarantined} quarantined, not {self.quarantined}")
        self.check(stats.evicted >= self.evicted, f"{stats.evicted} evicted, at least {self.evicted} seen")
        self.evicted = stats.evicted

    def _judge_evictions(self, gone: set[bytes]) -> None:
        now = self.here - gone
        for key in gone:
            self.check(not self.tier.leased(key), "a leased block was evicted")
            self.check(not any(_BY_KEY[k].needs == key for k in now), "a block was evicted before its suffix")

    def _look(self) -> set[bytes]:
        keys = [r.key for r in REFS]
        return {key for key, here in zip(keys, self.tier.contains(keys), strict=True) if here}

    def teardown(self) -> None:
        if self.fault is not None:
            self.fault.close()
        self.tier.close()


def _check(condition: object, sentence: str) -> None:
    if not condition:
        raise AssertionError(sentence)


def run(suite: TierConformance, *, examples: int = 25, steps: int = 30) -> None:
    """Try ``examples`` sequences of up to ``steps`` calls on tiers that ``suite`` makes."""

    class Machine(TierMachine):
        pass

    Machine.suite, Machine.room = suite, suite.room_for(ROOM)
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
