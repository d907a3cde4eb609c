"""What every tier must do, as tests that a third party's test class inherits.

Give the class the three methods below; everything else is here. A check that fails raises AssertionError with a
sentence, so the suite works the same with and without pytest's assertion rewriting, and under ``python -O``.
"""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from stemkv import block
from stemkv.block import Record
from stemkv.keys import BlockRef, Namespace
from stemkv.misses import Cause, Miss
from stemkv.sealing import Sealer
from stemkv.testing import mutations, samples
from stemkv.testing.samples import Collector
from stemkv.tiers.base import Tier

ERRNOS = (errno.EIO, errno.EACCES, errno.ENOSPC, errno.EROFS, errno.ESTALE, errno.EMFILE)
AMPLE = 1 << 24
"""A cap that the samples never reach, in bytes."""


def check(condition: object, sentence: str) -> None:
    """Raise AssertionError with ``sentence`` unless ``condition`` holds."""
    if not condition:
        raise AssertionError(sentence)


def _raising(error: OSError) -> Callable[..., tuple[memoryview, bytes]]:
    def fetch(*_: object) -> tuple[memoryview, bytes]:
        raise error

    return fetch


class TierConformance:
    """Inherit, implement the three methods, let pytest collect the class."""

    sealer: Sealer = samples.PLAIN

    def make_tier(self, max_bytes: int) -> Tier:
        """A new, empty tier; called several times in one test."""
        raise NotImplementedError

    def alter(self, tier: Tier, ref: BlockRef, change: Callable[[bytes], bytes]) -> None:
        """Replace the stored bytes of ``ref``, in the form of a block file, by ``change`` of them."""
        raise NotImplementedError

    def failing(self, tier: Tier, error: OSError) -> AbstractContextManager[object]:
        """While inside, every attempt of ``tier`` to write its storage raises ``error``; nullcontext if it has none."""
        raise NotImplementedError

    # -- helpers -------------------------------------------------------------------------------------------

    def records(self, refs: Sequence[BlockRef], *, cost_s: float = 0.01) -> list[Record]:
        """Sample records of ``refs``."""
        return samples.records(refs, sealer=self.sealer, cost_s=cost_s)

    def room_for(self, blocks: int) -> int:
        """Bytes that ``blocks`` sample records take in such a tier."""
        tier = self.make_tier(AMPLE)
        self.store(tier, samples.refs(samples.chain(1)))
        size = tier.stats().bytes
        tier.close()
        return blocks * size

    def store(self, tier: Tier, refs: Sequence[BlockRef]) -> None:
        """Put sample records and see that they were taken."""
        results = tier.put(self.records(refs))
        check(results == [None] * len(refs), f"put into a tier with room said {results}")

    def get(
        self, tier: Tier, refs: Sequence[BlockRef], *, buffered: bool = False
    ) -> tuple[list[Miss | None], dict[int, bytes]]:
        """Results and payloads; every payload handed over is checked to be the right one."""
        sink = Collector(buffered=buffered)
        results = tier.get(refs, sink, sealer=self.sealer)
        check(len(results) == len(refs), "get gives one result for every ref")
        hits = {i for i, miss in enumerate(results) if miss is None}
        check(hits == set(sink.payloads), "exactly the hits are handed over")
        for i, got in sink.payloads.items():
            check(got == samples.payload(refs[i]), f"block {i} came back with other bytes")
            if buffered:
                tail = sink.buffers[i][block.header_bytes(refs[i].spec) :]
                check(tail == got, f"the buffer of block {i} does not hold its payload")
        return results, sink.payloads

    # -- storing and finding -------------------------------------------------------------------------------

    def test_what_was_put_comes_back_byte_for_byte(self) -> None:
        tier, refs = self.make_tier(AMPLE), samples.refs(samples.chain(5))
        self.store(tier, refs)
        for buffered in (False, True):
            results, _ = self.get(tier, refs, buffered=buffered)
            check(results == [None] * 5, f"stored blocks are hits, not {results}")
        for ref in refs:
            copy = tier.record(ref, sealer=self.sealer)
            check(isinstance(copy, Record), f"a stored block can be copied to another tier, not {copy}")
            if isinstance(copy, Record):
                payload = block.verify(copy.data, copy.tag, ref, self.sealer)
                check(payload == samples.payload(ref), "the copy holds the same payload")

    def test_all_groups_of_a_block_are_kept_apart(self) -> None:
        space = Namespace(samples.identity(groups=2))
        chain, tier = samples.chain(3, of=space), self.make_tier(AMPLE)
        refs = samples.refs(chain, 0) + samples.refs(chain, 1)
        self.store(tier, refs)
        check(self.get(tier, refs)[0] == [None] * 6, "blocks of both groups are hits")

    def test_results_line_up_with_what_was_asked(self) -> None:
        tier, refs = self.make_tier(AMPLE), samples.refs(samples.chain(6))
        self.store(tier, refs[::2])
        asked = [refs[1], refs[0], refs[4], refs[4], refs[5], refs[2], refs[3], refs[1]]
        here = [r in refs[::2] for r in asked]
        check(tier.contains([r.key for r in asked]) == here, "contains answers in the order asked")
        results, _ = self.get(tier, asked)
        check([miss is None for miss in results] == here, "get answers in the order asked")
        put = tier.put(self.records([refs[1], refs[0], refs[1]]))
        check(put == [None] * 3, f"put answers for every record, stored or not, not {put}")
        check(
            tier.contains([]) == [] and tier.put([]) == [] and self.get(tier, [])[0] == [], "nothing asked, no answer"
        )

    def test_storing_a_key_again_is_fine_and_changes_nothing(self) -> None:
        tier, refs = self.make_tier(AMPLE), samples.refs(samples.chain(2))
        self.store(tier, refs)
        before = tier.stats()
        self.store(tier, [*refs, *refs])
        check(tier.stats() == before, "a second put of the same keys takes no room")
        check(self.get(tier, refs)[0] == [None, None], "they are still there")

    def test_deleted_blocks_are_gone_and_can_be_stored_again(self) -> None:
        tier, refs = self.make_tier(AMPLE), samples.refs(samples.chain(4))
        self.store(tier, refs)
        tier.lease([refs[1].key])
        check(
            tier.delete([refs[1].key, refs[3].key, refs[1].key, bytes(32)]) == 2,
            "delete counts what was there, leased or not",
        )
        check(tier.contains([r.key for r in refs]) == [True, False, True, False], "the others stay")
        check([m is None for m in self.get(tier, refs)[0]] == [True, False, True, False], "what is gone is a miss")
        check(tier.stats().blocks == 2, "stats count what is left")
        self.store(tier, refs)
        check(self.get(tier, refs)[0] == [None] * 4, "they come back")

    def test_stats_count_blocks_and_bytes(self) -> None:
        tier, refs = self.make_tier(AMPLE), samples.refs(samples.chain(7))
        check((tier.stats().blocks, tier.stats().bytes) == (0, 0), "a new tier is empty")
        self.store(tier, refs)
        stats = tier.stats()
        check((stats.blocks, stats.max_bytes) == (7, AMPLE), f"seven blocks under the cap, not {stats}")
        check(stats.bytes >= sum(block.record_bytes(r.spec) for r in refs), "whole records are counted")
        tier.delete([r.key for r in refs])
        check((tier.stats().blocks, tier.stats().bytes) == (0, 0), "nothing is left over")

    def test_an_empty_tier_has_nothing_and_knows_no_cause(self) -> None:
        tier, refs = self.make_tier(AMPLE), samples.refs(samples.chain(2))
        check(tier.contains([r.key for r in refs]) == [False, False], "nothing is there")
        check(all(self.get(tier, refs)[0]), "everything is a miss")
        check(tier.explain(refs[0]) is None, "there is nothing to explain")
        tier.touch([r.key for r in refs])
        check(tier.delete([r.key for r in refs]) == 0, "there is nothing to delete")

    # -- time, closing, faults -----------------------------------------------------------------------------

    def test_after_the_deadline_nothing_is_read(self) -> None:
        tier, refs = self.make_tier(AMPLE), samples.refs(samples.chain(3))
        self.store(tier, refs)
        read: list[BlockRef] = []
        fetch = tier.fetch

        def spy(ref: BlockRef, buffer: memoryview | None) -> tuple[memoryview, bytes]:
            read.append(ref)
            return fetch(ref, buffer)

        tier.fetch = spy  # type: ignore[method-assign]
        sink = Collector(buffered=True)
        results = tier.get(refs, sink, sealer=self.sealer, deadline=time.monotonic() - 1)
        check(results == [Miss(Cause.DEADLINE)] * 3, f"the cause is the deadline, not {results}")
        check(not read and not sink.payloads and not sink.buffers, "nothing was read or handed over")
        results = tier.get(refs, sink, sealer=self.sealer, deadline=time.monotonic() + 60)
        check(results == [None] * 3, "before the deadline they are hits")

    def test_after_close_everything_is_a_miss(self) -> None:
        tier, refs = self.make_tier(AMPLE), samples.refs(samples.chain(2))
        self.store(tier, refs)
        keys = [r.key for r in refs]
        tier.close()
        tier.close()
        check(tier.contains(keys) == [False, False], "nothing is there")
        check(self.get(tier, refs)[0] == [Miss(Cause.CLOSED)] * 2, "the cause of the miss is closed")
        check(tier.record(refs[0], sealer=self.sealer) == Miss(Cause.CLOSED), "nothing to copy")
        check(tier.put(self.records(refs)) == [Miss(Cause.CLOSED)] * 2, "nothing is stored")
        check(tier.delete(keys) == 0 and tier.explain(refs[0]) is None, "nothing to delete or explain")
        tier.touch(keys)
        tier.lease(keys)
        tier.release(keys)
        tier.quarantine(refs[0], Miss(Cause.BAD_TAG))
        tier.stats()

    def test_a_fault_while_reading_is_a_miss_and_nothing_is_lost(self) -> None:
        tier, refs = self.make_tier(AMPLE), samples.refs(samples.chain(2))
        self.store(tier, refs)
        fetch = tier.fetch
        for number in ERRNOS:
            tier.fetch = _raising(OSError(number, "injected"))  # type: ignore[method-assign]
            want = Miss(Cause.IO_ERROR, errno.errorcode[number])
            check(self.get(tier, refs)[0] == [want, want], f"a read fault is {want}")
            check(tier.record(refs[0], sealer=self.sealer) == want, f"also for a copy: {want}")
            tier.fetch = fetch  # type: ignore[method-assign]
            check(self.get(tier, refs)[0] == [None, None], "after the fault the blocks are still there")
        check(tier.stats().quarantined == 0, "a fault is no corruption")

    def test_a_fault_while_writing_is_a_miss_and_nothing_else_is_lost(self) -> None:
        for number in ERRNOS:
            tier, refs = self.make_tier(AMPLE), samples.refs(samples.chain(4))
            self.store(tier, refs[:2])
            with self.failing(tier, OSError(number, "injected")):
                results = tier.put(self.records(refs))
                check(len(results) == 4, "one result for every record")
                check(results[:2] == [None, None], "what is there already needs no writing")
                here = tier.contains([r.key for r in refs])
                check([m is None for m in results] == here, f"stored exactly when put says so: {results} {here}")
                check([m is None for m in self.get(tier, refs)[0]] == here, "what is there is still served")
                tier.touch([r.key for r in refs])
                tier.delete([refs[3].key])
                tier.stats()
            tier.close()

    # -- never wrong ---------------------------------------------------------------------------------------

    def test_every_mutation_is_a_miss_that_is_named_counted_and_set_aside(self) -> None:
        chain = samples.chain(3)
        ref, others = chain.ref(0, 1), [chain.ref(0, 0), chain.ref(0, 2)]
        tier = self.make_tier(AMPLE)
        self.store(tier, others)
        for mutation in mutations.every_kind(ref, self.sealer):
            self.store(tier, [ref])
            before = tier.stats().quarantined
            self.alter(tier, ref, mutation.change)
            for buffered in (False, True):  # the second time it is already set aside
                (miss,), _ = self.get(tier, [ref], buffered=buffered)
                check(miss is not None, f"{mutation.name} was served as a hit")
                if not buffered and miss is not None:
                    check(miss.cause in mutation.causes, f"{mutation.name} came out as {miss}")
            check(tier.contains([ref.key]) == [False], f"{mutation.name}: the block is out of use")
            check(tier.stats().quarantined == before + 1, f"{mutation.name} is counted once")
        self.store(tier, [ref])
        check(self.get(tier, [*others, ref])[0] == [None] * 3, "good blocks are not affected")

    def test_two_blocks_that_changed_places_are_both_misses(self) -> None:
        tier, refs = self.make_tier(AMPLE), samples.refs(samples.chain(2))
        records = self.records(refs)
        check(tier.put(records) == [None, None], "both are stored")
        for ref, other in zip(refs, reversed(records), strict=True):
            self.alter(tier, ref, mutations.swap(samples.stored_form(other)))
        check(self.get(tier, refs)[0] == [Miss(Cause.BAD_KEY)] * 2, "both name another key")
        check(tier.stats().quarantined == 2, "both are counted")

    # -- making room ---------------------------------------------------------------------------------------

    def test_bytes_never_exceed_the_cap(self) -> None:
        cap = self.room_for(5)
        tier = self.make_tier(cap)
        for seed in range(12):
            tier.put(self.records(samples.refs(samples.chain(3, seed=seed, shared=1))))
            stats = tier.stats()
            check(stats.bytes <= cap, f"{stats.bytes} bytes under a cap of {cap}")
            check(stats.blocks > 0, "the tier is in use")
        check(tier.stats().evicted > 0, "what was evicted is counted")

    def test_a_block_larger_than_the_tier_is_refused_and_evicts_nothing(self) -> None:
        small, large = samples.chain(2), samples.chain(1, of=Namespace(samples.identity(payload_bytes=400_000)))
        tier = self.make_tier(self.room_for(3))
        self.store(tier, samples.refs(small))
        check(tier.put(self.records([large.ref(0, 0)])) == [Miss(Cause.NO_SPACE)], "it finds no room")
        check(self.get(tier, samples.refs(small))[0] == [None, None], "the others stay")

    def test_a_suffix_goes_before_its_prefix(self) -> None:
        tier = self.make_tier(self.room_for(6))
        old = samples.refs(samples.chain(6))
        self.store(tier, old)
        for seed in range(1, 4):
            self.store(tier, samples.refs(samples.chain(1, seed=seed)))
            here = tier.contains([r.key for r in old])
            check(here == sorted(here, reverse=True), f"a prefix went before its suffix: {here}")

    def test_a_long_chain_keeps_its_beginning(self) -> None:
        tier, refs = self.make_tier(self.room_for(4)), samples.refs(samples.chain(9))
        results = [tier.put([record])[0] for record in self.records(refs)]
        here = tier.contains([r.key for r in refs])
        check(here == [True] * 4 + [False] * 5, f"the first blocks stay, not {here}")
        check(results[4:] == [Miss(Cause.NO_SPACE)] * 5, "the others find no room")

    def test_leased_blocks_are_not_evicted(self) -> None:
        tier = self.make_tier(self.room_for(4))
        leased = samples.refs(samples.chain(3))
        self.store(tier, leased)
        keys = [r.key for r in leased]
        tier.lease(keys)
        tier.lease(keys)
        tier.release(keys)
        for seed in range(1, 8):
            tier.put(self.records(samples.refs(samples.chain(2, seed=seed)), cost_s=100.0))
            check(self.get(tier, leased)[0] == [None] * 3, "leased blocks stay, however cheap they are")
        tier.release(keys)
        for seed in range(8, 16):
            tier.put(self.records(samples.refs(samples.chain(2, seed=seed)), cost_s=100.0))
        check(not any(tier.contains(keys)), "released blocks may go")

    def test_what_is_used_outlives_what_is_not(self) -> None:
        tier = self.make_tier(self.room_for(4))
        used, unused = (samples.chain(1, seed=s).ref(0, 0) for s in (1, 2))
        self.store(tier, [used, unused])
        for _ in range(3):
            tier.touch([used.key])
        for seed in range(3, 6):
            self.store(tier, samples.refs(samples.chain(1, seed=seed)))
        check(tier.contains([used.key, unused.key]) == [True, False], "the unused block went first")

    # -- telling why ---------------------------------------------------------------------------------------

    def test_nothing_is_told_about_another_tenant(self) -> None:
        tier = self.make_tier(self.room_for(2))
        mine, theirs = (samples.namespace(tenant=t) for t in ("mine", "theirs"))
        for seed in range(3):  # also evicts some of theirs
            tier.put(self.records(samples.refs(samples.chain(2, seed=seed, of=theirs))))
        for seed in range(3):
            for ref in samples.refs(samples.chain(2, seed=seed, of=mine)):
                check(tier.contains([ref.key]) == [False], "blocks of another tenant are not found")
                check(tier.explain(ref) is None, f"explain told of another tenant: {tier.explain(ref)}")

    # -- at once -------------------------------------------------------------------------------------------

    def test_readers_and_writers_at_once_see_only_right_blocks(self) -> None:
        tier = self.make_tier(self.room_for(12))
        refs = [r for seed in range(8) for r in samples.refs(samples.chain(3, seed=seed, shared=1))]
        failures: list[BaseException] = []

        def work(seed: int) -> None:
            chance = random.Random(seed)  # noqa: S311 - an order of calls
            try:
                for _ in range(40):
                    some = chance.sample(refs, 3)
                    if chance.random() < 0.5:
                        tier.put(self.records(some))
                    else:
                        self.get(tier, some)
                    if chance.random() < 0.2:
                        tier.delete([some[0].key])
                        tier.touch([r.key for r in some])
            except BaseException as error:  # noqa: BLE001 - reported below, in the test's own thread
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        check(not failures, f"calls at once failed: {failures[:1]}")
        stats = tier.stats()
        check(stats.quarantined == 0 and stats.bytes <= stats.max_bytes, f"nothing went wrong: {stats}")
        check(stats.blocks == len({r.key for r in refs if tier.contains([r.key])[0]}), "the count is right")

    def test_it_agrees_with_a_model_under_any_sequence_of_calls(self) -> None:
        from stemkv.testing.machine import run  # noqa: PLC0415 - the only test that needs hypothesis

        run(self)
