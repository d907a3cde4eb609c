"""Identities: one encoding for one meaning, every field counts, and what is odd is refused at once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemkv import identity as module
from stemkv.identity import Adapter, GroupSpec, HitPolicy, Identity, Layout, Shard, TensorSpec, encode_value
from stemkv.keys import Chain, Namespace
from stemkv.misses import Cause, Miss
from stemkv.pool import Pool
from stemkv.tiers.file import FileTier
from stemkv.tiers.memory import MemoryTier

from . import make

replace = msgspec.structs.replace
OTHER = hashlib.sha256(b"other").digest()
LORA = Adapter(hashlib.sha256(b"lora").digest(), 1.0)
BASE = make.identity(make.PREFIX, make.TRAILING, adapters=(LORA,), kv_scale_digest=hashlib.sha256(b"s").digest())


def with_tensor(**changes: Any) -> dict[str, Any]:
    tensors = make.PREFIX.tensors
    return {"groups": (replace(make.PREFIX, tensors=(replace(tensors[0], **changes), tensors[1])), make.TRAILING)}


@dataclass
class Change:
    """One field changed alone, and the name that the miss must carry."""

    name: str
    change: dict[str, Any]


CHANGES = {
    "schema": Change("schema", {"schema": 2}),
    "weights_digest": Change("weights_digest", {"weights_digest": OTHER}),
    "weights_digest, last byte": Change("weights_digest", {"weights_digest": BASE.weights_digest[:31] + b"\0"}),
    "weights_source": Change("weights_source", {"weights_source": "memory"}),
    "config_digest": Change("config_digest", {"config_digest": OTHER}),
    "quantization": Change("quantization", {"quantization": "int4"}),
    "adapters, none": Change("adapters", {"adapters": ()}),
    "adapters, digest": Change("adapters", {"adapters": (Adapter(OTHER, 1.0),)}),
    "adapters, scale": Change("adapters", {"adapters": (Adapter(LORA.digest, 0.5),)}),
    "adapters, twice": Change("adapters", {"adapters": (LORA, LORA)}),
    "kv_dtype": Change("kv_dtype", {"kv_dtype": "F16"}),
    "kv_scale_digest": Change("kv_scale_digest", {"kv_scale_digest": OTHER}),
    "kv_scale_digest, none": Change("kv_scale_digest", {"kv_scale_digest": b""}),
    **{
        f"layout.{field}": Change(f"layout.{field}", {"layout": replace(BASE.layout, **{field: value})})
        for field, value in {"engine": "vllm", "name": "pages", "version": 2, "isa": "avx512"}.items()
    },
    **{
        f"shard.{kind}_size": Change(f"shard.{kind}_size", {"shard": Shard(**{f"{kind}_size": 2})})
        for kind in ("tp", "pp", "cp")
    },
    "groups, order": Change("groups", {"groups": (make.TRAILING, make.PREFIX)}),
    "groups, one less": Change("groups", {"groups": (make.PREFIX,)}),
    "groups, policy": Change("groups", {"groups": (replace(make.PREFIX, policy=HitPolicy.EXACT), make.TRAILING)}),
    "groups, layers": Change("groups", {"groups": (replace(make.PREFIX, layers=(0, 9)), make.TRAILING)}),
    "groups, window": Change("groups", {"groups": (make.PREFIX, replace(make.TRAILING, window=9))}),
    "groups, tensor name": Change("groups", with_tensor(name="q")),
    "groups, tensor dtype": Change("groups", with_tensor(dtype="F16")),
    "groups, tensor shape": Change("groups", with_tensor(shape=(4, 2))),
    "block_tokens": Change("block_tokens", {"block_tokens": 8}),
}


def test_every_field_is_in_the_list_of_changes() -> None:
    named = {c.name.partition(".")[0] for c in CHANGES.values()}
    assert named == set(Identity.__struct_fields__)
    assert {c.name for c in CHANGES.values() if c.name.startswith("layout.")} == {
        f"layout.{f}" for f in Layout.__struct_fields__
    }


@pytest.mark.parametrize("case", CHANGES)
def test_a_field_changed_alone_changes_digest_and_is_named(case: str) -> None:
    change = CHANGES[case]
    other = replace(BASE, **change.change)
    assert other.digest != BASE.digest
    assert BASE.differing_fields(other) == other.differing_fields(BASE) == (change.name,)


@pytest.mark.parametrize("tier", ["memory", "file"])
@pytest.mark.parametrize("case", CHANGES)
def test_a_field_changed_alone_gives_no_hit_and_a_cause_that_names_it(case: str, tier: str, tmp_path: Path) -> None:
    change = CHANGES[case]
    one = MemoryTier(1 << 20) if tier == "memory" else FileTier(tmp_path, max_bytes=1 << 20, reserve_bytes=0)
    tokens = range(17)
    with Pool([one]) as pool:
        before, after = Namespace(BASE), Namespace(replace(BASE, **change.change))
        make.store(pool, Chain(before, tokens))
        assert make.fetched(pool, Chain(after, tokens)) == (0, Miss(Cause.IDENTITY, change.name))
        assert make.fetched(pool, Chain(before, tokens)) == (4, None)


@pytest.mark.parametrize("kind", ["tp", "pp", "cp"])
def test_another_rank_gives_no_hit_and_is_named(kind: str) -> None:
    zero = replace(BASE, shard=Shard(**{f"{kind}_size": 2}))
    one = replace(BASE, shard=Shard(**{f"{kind}_size": 2, f"{kind}_rank": 1}))
    assert zero.differing_fields(one) == (f"shard.{kind}_rank",)
    with Pool([MemoryTier(1 << 20)]) as pool:
        make.store(pool, Chain(Namespace(zero), range(17)))
        miss = Miss(Cause.IDENTITY, f"shard.{kind}_rank")
        assert make.fetched(pool, Chain(Namespace(one), range(17))) == (0, miss)


# Encoding


values = st.recursive(
    st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text() | st.binary() | st.booleans(),
    lambda inner: st.lists(inner, max_size=4).map(tuple),
    max_leaves=8,
)


def typed(value: Any) -> Any:
    """A value that differs wherever two values differ in type or content."""
    if isinstance(value, tuple):
        return tuple(typed(v) for v in value)
    return type(value), repr(value)


@given(values, values)
def test_different_values_never_encode_equally(a: Any, b: Any) -> None:
    assert (encode_value(a) == encode_value(b)) == (typed(a) == typed(b))


@given(st.lists(values, max_size=5), st.lists(values, max_size=5))
def test_no_encoding_is_a_prefix_of_another(a: list[Any], b: list[Any]) -> None:
    """So joining encodings loses nothing: the lists can be told apart from the joined bytes."""
    one, two = b"".join(map(encode_value, a)), b"".join(map(encode_value, b))
    assert (one == two) == (typed(tuple(a)) == typed(tuple(b)))


def test_framing_pair_encodes_differently() -> None:
    assert encode_value(("ab", "c")) != encode_value(("a", "bc"))


def test_what_cannot_be_encoded_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot encode list"):
        encode_value([1])


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53), 2**53))
def test_equal_scales_encode_equally(scale: float) -> None:
    """1, 1.0 and True, 0.0 and -0.0 are equal, also after a round trip through the manifest's JSON."""
    mine = replace(BASE, adapters=(Adapter(OTHER, scale),))
    back = msgspec.json.decode(msgspec.json.encode(mine), type=Identity)
    same = replace(BASE, adapters=(Adapter(OTHER, scale + 0.0),))
    assert mine == back == same
    assert mine.digest == back.digest == same.digest
    assert Adapter(OTHER, -0.0) == Adapter(OTHER, 0)
    assert encode_value(Adapter(OTHER, -0.0)) == encode_value(Adapter(OTHER, 0)) == encode_value(Adapter(OTHER, False))


