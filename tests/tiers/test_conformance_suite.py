"""The suite that third parties import needs no test library, and notices tiers that break the contract."""

import subprocess
import sys
from collections.abc import Sequence

import pytest

from stemkv import block
from stemkv.block import Record
from stemkv.keys import BlockRef
from stemkv.misses import Cause, Miss
from stemkv.sealing import Sealer
from stemkv.testing import samples
from stemkv.tiers.base import Sink, Tier
from stemkv.tiers.memory import MemoryTier

from .harness import MemorySuite


def python(code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


WITHOUT = "import sys; sys.modules['pytest'] = sys.modules['hypothesis'] = None\n"


def test_it_imports_without_pytest_and_hypothesis() -> None:
    done = python(WITHOUT + "import stemkv.testing")
    assert done.returncode == 0, done.stderr


def test_without_hypothesis_the_model_test_says_what_to_install() -> None:
    done = python(WITHOUT + "import stemkv.testing.machine")
    assert done.stderr.rstrip().endswith("ImportError: stemkv.testing.machine needs hypothesis: pip install hypothesis")


class Unverified(MemoryTier):
    """Hands over what it finds."""

    def _get_one(self, index: int, ref: BlockRef, sink: Sink, sealer: Sealer) -> Miss | None:
        entry = self._entries.get(ref.key)
        if entry is None:
            return Miss(Cause.EVICTED)
        sink.accept(index, entry.record.data[block.header_bytes(ref.spec) :])
        return None


class Forgetful(MemoryTier):
    """Says that it stored what it did not."""

    def put(self, records: Sequence[Record]) -> list[Miss | None]:
        super().put(records[:1])
        return [None] * len(records)


class Raising(MemoryTier):
    """Lets an exception out."""

    def quarantine(self, ref: BlockRef, miss: Miss) -> None:
        raise OSError(5, "cannot move the file")


class Silent(MemoryTier):
    """Does not count what it sets aside."""

    def quarantine(self, ref: BlockRef, miss: Miss) -> None:
        self.delete([ref.key])


class Overfull(MemoryTier):
    """Ignores its cap."""

    def _make_room(self, size: int, ref: BlockRef) -> bool:
        return True


class Leaseless(MemoryTier):
    """Evicts what is in use."""

    def leased(self, key: bytes) -> bool:
        return False


class PrefixFirst(MemoryTier):
    """Evicts the oldest block, whatever needs it."""

    def _make_room(self, size: int, ref: BlockRef) -> bool:
        while self._bytes + size > self._max_bytes:
            self._remove(next(iter(self._entries)))
            self._evicted += 1
        return True


class Talkative(MemoryTier):
    """Tells of other tenants."""

    def explain(self, ref: BlockRef) -> Miss | None:
        return Miss(Cause.IDENTITY, "tenant") if self._entries else None


class Late(MemoryTier):
    """Reads first and looks at the clock afterwards."""

    def get(
        self, refs: Sequence[BlockRef], sink: Sink, *, sealer: Sealer, deadline: float | None = None
    ) -> list[Miss | None]:
        return super().get(refs, sink, sealer=sealer)


class Undead(MemoryTier):
    """Goes on after close."""

    def close(self) -> None:
        pass


BROKEN: dict[type[MemoryTier], str] = {
    Unverified: "test_every_mutation_is_a_miss_that_is_named_counted_and_set_aside",
    Forgetful: "test_what_was_put_comes_back_byte_for_byte",
    Raising: "test_every_mutation_is_a_miss_that_is_named_counted_and_set_aside",
    Silent: "test_two_blocks_that_changed_places_are_both_misses",
    Overfull: "test_bytes_never_exceed_the_cap",
    Leaseless: "test_leased_blocks_are_not_evicted",
    PrefixFirst: "test_a_suffix_goes_before_its_prefix",
    Talkative: "test_nothing_is_told_about_another_tenant",
    Late: "test_after_the_deadline_nothing_is_read",
    Undead: "test_after_close_everything_is_a_miss",
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda tier: tier.__name__)
def test_a_broken_tier_fails_the_test_of_what_it_breaks(broken: type[MemoryTier]) -> None:
    class Suite(MemorySuite):
        def make_tier(self, max_bytes: int) -> Tier:
            return broken(max_bytes)

    with pytest.raises((AssertionError, OSError)):
        getattr(Suite(), BROKEN[broken])()


@pytest.mark.parametrize("broken", [Forgetful, PrefixFirst], ids=lambda tier: tier.__name__)
def test_the_model_finds_broken_tiers_too(broken: type[MemoryTier]) -> None:
    class Suite(MemorySuite):
        def make_tier(self, max_bytes: int) -> Tier:
            return broken(max_bytes)

    with pytest.raises(AssertionError):
        Suite().test_it_agrees_with_a_model_under_any_sequence_of_calls()


def test_samples_are_the_same_in_every_process() -> None:
    ref = samples.chain(2).ref(0, 1)
    again = python("from stemkv.testing import samples; print(samples.chain(2).ref(0, 1).key.hex())")
    assert again.stdout.strip() == ref.key.hex()
    assert samples.payload(ref) != samples.payload(samples.chain(2).ref(0, 0))
