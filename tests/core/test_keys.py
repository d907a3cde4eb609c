"""Keys depend on everything that shaped a block, on all of its bytes, and on nothing a request says."""

from __future__ import annotations

import inspect
import secrets
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stemkv import keys as module
from stemkv.keys import PUBLIC_ROOT, Chain, Namespace, framed, token_bytes
from stemkv.misses import Cause, Miss
from stemkv.pool import Pool
from stemkv.tiers.memory import MemoryTier

from . import make

parts = st.lists(st.binary(max_size=6), max_size=5)


@given(parts, parts)
def test_framed_parts_are_equal_only_if_all_parts_are(a: list[bytes], b: list[bytes]) -> None:
    assert (framed(*a) == framed(*b)) == (a == b)


def test_framing_pair() -> None:
    assert framed("ab", "c") != framed("a", "bc")
    assert framed("ab", "") != framed("", "ab")


@given(st.lists(st.integers(0, 2**32 - 1), max_size=20))
def test_token_ids_are_packed_alike_from_any_sequence(tokens: list[int]) -> None:
    packed = token_bytes(tokens)
    assert packed == b"".join(t.to_bytes(4, "little") for t in tokens)
    assert token_bytes(tuple(tokens)) == packed
    assert token_bytes(np.array(tokens, dtype=np.int64)) == packed
    assert token_bytes(array("Q", tokens)) == packed


@pytest.mark.parametrize("token", [-1, 2**32, 2**64, -(2**70)])
def test_token_ids_out_of_range_are_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        Chain(make.namespace(), [1, token, 3, 4])


