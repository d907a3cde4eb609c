"""A tier says why a block is absent: every cause it can know, and nothing about another tenant."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from stemkv.identity import Identity
from stemkv.keys import BlockRef, Chain, Namespace
from stemkv.misses import Cause, Miss
from stemkv.testing import samples
from stemkv.tiers.base import Tier
from stemkv.tiers.explain import GHOSTS, Ghosts
from stemkv.tiers.file import FileTier
from stemkv.tiers.memory import MemoryTier

Make = Callable[[int], Tier]


@pytest.fixture(params=["memory", "file"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Makes tiers with room for so many sample blocks."""
    with contextlib.ExitStack() as stack:

        def make(blocks: int) -> Tier:
            if request.param == "memory":
                return MemoryTier(blocks * 5056)
            tier = FileTier(tmp_path / str(blocks), max_bytes=blocks * 8192, reserve_bytes=0)
            stack.callback(tier.close)
            return tier

        yield make


def store(tier: Tier, chain: Chain) -> list[BlockRef]:
    refs = samples.refs(chain)
    tier.put(samples.records(refs))
    return refs


def test_text_that_was_never_stored_has_no_cause(make: Make) -> None:
    tier = make(20)
    store(tier, samples.chain(3))
    new = samples.chain(3, seed=1)
    assert [tier.explain(r) for r in samples.refs(new)] == [None] * 3


def test_the_end_of_what_is_stored_has_no_cause(make: Make) -> None:
    tier, chain = make(20), samples.chain(4)
    tier.put(samples.records(samples.refs(chain)[:2]))
    assert tier.explain(chain.ref(0, 2)) is None


def test_text_that_continues_otherwise_has_diverged(make: Make) -> None:
    tier = make(20)
    store(tier, samples.chain(4, seed=1, shared=2))
    other = samples.chain(4, seed=2, shared=2)
    assert tier.explain(other.ref(0, 2)) == Miss(Cause.DIVERGED)
    assert tier.explain(other.ref(0, 3)) is None


def test_a_block_of_another_group_is_no_divergence(make: Make) -> None:
    tier, chain = make(20), samples.chain(3, of=Namespace(samples.identity(groups=2)))
    tier.put(samples.records([chain.ref(0, 0), chain.ref(1, 0)]))
    assert tier.explain(chain.ref(0, 1)) is None


def test_an_evicted_block_is_known_until_it_is_stored_again(make: Make) -> None:
    tier = make(4)
    old = store(tier, samples.chain(4))
    for seed in (1, 2):
        store(tier, samples.chain(1, seed=seed))
    assert [tier.explain(r) for r in old[2:]] == [Miss(Cause.EVICTED)] * 2
    tier.delete([old[1].key])
    assert tier.explain(old[1]) is None, "deleting is no eviction"
    tier.put(samples.records(old))
    assert tier.explain(old[2]) is None


CHANGES: dict[str, dict[str, object]] = {
    "weights_digest": {"weights_digest": bytes(32)},
    "config_digest": {"config_digest": bytes(32)},
    "quantization": {"quantization": "q4_1"},
    "kv_dtype": {"kv_dtype": "float16"},
    "block_tokens": {"block_tokens": 8},
}


@pytest.mark.parametrize("field", CHANGES)
def test_text_stored_under_another_identity_names_the_field(make: Make, field: str) -> None:
    tier, mine = make(20), samples.namespace()
    changed: Identity = msgspec.structs.replace(mine.identity, **CHANGES[field])
    store(tier, samples.chain(4, of=Namespace(changed)))
    found = tier.explain(samples.chain(4, of=mine).ref(0, 0))
    assert found == Miss(Cause.IDENTITY, field)
    assert tier.explain(samples.chain(4, of=mine).ref(0, 1)) is None, "the cause belongs to the first block"