def test_digest_does_not_depend_on_how_the_record_came_about() -> None:
    assert BASE.digest == replace(BASE).digest == msgspec.json.decode(msgspec.json.encode(BASE), type=Identity).digest
    assert len(BASE.digest) == 32
    changed = replace(BASE, block_tokens=8)  # the cached digest of BASE must not travel along
    assert changed.digest != BASE.digest


class LaterLayout(Layout, frozen=True):
    """A Layout as a later version may have it."""

    tiling: int = 0


def test_an_appended_field_with_its_default_leaves_digests_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module._APPENDED, "LaterLayout", {"tiling": 0})
    later = replace(BASE, layout=LaterLayout("test", "LHTD", 1))
    assert later.encode() == BASE.encode()
    assert replace(BASE, layout=LaterLayout("test", "LHTD", 1, tiling=2)).digest != BASE.digest


def test_an_appended_field_of_the_identity_is_encoded_only_if_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module._APPENDED, "Identity", {"kv_scale_digest": b""})
    without = replace(BASE, kv_scale_digest=b"")
    assert b"kv_scale_digest" not in without.encode()
    assert b"kv_scale_digest" in BASE.encode()
    assert without.digest != BASE.digest


def test_fields_of_the_first_release_are_never_reordered_or_removed() -> None:
    """New fields go behind these and into ``_APPENDED``."""
    order = (
        "schema weights_digest weights_source config_digest quantization adapters kv_dtype kv_scale_digest layout shard"
    )
    assert Identity.__struct_fields__[:12] == (*order.split(), "groups", "block_tokens")
    assert Layout.__struct_fields__[:4] == ("engine", "name", "version", "isa")
    assert Shard.__struct_fields__[:6] == ("tp_rank", "tp_size", "pp_rank", "pp_size", "cp_rank", "cp_size")
    assert GroupSpec.__struct_fields__[:4] == ("policy", "layers", "tensors", "window")
    assert TensorSpec.__struct_fields__[:3] == ("name", "dtype", "shape")
    assert Adapter.__struct_fields__[:2] == ("digest", "scale")
    first = {Identity: 12, Layout: 4, Shard: 6, GroupSpec: 4, TensorSpec: 3, Adapter: 2}
    for kind, count in first.items():
        assert set(kind.__struct_fields__[count:]) == set(module._APPENDED.get(kind.__name__, {}))


