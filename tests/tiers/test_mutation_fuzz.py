"""Stored files that changed in any way are misses: set aside, counted, never served, never an exception."""

import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from stemkv.keys import BlockRef
from stemkv.misses import Cause, Miss
from stemkv.sealing import Sealer
from stemkv.testing import mutations, samples
from stemkv.testing.mutations import Mutation
from stemkv.testing.samples import Collector
from stemkv.tiers.file import FileTier

from .harness import alter_file, block_files, check_consistent, file_of

CASES = 1_300
"""For each of two sealers: 2,600 in all."""


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[FileTier]:
    tier = FileTier(tmp_path / "store", max_bytes=1 << 24, reserve_bytes=0)
    yield tier
    tier.close()


def generated(ref: BlockRef, sealer: Sealer, chance: random.Random) -> Iterator[Mutation]:
    """Every kind of mutation in turn, with ever new places."""
    raw = samples.stored_form(samples.record(ref, sealer=sealer))
    yield from mutations.impostors(ref, sealer)
    while True:
        yield from mutations.flips(raw, 50, chance)
        yield from mutations.resizes(len(raw), chance)
        yield from mutations.zeroings(len(raw), chance)
        at = chance.randrange(8, len(raw) - 8)
        yield Mutation(
            f"two flips at {at}",
            lambda r, at=at: mutations.flip(at, 0)(mutations.flip(at + 1, 7)(r)),  # type: ignore[misc]
            mutations.IN_HEADER | {Cause.BAD_TAG},
        )


@pytest.mark.parametrize("sealer", [samples.PLAIN, samples.SEALED], ids=["plain", "sealed"])
def test_every_changed_file_is_a_miss_set_aside_and_counted(tier: FileTier, sealer: Sealer) -> None:
    chance = random.Random(7)
    refs = samples.refs(samples.chain(8))
    records = dict(zip((r.key for r in refs), samples.records(refs, sealer=sealer), strict=True))
    seen = Counter[Cause]()
    source = {ref.key: generated(ref, sealer, chance) for ref in refs}
    for case in range(CASES):
        ref = refs[case % len(refs)]
        mutation = next(source[ref.key])
        assert tier.put([records[ref.key]]) == [None]
        alter_file(tier, ref, mutation.change)
        sink = Collector(buffered=bool(case % 2))
        (miss,) = tier.get([ref], sink, sealer=sealer)
        assert miss is not None, mutation.name
        assert not sink.payloads, mutation.name
        assert miss.cause in mutation.causes, (mutation.name, miss)
        seen[miss.cause] += 1
        assert not file_of(tier, ref).exists()
        assert tier.contains([ref.key]) == [False]
        assert tier.stats().quarantined == case + 1, mutation.name
    assert len(list((tier.path / "quarantine").iterdir())) == 8
    assert {Cause.BAD_SIZE, Cause.BAD_HEADER, Cause.BAD_KEY, Cause.BAD_TAG, Cause.BAD_IDENTITY} <= set(seen)
    assert tier.put(list(records.values())) == [None] * len(refs)
    assert tier.get(refs, Collector(), sealer=sealer) == [None] * len(refs)
    check_consistent(tier)


def test_files_that_changed_places_are_misses(tier: FileTier) -> None:
    refs = samples.refs(samples.chain(40))
    tier.put(samples.records(refs))
    paths = [file_of(tier, r) for r in refs]
    raws = [p.read_bytes() for p in paths]
    for path, raw in zip(paths, raws[1:] + raws[:1], strict=True):
        path.unlink()
        path.write_bytes(raw)
    assert tier.get(refs, Collector(), sealer=samples.PLAIN) == [Miss(Cause.BAD_KEY)] * 40
    assert tier.stats().quarantined == 40
    assert tier.stats().blocks == 0


def test_a_folder_copied_from_another_store_serves_only_what_is_asked(tmp_path: Path, tier: FileTier) -> None:
    """The same text under another generation, model and tenant: their files are in the folder, under their names."""
    for space in (
        samples.namespace(generation=1),
        samples.namespace("other"),
        samples.namespace(tenant="somebody"),
    ):
        tier.put(samples.records(samples.refs(samples.chain(3, of=space))))
    mine = samples.refs(samples.chain(3))
    assert tier.contains([r.key for r in mine]) == [False] * 3
    theirs = sorted(block_files(tier.path))
    assert len(theirs) == 9
    # Even under the name that is asked for.
    for ref, name in zip(mine, theirs, strict=False):
        path = file_of(tier, ref)
        path.parent.mkdir(exist_ok=True)
        shutil.copy(tier.path / "blocks" / name[:2] / name, path)
    assert tier.get(mine, Collector(), sealer=samples.PLAIN) == [Miss(Cause.BAD_KEY)] * 3


def test_a_block_sealed_with_another_key_gives_way_to_one_that_can_be_read(tier: FileTier) -> None:
    ref = samples.chain(1).ref(0, 0)
    tier.put([samples.record(ref, sealer=samples.SEALED)])
    (miss,) = tier.get([ref], Collector(), sealer=samples.PLAIN)
    assert miss is not None
    assert miss.cause is Cause.BAD_SEAL
    assert tier.put([samples.record(ref)]) == [None]
    assert tier.get([ref], Collector(), sealer=samples.PLAIN) == [None]