def test_the_nearest_identity_is_named(make: Make) -> None:
    tier, mine = make(20), samples.namespace()
    far = msgspec.structs.replace(mine.identity, weights_digest=bytes(32), quantization="q4_1")
    near = msgspec.structs.replace(mine.identity, kv_dtype="float16")
    for identity in (far, near):
        store(tier, samples.chain(1, of=Namespace(identity)))
    assert tier.explain(samples.chain(1, of=mine).ref(0, 0)) == Miss(Cause.IDENTITY, "kv_dtype")


def test_text_stored_under_another_generation_says_which(make: Make) -> None:
    tier = make(20)
    store(tier, samples.chain(2, of=samples.namespace(generation=1)))
    found = tier.explain(samples.chain(2, of=samples.namespace(generation=2)).ref(0, 0))
    assert found == Miss(Cause.GENERATION, "stored under 1, asked for 2")


def test_a_namespace_without_blocks_explains_nothing(make: Make) -> None:
    tier = make(20)
    old = store(tier, samples.chain(2, of=samples.namespace(generation=1)))
    tier.delete([r.key for r in old])
    assert tier.explain(samples.chain(2, of=samples.namespace(generation=2)).ref(0, 0)) is None


def test_other_text_of_this_namespace_is_not_blamed_on_another(make: Make) -> None:
    tier = make(20)
    store(tier, samples.chain(2, of=samples.namespace("other")))
    store(tier, samples.chain(2))
    assert tier.explain(samples.chain(2, seed=5).ref(0, 0)) is None


def test_nothing_is_told_about_another_tenant_whatever_differs(make: Make) -> None:
    tier = make(3)
    mine = samples.namespace(tenant="mine")
    for theirs in (
        samples.namespace(tenant="theirs"),
        samples.namespace("other", tenant="theirs"),
        samples.namespace(tenant="theirs", generation=1),
    ):
        store(tier, samples.chain(2, of=theirs))
    assert tier.stats().evicted > 0
    for ref in samples.refs(samples.chain(3, of=mine)) + samples.refs(samples.chain(2, seed=1, of=mine)):
        assert tier.explain(ref) is None


def test_after_the_manifest_was_built_anew_nothing_is_claimed_that_is_not_known(tmp_path: Path) -> None:
    """Block files name neither tenant nor identity fields; both are known again after the next store."""
    tier = FileTier(tmp_path, max_bytes=1 << 24, reserve_bytes=0)
    store(tier, samples.chain(2))
    tier.close()
    (tmp_path / "manifest.sqlite3").unlink()
    tier = FileTier(tmp_path, max_bytes=1 << 24, reserve_bytes=0)
    other = samples.chain(2, of=samples.namespace("other")).ref(0, 0)
    assert tier.explain(other) is None
    store(tier, samples.chain(3))
    assert tier.explain(other) == Miss(Cause.IDENTITY, "weights_digest")
    tier.close()


def test_a_namespace_of_a_version_with_other_fields_is_no_fault(tmp_path: Path) -> None:
    tier = FileTier(tmp_path, max_bytes=1 << 24, reserve_bytes=0)
    store(tier, samples.chain(2))
    with tier._store.transaction() as db:
        db.execute("UPDATE namespaces SET identity = ?", (b'{"unknown": 1}',))
    assert tier.explain(samples.chain(2, of=samples.namespace("other")).ref(0, 0)) is None
    tier.close()


def test_ghosts_are_bounded() -> None:
    ghosts = Ghosts()
    for i in range(GHOSTS + 10):
        ghosts.add(i.to_bytes(32, "big"))
    assert [i.to_bytes(32, "big") in ghosts for i in (9, 10, GHOSTS + 9)] == [False, True, True]
    ghosts.discard(bytes(32))


def test_ghosts_of_the_manifest_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stemkv.tiers.manifest.GHOSTS", 3)
    tier = FileTier(tmp_path, max_bytes=4 * 8192, reserve_bytes=0)
    old = store(tier, samples.chain(4))
    for seed in range(1, 8):
        store(tier, samples.chain(1, seed=seed))
    reader = tier._store.opened.reader
    assert reader is not None
    assert reader.query("SELECT count(*) FROM ghosts") == [(3,)]
    assert tier.explain(old[3]) is None, "the oldest ghosts are forgotten"
    tier.close()