# What is refused

REFUSED: dict[str, Any] = {
    "short digest": lambda: make.identity(weights_digest=b"w" * 31),
    "long digest": lambda: make.identity(config_digest=b"w" * 33),
    "text digest": lambda: make.identity(weights_digest="w" * 32),
    "short scale digest": lambda: make.identity(kv_scale_digest=b"s"),
    "no groups": lambda: make.identity(groups=()),
    "group list": lambda: make.identity(groups=[make.PREFIX]),
    "adapter list": lambda: make.identity(adapters=[LORA]),
    "layout text": lambda: make.identity(layout="LHTD"),
    "zero block_tokens": lambda: make.identity(block_tokens=0),
    "huge block_tokens": lambda: make.identity(block_tokens=2**21),
    "bool block_tokens": lambda: make.identity(block_tokens=True),
    "half a surrogate": lambda: make.identity(quantization="\ud800"),
    "number for text": lambda: make.identity(kv_dtype=16),
    "huge version": lambda: Layout("e", "n", 2**63),
    "rank beyond size": lambda: Shard(tp_rank=2, tp_size=2),
    "negative rank": lambda: Shard(pp_rank=-1),
    "nan scale": lambda: Adapter(OTHER, float("nan")),
    "infinite scale": lambda: Adapter(OTHER, float("inf")),
    "reserved tensor name": lambda: TensorSpec("__metadata__", "U8", (1,)),
    "tensor name with quote": lambda: TensorSpec('"', "U8", (1,)),
    "tensor name with colon": lambda: TensorSpec("a:b", "U8", (1,)),
    "tensor name with newline": lambda: TensorSpec("a\n", "U8", (1,)),
    "no tensor name": lambda: TensorSpec("", "U8", (1,)),
    "long tensor name": lambda: TensorSpec("x" * 129, "U8", (1,)),
    "unknown dtype": lambda: TensorSpec("k", "F12", (1,)),
    "zero size": lambda: TensorSpec("k", "U8", (0,)),
    "negative size": lambda: TensorSpec("k", "U8", (-1,)),
    "float size": lambda: TensorSpec("k", "U8", (1.0,)),  # type: ignore[arg-type]
    "many dimensions": lambda: TensorSpec("k", "U8", (1,) * 17),
    "no tensors": lambda: GroupSpec(HitPolicy.PREFIX, (0,), ()),
    "equal tensor names": lambda: GroupSpec(HitPolicy.PREFIX, (0,), make.EXACT.tensors * 2),
    "too many tensors": lambda: GroupSpec(
        HitPolicy.PREFIX, (0,), tuple(TensorSpec(f"t{i}", "U8", (1,)) for i in range(1025))
    ),
    "more than one AES-GCM call takes": lambda: GroupSpec(
        HitPolicy.PREFIX, (0,), (TensorSpec("k", "U8", (2**30,)), TensorSpec("v", "U8", (2**30,)))
    ),
    "window of PREFIX": lambda: GroupSpec(HitPolicy.PREFIX, (0,), make.PREFIX.tensors, window=1),
    "TRAILING without window": lambda: GroupSpec(HitPolicy.TRAILING, (0,), make.PREFIX.tensors),
    "policy as text": lambda: GroupSpec("prefix", (0,), make.PREFIX.tensors),  # type: ignore[arg-type]
    "negative layer": lambda: GroupSpec(HitPolicy.PREFIX, (-1,), make.PREFIX.tensors),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_could_fail_later_is_refused_when_it_is_made(what: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        REFUSED[what]()


def test_torch_sizes_are_shapes() -> None:
    """Engines take shapes from tensors; they must give the same identity as plain tuples."""

    class Size(tuple[int, ...]):
        __slots__ = ()

    assert TensorSpec("k", "U8", Size((2, 3))).shape.__class__ is tuple
    assert encode_value(TensorSpec("k", "U8", Size((2, 3)))) == encode_value(TensorSpec("k", "U8", (2, 3)))


# Which blocks a hit needs


@settings(max_examples=200)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 60))
def test_trailing_needs_exactly_the_blocks_that_the_window_can_see(
    boundary: int, block_tokens: int, window: int
) -> None:
    spec = replace(make.TRAILING, window=window)
    token = boundary * block_tokens  # the first one computed; it sees itself and window - 1 before it
    seen = range(max(0, token - (window - 1)), token)
    assert set(spec.blocks_needed(boundary, block_tokens)) == {t // block_tokens for t in seen}


def test_exact_needs_one_and_prefix_all() -> None:
    assert list(make.EXACT.blocks_needed(3, 4)) == [2]
    assert list(make.PREFIX.blocks_needed(3, 4)) == [0, 1, 2]
