"""A block's size follows from its spec alone and always suffices: finishing a block cannot fail."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemkv import block
from stemkv.identity import (
    DTYPE_BYTES,
    MAX_BLOCK_TOKENS,
    MAX_GROUPS,
    MAX_PAYLOAD_BYTES,
    MAX_TENSORS,
    GroupSpec,
    HitPolicy,
    TensorSpec,
)
from stemkv.keys import BlockRef, Chain
from stemkv.sealing import Sealer

from . import make

SEALED = Sealer(make.SECRET, seal=True)
LONGEST_DTYPE = max(DTYPE_BYTES, key=len)


def json_bytes(spec: GroupSpec, sealer: Sealer, **meta: Any) -> int:
    """Length of the longest header that any block of ``spec`` can have."""
    ns = make.namespace(spec, generation=2**63 - 1, block_tokens=MAX_BLOCK_TOKENS)
    ref = BlockRef(
        namespace=ns,
        key=bytes(32),
        parent=bytes(32),
        anchor=bytes(32),
        group=0,
        index=2**63 // MAX_BLOCK_TOKENS - 1,
        tokens_digest=bytes(32),
    )
    header = block._header_json(ref, f"{1e9:.6f}", f"{1e12:.3f}", bytes(12).hex(), sealer)
    return len(header) + len(str(MAX_GROUPS - 1)) - 1


names = st.text("abcXYZ019_.-", min_size=1, max_size=128)
shapes = st.lists(st.integers(1, 2**31 - 1), max_size=16)


@st.composite
def specs(draw: st.DrawFn) -> GroupSpec:
    """Specs with long names, many dimensions and large numbers that still fit one AES-GCM call."""
    tensors, left = [], MAX_PAYLOAD_BYTES
    for name in draw(st.lists(names, min_size=1, max_size=12, unique=True)):
        dtype, shape = draw(st.sampled_from(sorted(DTYPE_BYTES))), []
        room = left // 12 // DTYPE_BYTES[dtype]
        for n in draw(shapes):
            shape.append(min(n, max(1, room)))
            room //= shape[-1]
        tensors.append(TensorSpec(name, dtype, tuple(shape)))
    return GroupSpec(HitPolicy.PREFIX, (0,), tuple(tensors))


@settings(max_examples=200)
@given(specs())
def test_the_longest_header_of_any_spec_fits(spec: GroupSpec) -> None:
    size = block.header_bytes(spec)
    assert size % block.ALIGNMENT == 0
    assert size == block.header_bytes(msgspec.structs.replace(spec, layers=(7, 8)))
    for sealer in (Sealer(), SEALED):
        assert 8 + json_bytes(spec, sealer) <= size


def test_the_bounds_of_metadata_and_entries_hold_by_themselves() -> None:
    """Not only thanks to rounding: the longest metadata, and the longest entry without name and dimensions."""
    one = GroupSpec(HitPolicy.PREFIX, (0,), (TensorSpec("k", LONGEST_DTYPE, (2**30,)),))
    with_one, with_more = json_bytes(one, Sealer(make.SECRET)), []
    for count in range(2, 9):
        tensors = tuple(TensorSpec(f"t{i}", LONGEST_DTYPE, (2**30 // 8,)) for i in range(count))
        with_more.append(json_bytes(GroupSpec(HitPolicy.PREFIX, (0,), tensors), Sealer(make.SECRET)))
    assert max(b - a for a, b in itertools.pairwise(with_more)) <= block._ENTRY_BYTES + 2 * (2 + 9)
    assert with_one <= block._METADATA_BYTES
    assert json_bytes(one, SEALED) <= block._METADATA_BYTES


def test_the_largest_header_leaves_room_for_the_largest_payload_in_one_call() -> None:
    tensors = tuple(TensorSpec(f"{i:0128d}", LONGEST_DTYPE, (1,) * 15 + (2**10,)) for i in range(MAX_TENSORS))
    largest = block.header_bytes(GroupSpec(HitPolicy.PREFIX, (0,), tensors))
    most_dimensions = MAX_TENSORS * 2 * 16 * len("2147483647x")
    assert largest + most_dimensions <= block.MAX_HEADER_BYTES
    assert block.MAX_HEADER_BYTES + MAX_PAYLOAD_BYTES < 2**31 - 1


ODD = [math.nan, math.inf, -math.inf, 1e300, -1.0, 5e-324, -0.0, 0.0000005, 999_999_999.9999999, 1e9, 1e12]


@settings(max_examples=100)
@given(
    cost=st.floats() | st.sampled_from(ODD),
    created=st.floats() | st.sampled_from(ODD),
    index=st.integers(0, 3),
    generation=st.integers(0, 2**63 - 1),
    sealed=st.booleans(),
)
def test_finishing_never_fails_and_the_result_verifies(
    cost: float, created: float, index: int, generation: int, sealed: bool
) -> None:
    ref = make.chain(4, ns=make.namespace(generation=generation)).ref(0, index)
    sealer = SEALED if sealed else Sealer()
    rec = make.record(ref, sealer, cost_s=cost, created=created)
    assert 0 <= rec.cost_s <= 1e9
    assert make.reopen(make.stored(rec), ref, sealer) == make.content(ref)
    copied = block.copy(ref, rec.data, rec.tag)
    assert math.isclose(copied.cost_s, rec.cost_s, abs_tol=1e-6)
    assert math.isclose(copied.created, rec.created, abs_tol=1e-3)


def test_the_payload_starts_where_the_header_says_and_the_record_has_the_promised_size() -> None:
    for group in (make.PREFIX, make.TRAILING, make.EXACT):
        ref = make.chain(1, ns=make.namespace(group)).ref(0, 0)
        raw = make.stored(make.record(ref))
        length = int.from_bytes(raw[:8], "little")
        assert len(raw) == block.record_bytes(group) == 8 + length + group.payload_bytes
        assert (8 + length) % 4096 == 0
        assert bytes(raw[8 + length :]) == make.content(ref)


def test_a_copy_is_the_record_verbatim_and_its_own() -> None:
    """Promotion must keep the tag, and a tier's buffer may be used again at once."""
    ref = make.chain(2).ref(0, 1)
    rec = make.record(ref, cost_s=0.5, created=123.25)
    data = memoryview(bytearray(rec.data))
    copied = block.copy(ref, data, rec.tag)
    data[:] = bytes(len(data))
    assert copied == rec
    assert make.stored(copied) == make.stored(rec)


def test_taking_the_tag_and_putting_it_back_changes_nothing() -> None:
    raw = make.stored(make.record(make.chain(1).ref(0, 0)))
    data = memoryview(bytearray(raw))
    tag = block.take_tag(data)
    assert len(tag) == 16
    assert b'"tag":"' + b"0" * 32 in bytes(data)
    rec = make.record(make.chain(1).ref(0, 0))
    again = msgspec.structs.replace(rec, data=data, tag=tag)
    assert make.stored(again) == raw


def test_finished_records_cannot_be_written() -> None:
    rec = make.record(make.chain(1).ref(0, 0))
    with pytest.raises(TypeError):
        rec.data[0] = 1


def test_the_header_is_plain_json_with_text_metadata() -> None:
    """What the safetensors format asks for."""
    raw = make.stored(make.record(Chain(make.namespace(), range(9)).ref(0, 1)))
    header = json.loads(raw[8 : block.header_bytes(make.PREFIX)])
    assert next(iter(header)) == "__metadata__"
    assert all(isinstance(v, str) for v in header["__metadata__"].values())