@pytest.mark.parametrize("tokens", [b"\1\2\3\4", "text", [1.0], [None], bytearray(8)])
def test_what_is_no_token_id_is_refused(tokens: object) -> None:
    with pytest.raises(TypeError):
        Chain(make.namespace(), tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", range(10))
def test_only_full_blocks_have_keys(count: int) -> None:
    chain = Chain(make.namespace(), range(count))
    assert len(chain) == count // 4
    assert chain.token_count == count


@given(st.lists(st.integers(0, 9), max_size=12), st.lists(st.integers(0, 9), max_size=12))
def test_keys_are_equal_exactly_as_far_as_the_tokens_are(a: list[int], b: list[int]) -> None:
    ns = make.namespace(block_tokens=2)
    one, two = Chain(ns, a).keys, Chain(ns, b).keys
    for i, (x, y) in enumerate(zip(one, two, strict=False)):
        assert (x == y) == (a[: 2 * i + 2] == b[: 2 * i + 2])


def test_extras_change_their_block_and_all_later_ones() -> None:
    ns = make.namespace()
    plain, media = Chain(ns, range(16)), Chain(ns, range(16), {1: [b"media"]})
    assert [a == b for a, b in zip(plain.keys, media.keys, strict=True)] == [True, False, False, False]
    assert Chain(ns, range(16), {1: [b"ab", b"c"]}).keys != Chain(ns, range(16), {1: [b"a", b"bc"]}).keys
    assert Chain(ns, range(16), {1: [b""]}).keys != plain.keys
    assert Chain(ns, range(16), {4: [b"in the block that is not full yet"]}).keys == plain.keys


def test_extras_that_would_be_ignored_are_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        Chain(make.namespace(), range(16), {-1: [b"media"]})


@pytest.mark.parametrize(
    "other",
    [
        {"tenant": "b"},
        {"tenant": ""},
        {"generation": 1},
        {"root": bytes(32)},
        {"root": PUBLIC_ROOT},
        {"block_tokens": 8},
    ],
    ids=str,
)
def test_tenant_generation_root_and_identity_change_every_name(other: dict[str, object]) -> None:
    mine = {"tenant": "a", "generation": 0, "root": make.SECRET}
    one = make.chain(2, ns=make.namespace(make.PREFIX, make.EXACT, **mine))  # type: ignore[arg-type]
    two = make.chain(2, ns=make.namespace(make.PREFIX, make.EXACT, **{**mine, **other}))  # type: ignore[arg-type]
    names_of = [{c.namespace.key, c.namespace.id, c.root, *c.keys, *c.group_keys(1, range(2))} for c in (one, two)]
    assert len(names_of[0]) == len(names_of[1]) == 7
    assert not names_of[0] & names_of[1]


@given(st.text(max_size=8), st.text(max_size=8), st.integers(0, 2**63 - 1))
def test_no_two_tenants_share_a_namespace(a: str, b: str, generation: int) -> None:
    one, two = make.namespace(tenant=a, generation=generation), make.namespace(tenant=b, generation=generation)
    assert (one.key == two.key) == (one.tenant_id == two.tenant_id) == (a == b)


def test_a_tenant_of_any_text_is_served() -> None:
    """A forbidden character in a salt once took a whole engine down (CVE-2026-105756)."""
    odd = ["\ud800", "\udfff", "\0", "a/../b", "\n", "x" * 100_000]
    assert len({make.namespace(tenant=t).id for t in odd}) == len(odd)


@pytest.mark.parametrize("generation", [-1, 2**63, 2**64])
def test_a_generation_that_no_manifest_can_hold_is_refused(generation: int) -> None:
    with pytest.raises(ValueError, match="generation"):
        make.namespace(generation=generation)


def test_all_32_bytes_are_used_everywhere() -> None:
    ns = make.namespace(make.PREFIX, make.EXACT, tenant="t", root=make.SECRET)
    chain = Chain(ns, range(8))
    ref = chain.ref(1, 1)
    names = [ns.key, ns.id, ns.tenant_key, ns.tenant_id, ns.identity.digest, chain.root, *chain.keys]
    names += [ref.key, ref.parent, ref.anchor, ref.tokens_digest]
    assert {len(name) for name in names} == {32}


def test_the_secret_is_used_whole() -> None:
    changed = [make.SECRET[:i] + b"\xff" + make.SECRET[i + 1 :] for i in range(32)]
    assert len({make.namespace(root=r).key for r in [*changed, make.SECRET]}) == 33


def test_no_key_is_shared_between_groups_blocks_and_uses() -> None:
    ns = make.namespace(make.PREFIX, make.TRAILING, make.EXACT, block_tokens=1)
    chain = Chain(ns, [0] * 200)
    names = [chain.root, ns.id, *chain.keys, *chain.group_keys(1, range(200)), *chain.group_keys(2, range(200))]
    assert len(set(names)) == len(names)


def test_messages_of_one_key_never_coincide() -> None:
    """A chain message made to look like a group message: 32 bytes of key, then "group" and a number."""
    ns = make.namespace(make.PREFIX, make.EXACT, block_tokens=1)
    chain = Chain(ns, [1])
    forged = Chain(ns, [1, int.from_bytes(b"grou", "little")], {1: [b"p\1\0"]})
    assert chain.group_keys(1, range(1))[0] not in forged.keys


def test_refs_describe_the_block_they_ask_for() -> None:
    chain = make.chain(3, ns=make.namespace(make.PREFIX, make.EXACT))
    ref, state = chain.ref(0, 1), chain.ref(1, 1)
    assert (ref.key, ref.parent, ref.anchor) == (chain.keys[1], chain.keys[0], chain.keys[1])
    assert ref.needs == chain.keys[0]
    assert (state.anchor, state.needs, state.key) == (chain.keys[1], chain.keys[1], chain.group_keys(1, range(1, 2))[0])
    assert (ref.first_token, ref.token_count) == (4, 4)
    assert chain.ref(0, 0).parent == chain.root
    assert ref.tokens_digest == state.tokens_digest != chain.ref(0, 2).tokens_digest


@pytest.mark.parametrize(("group", "index"), [(0, 3), (0, -1), (2, 0), (-1, 0)])
def test_there_is_no_ref_for_a_block_that_does_not_exist(group: int, index: int) -> None:
    with pytest.raises(IndexError):
        make.chain(3, ns=make.namespace(make.PREFIX, make.EXACT)).ref(group, index)


def test_the_same_text_is_recognized_in_one_tenant_only() -> None:
    a1, a2 = (make.namespace(tenant="a", generation=g) for g in (1, 2))
    b = make.namespace(tenant="b", generation=1)
    digests = [make.chain(2, ns=ns).ref(0, 0).tokens_digest for ns in (a1, a2, b)]
    assert digests[0] == digests[1] != digests[2]
    assert make.chain(2, first=4).ref(0, 0).tokens_digest != make.chain(2).ref(0, 1).tokens_digest, "position counts"


def test_keys_are_made_from_content_and_never_given() -> None:
    """Nothing in the public interface takes a key for a prompt; keys come out of a Chain only."""
    assert set(inspect.signature(Chain).parameters) == {"namespace", "tokens", "extras"}
    assert set(inspect.signature(Namespace).parameters) == {"identity", "tenant", "generation", "root"}
    assert set(inspect.signature(Pool.match).parameters) == {"self", "chain", "without"}
    assert set(inspect.signature(Pool.store).parameters) == {"self", "chain", "blocks", "source", "cost_s"}


def test_secrets_are_not_shown() -> None:
    root = secrets.token_bytes(32)
    ns = make.namespace(tenant="the tenant's name", root=root)
    shown = repr(ns) + str(ns) + repr(make.chain(1, ns=ns).ref(0, 0))
    for hidden in (root, ns.key, ns.tenant_key):
        assert hidden.hex() not in shown
        assert repr(hidden)[2:-1] not in shown
    assert "the tenant's name" not in shown


def test_keys_do_not_depend_on_the_processor() -> None:
    assert module.token_bytes([1]) == b"\1\0\0\0"


# Through the pool


def test_generation_tenant_and_root_changed_alone_give_no_hit() -> None:
    mine = {"tenant": "a", "generation": 3, "root": make.SECRET}
    expected = {
        "generation": Miss(Cause.GENERATION, "stored under 3, asked for 4"),
        "tenant": Miss(Cause.UNSEEN),
        "root": Miss(Cause.UNSEEN),
    }
    with Pool([MemoryTier(1 << 20)]) as pool:
        make.store(pool, make.chain(3, ns=make.namespace(**mine)))  # type: ignore[arg-type]
        for what, other in {"generation": 4, "tenant": "b", "root": bytes(32)}.items():
            ns = make.namespace(**{**mine, what: other})  # type: ignore[arg-type]
            assert make.fetched(pool, make.chain(3, ns=ns)) == (0, expected[what])
        assert make.fetched(pool, make.chain(3, ns=make.namespace(**mine))) == (3, None)  # type: ignore[arg-type]


def test_no_cause_ever_tells_a_tenant_about_another() -> None:
    """The same text under another identity, generation or divergence of another tenant is simply unseen."""
    with Pool([MemoryTier(1 << 20)]) as pool:
        for generation in (0, 1):
            make.store(pool, make.chain(3, ns=make.namespace(tenant="b", generation=generation, kv_dtype="F16")))
        for generation in (0, 1, 2):
            mine = make.namespace(tenant="a", generation=generation)
            assert make.fetched(pool, make.chain(3, ns=mine)) == (0, Miss(Cause.UNSEEN))


@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_a_prompt_without_a_full_block_before_its_last_token_is_too_short(count: int) -> None:
    with Pool([MemoryTier(1 << 20)]) as pool:
        ns = make.namespace()
        make.store(pool, Chain(ns, range(8)))
        assert make.fetched(pool, Chain(ns, range(count))) == (0, Miss(Cause.TOO_SHORT))


def test_a_prompt_of_exactly_n_blocks_leaves_one_token_to_compute() -> None:
    with Pool([MemoryTier(1 << 20)]) as pool:
        ns = make.namespace()
        make.store(pool, Chain(ns, range(12)))
        assert make.fetched(pool, Chain(ns, range(12))) == (2, None)
        assert make.fetched(pool, Chain(ns, range(13))) == (3, None)
        assert make.fetched(pool, Chain(ns, range(17))) == (3, Miss(Cause.END_OF_STORED))
