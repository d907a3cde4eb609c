"""A block record is exactly what was stored for exactly what is asked, or a miss with the right cause."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stemkv import block
from stemkv.block import BlockError
from stemkv.identity import GroupSpec, HitPolicy, TensorSpec
from stemkv.keys import BlockRef
from stemkv.misses import CORRUPT, Cause
from stemkv.sealing import Sealer

from . import make

SPEC = GroupSpec(HitPolicy.PREFIX, (0,), (TensorSpec("k", "U8", (2, 16)),))
NS = make.namespace(SPEC, tenant="t", generation=7, root=make.SECRET)
REF = make.chain(3, ns=NS).ref(0, 1)
SIZE = block.header_bytes(SPEC)
SEALERS = {"public": Sealer(), "secret": Sealer(make.SECRET), "sealed": Sealer(make.SECRET, seal=True)}


def cause_of(raw: bytes | bytearray, sealer: Sealer, ref: BlockRef = REF) -> Cause | None:
    """The cause of the miss, None for a hit; anything but BlockError is a failure of the test."""
    try:
        assert make.reopen(raw, ref, sealer) == make.content(ref)
    except BlockError as error:
        return error.miss.cause
    return None


def crafted(sealer: Sealer, header: Callable[[dict[str, Any]], Any], pad: bytes = b" ") -> bytearray:
    """A stored record with a changed header and a tag that fits it: what a writer with the key could make."""
    rec = make.record(REF, sealer)
    data = memoryview(bytearray(rec.data))
    decoded = json.loads(bytes(data[8:SIZE]))
    changed = header(decoded)
    text = changed if isinstance(changed, bytes) else compact(changed)
    data[8:SIZE] = text.ljust(SIZE - 8, pad)
    meta = changed.get("__metadata__") if isinstance(changed, dict) else None
    nonce = meta.get("nonce", "") if isinstance(meta, dict) else ""
    if sealer.seals:
        data[SIZE:] = make.content(REF)
    tag = sealer.protect(data, SIZE, bytes.fromhex(nonce) if len(nonce) == 24 else bytes(12))
    return bytearray(bytes(data).replace(b'"tag":"' + b"0" * 32, b'"tag":"' + tag.hex().encode()))


def with_meta(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    def change(header: dict[str, Any]) -> Any:
        header["__metadata__"].update(fields)
        return header

    return change


@pytest.mark.parametrize("name", SEALERS)
def test_what_is_read_is_what_was_stored(name: str) -> None:
    assert cause_of(make.stored(make.record(REF, SEALERS[name])), SEALERS[name]) is None
    assert cause_of(crafted(SEALERS[name], lambda h: h), SEALERS[name]) is None


CAUSES_BY_FIELD = {
    "format": {Cause.BAD_VERSION},
    "key": {Cause.BAD_KEY}, "parent": {Cause.BAD_KEY}, "anchor": {Cause.BAD_KEY}, "group": {Cause.BAD_KEY},
    "namespace": {Cause.BAD_NAMESPACE},
    "identity": {Cause.BAD_IDENTITY},
    "generation": {Cause.BAD_GENERATION},
    "first_token": {Cause.BAD_TOKENS}, "tokens": {Cause.BAD_TOKENS}, "tokens_digest": {Cause.BAD_TOKENS},
    "codec": {Cause.BAD_LAYOUT}, "codec_params": {Cause.BAD_LAYOUT}, "layout": {Cause.BAD_LAYOUT},
    "created": {Cause.BAD_TAG}, "cost": {Cause.BAD_TAG}, "nonce": {Cause.BAD_TAG}, "tag": {Cause.BAD_TAG},
    "key_id": {Cause.BAD_SEAL},
}  # fmt: skip
"""What a changed value of each metadata field may be called, besides a malformed header."""


def field_spans(raw: bytes) -> list[tuple[range, str]]:
    """Where the value of each metadata field is in a stored record."""
    text = raw[:SIZE]
    spans = []
    for name, value in json.loads(text[8:])["__metadata__"].items():
        start = text.index(f'"{name}":"'.encode()) + len(name) + 4
        spans.append((range(start, start + len(value)), name))
    return spans


@pytest.mark.parametrize("name", SEALERS)
def test_every_single_bit_flip_is_a_miss_with_a_fitting_cause(name: str) -> None:
    """All bits of a whole record: header, padding and payload."""
    sealer, raw = SEALERS[name], bytes(make.stored(make.record(REF, SEALERS[name])))
    field_at = {at: field for span, field in field_spans(raw) for at in span}
    seen: dict[str, set[Cause]] = {}
    for at in range(len(raw)):
        for bit in range(8):
            changed = bytearray(raw)
            changed[at] ^= 1 << bit
            cause = cause_of(changed, sealer)
            assert cause is not None, f"bit {bit} of byte {at} changed and nobody noticed"
            if at >= SIZE:
                assert cause is Cause.BAD_TAG
            else:
                field = field_at.get(at, "")
                layout = set() if at < 8 or field else {Cause.BAD_LAYOUT}
                assert cause in {Cause.BAD_HEADER} | CAUSES_BY_FIELD.get(field, layout), (at, bit, field)
                seen.setdefault(field, set()).add(cause)
    assert all(CAUSES_BY_FIELD[field] <= seen[field] for field in CAUSES_BY_FIELD if field != "codec_params")


@pytest.mark.parametrize("name", SEALERS)
def test_truncated_extended_and_zeroed_records_are_misses(name: str) -> None:
    sealer, raw = SEALERS[name], bytes(make.stored(make.record(REF, SEALERS[name])))
    for size in [*range(0, len(raw), 97), len(raw) - 1]:
        assert cause_of(raw[:size], sealer) in {Cause.BAD_SIZE, Cause.BAD_HEADER}
        assert cause_of(raw[:size].ljust(len(raw), b"\0"), sealer) is not None
        assert cause_of(bytes(size) + raw[size:], sealer) is not None or size == 0
    for extra in (b"\0", raw, bytes(4096)):
        assert cause_of(raw + extra, sealer) is Cause.BAD_SIZE
    assert cause_of(bytes(len(raw)), sealer) is Cause.BAD_HEADER


def test_another_block_is_never_taken_for_the_one_asked_for() -> None:
    """Every pair out of blocks that differ in index, group, text, tenant, generation or identity alone."""
    two = (SPEC, GroupSpec(HitPolicy.EXACT, (1,), SPEC.tensors))
    spaces = [make.namespace(*two), make.namespace(*two, tenant="b"), make.namespace(*two, generation=1)]
    spaces += [make.namespace(*two, kv_dtype="F16"), make.namespace(*two, root=make.SECRET)]
    chains = [make.chain(2, first=first, ns=ns) for ns in spaces for first in (0, 4)]
    refs = [c.ref(group, index) for c in chains for group in (0, 1) for index in (0, 1)]
    records = [make.stored(make.record(ref)) for ref in refs]
    for i, ref in enumerate(refs):
        for j, raw in enumerate(records):
            assert cause_of(raw, Sealer(), ref) is (None if i == j else Cause.BAD_KEY)


LATER_CHECKS: list[tuple[Cause, dict[str, Any]]] = [
    (Cause.BAD_VERSION, {"format": "stemkv-block/2"}),
    (Cause.BAD_KEY, {"key": "0" * 64}),
    (Cause.BAD_KEY, {"anchor": "0" * 64}),
    (Cause.BAD_KEY, {"parent": "0" * 64}),
    (Cause.BAD_KEY, {"group": "1"}),
    (Cause.BAD_NAMESPACE, {"namespace": "0" * 64}),
    (Cause.BAD_IDENTITY, {"identity": "0" * 64}),
    (Cause.BAD_GENERATION, {"generation": "8"}),
    (Cause.BAD_TOKENS, {"first_token": "8"}),
    (Cause.BAD_TOKENS, {"tokens": "5"}),
    (Cause.BAD_TOKENS, {"tokens_digest": "0" * 64}),
    (Cause.BAD_SEAL, {"key_id": "0" * 16}),
    (Cause.BAD_LAYOUT, {"layout": "k:U8:32"}),
    (Cause.BAD_LAYOUT, {"codec": "int8"}),
    (Cause.BAD_LAYOUT, {"codec_params": "x"}),
    (Cause.BAD_TAG, {"nonce": "0" * 24}),
]


@pytest.mark.parametrize("first", range(len(LATER_CHECKS)))
def test_a_record_wrong_in_several_ways_reports_the_first_in_the_documented_order(first: int) -> None:
    wrong = {k: v for _, fields in LATER_CHECKS[first:] for k, v in fields.items()}
    raw = crafted(SEALERS["secret"], with_meta(**wrong))
    raw[-1] ^= 1
    assert cause_of(raw, SEALERS["secret"]) is LATER_CHECKS[first][0]
    assert cause_of(raw[:-1], SEALERS["secret"]) is Cause.BAD_SIZE


@pytest.mark.parametrize(("cause", "fields"), LATER_CHECKS[:-1])
def test_a_valid_tag_does_not_make_up_for_a_wrong_field(cause: Cause, fields: dict[str, Any]) -> None:
    assert cause_of(crafted(SEALERS["secret"], with_meta(**fields)), SEALERS["secret"]) is cause


def test_an_older_reader_refuses_a_newer_format_by_name() -> None:
    for version in ("stemkv-block/2", "stemkv-block/1.1", "stemkv-block/\n" + "x" * 99):
        raw = crafted(SEALERS["secret"], with_meta(format=version, something="new"))
        with pytest.raises(BlockError) as caught:
            make.reopen(raw, REF, SEALERS["secret"])
        assert caught.value.miss.cause is Cause.BAD_VERSION
        assert caught.value.miss.detail == version[:32].replace("\n", "?")


def compact(header: Any) -> bytes:
    return json.dumps(header, separators=(",", ":")).encode()


def doubled(header: dict[str, Any]) -> bytes:
    return compact(header)[:-1] + b',"k":{"dtype":"U8","shape":[2,16],"data_offsets":[0,32]}}'


def two_metadata(header: dict[str, Any]) -> bytes:
    other = {"__metadata__": {**header["__metadata__"], "key": "0" * 64}}
    return (
        json.dumps(other, separators=(",", ":"))[:-1] + "," + json.dumps(header, separators=(",", ":"))[1:]
    ).encode()


def reordered(header: dict[str, Any]) -> dict[str, Any]:
    return dict(reversed(header.items()))


def entry(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    def change(header: dict[str, Any]) -> Any:
        header["k"] = {**header["k"], **changes}
        return header

    return change


def renamed(header: dict[str, Any]) -> Any:
    header["K"] = header.pop("k")
    return header


TRICKS: dict[str, tuple[Callable[[dict[str, Any]], Any], Cause]] = {
    "duplicate tensor": (doubled, Cause.BAD_HEADER),
    "duplicate metadata": (two_metadata, Cause.BAD_HEADER),
    "other order": (reordered, Cause.BAD_HEADER),
    "spaces in the JSON": (lambda h: json.dumps(h).encode(), Cause.BAD_HEADER),
    "escaped letters": (lambda h: compact(h).replace(b"raw", b"\\u0072aw"), Cause.BAD_HEADER),
    "number as float": (entry(shape=[2.0, 16]), Cause.BAD_LAYOUT),
    "number as bool": (entry(data_offsets=[False, 32]), Cause.BAD_LAYOUT),
    "other offsets": (entry(data_offsets=[16, 48]), Cause.BAD_LAYOUT),
    "offsets out of the file": (entry(data_offsets=[0, 2**63]), Cause.BAD_LAYOUT),
    "negative offsets": (entry(data_offsets=[-1, 31]), Cause.BAD_LAYOUT),
    "other dtype": (entry(dtype="I8"), Cause.BAD_LAYOUT),
    "other name": (renamed, Cause.BAD_LAYOUT),
    "one more entry": (lambda h: {**h, "x": {"dtype": "U8", "shape": [0], "data_offsets": [32, 32]}}, Cause.BAD_LAYOUT),
    "unknown metadata": (with_meta(extra="1"), Cause.BAD_HEADER),
    "number in the metadata": (with_meta(tokens=4), Cause.BAD_HEADER),
    "null in the metadata": (with_meta(layout=None), Cause.BAD_HEADER),
    "nonce with spaces": (with_meta(nonce="00 " * 8), Cause.BAD_HEADER),
    "nonce in capitals": (with_meta(nonce="AB" * 12), Cause.BAD_HEADER),
    "short nonce": (with_meta(nonce="00" * 11), Cause.BAD_HEADER),
    "cost that is not a number": (with_meta(cost="nan"), Cause.BAD_HEADER),
    "infinite cost": (with_meta(cost="inf"), Cause.BAD_HEADER),
    "cost in other digits": (with_meta(cost="٣.000000"), Cause.BAD_HEADER),
    "cost with a leading zero": (with_meta(cost="00.100000"), Cause.BAD_HEADER),
    "negative creation": (with_meta(created="-1.000"), Cause.BAD_HEADER),
    "no metadata": (lambda h: {"k": h["k"]}, Cause.BAD_HEADER),
    "metadata as list": (lambda h: {**h, "__metadata__": [1]}, Cause.BAD_HEADER),
    "metadata as text": (lambda h: {**h, "__metadata__": "format"}, Cause.BAD_HEADER),
    "another program's metadata": (lambda h: {**h, "__metadata__": {"format": "pt"}}, Cause.BAD_HEADER),
    "format as number": (with_meta(format=1), Cause.BAD_HEADER),
    "header is a list": (lambda h: b"[1]", Cause.BAD_HEADER),
    "header is nothing": (lambda h: b"", Cause.BAD_HEADER),
    "NaN": (lambda h: b'{"__metadata__":NaN}', Cause.BAD_HEADER),
    "huge number": (lambda h: b'{"a":1e999}', Cause.BAD_HEADER),
    "number of 4000 digits": (lambda h: b'{"a":' + b"9" * 4000 + b"}", Cause.BAD_HEADER),
    "deep lists": (lambda h: b'{"a":' + b"[" * 4000, Cause.BAD_HEADER),
    "deep objects": (lambda h: b'{"a":' * 800, Cause.BAD_HEADER),
    "broken UTF-8": (lambda h: b'{"a":"\xff"}', Cause.BAD_HEADER),
    "half a surrogate": (lambda h: b'{"a":"\\ud800"}', Cause.BAD_HEADER),
    "byte order mark": (lambda h: b"\xef\xbb\xbf" + compact(h), Cause.BAD_HEADER),
}  # fmt: skip


@pytest.mark.parametrize("what", TRICKS)
def test_headers_that_other_readers_might_understand_otherwise_are_misses(what: str) -> None:
    """Also with a tag that fits: with the public key anyone can make one."""
    change, cause = TRICKS[what]
    raw = crafted(SEALERS["public"], change)
    found = cause_of(raw, SEALERS["public"])
    if b'"tag":"' not in raw[:SIZE]:
        cause = Cause.BAD_HEADER
    assert found is cause


@pytest.mark.parametrize("pad", [b"\0", b"\n", b"}", b"x"])
def test_padding_is_spaces(pad: bytes) -> None:
    assert cause_of(crafted(SEALERS["public"], lambda h: h, pad), SEALERS["public"]) is Cause.BAD_HEADER


# Arbitrary bytes


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=8) | st.just("format"), v, max_size=3),
    max_leaves=12,
)  # fmt: skip
headers = st.binary(max_size=300) | json_values.map(lambda v: json.dumps(v).encode()) | json_values.map(
    lambda v: json.dumps({"__metadata__": v, "k": v}).encode()
)  # fmt: skip


@settings(max_examples=300)
@given(headers)
@example(b"")
@example(b"{}")
def test_parsing_any_bytes_raises_nothing_but_a_miss(raw: bytes) -> None:
    with pytest.raises(BlockError) as caught:
        block.parse_header(raw)
    assert caught.value.miss.cause in {Cause.BAD_HEADER, Cause.BAD_VERSION}


@settings(max_examples=300)
@given(st.integers(0, 2**64 - 1) | st.just(SIZE - 8), headers, st.sampled_from([0, 8, 9, SIZE, SIZE + 32]))
@example(2**64 - 1, b"", SIZE)
@example(0, b"", 0)
def test_reading_any_bytes_raises_nothing_but_a_miss(length: int, header: bytes, size: int) -> None:
    raw = (struct.pack("<Q", length) + header).ljust(size, b" ")[: size or None]
    assert cause_of(raw, SEALERS["public"]) in CORRUPT
    data = memoryview(bytearray(raw))
    with pytest.raises(BlockError):
        block.verify(data, bytes(16), REF, SEALERS["public"])


@settings(max_examples=300)
@given(
    st.sampled_from(sorted(SEALERS)), st.lists(st.tuples(st.integers(0, SIZE + 31), st.binary(min_size=1, max_size=40)))
)
def test_overwriting_any_bytes_of_a_record_never_gives_other_content(
    name: str, patches: list[tuple[int, bytes]]
) -> None:
    raw = make.stored(make.record(REF, SEALERS[name]))
    changed = bytearray(raw)
    for at, patch in patches:
        changed[at : at + len(patch)] = patch
    cause = cause_of(changed, SEALERS[name])
    assert (cause is None) == (changed == raw)


def test_a_hostile_header_costs_bounded_memory() -> None:
    hostile = [b'{"__metadata__":[' + b"[]," * 300_000, b'{"a":"' + b"x" * 900_000 + b'"}', b"[" * 1_000_000]
    hostile.append(b"{" + b",".join(b'"%d":{}' % i for i in range(90_000)) + b"}")
    tracemalloc.start()
    try:
        for header in hostile:
            with pytest.raises(BlockError):
                block.parse_header(header)
            with pytest.raises(BlockError):
                block.take_tag(memoryview(bytearray(struct.pack("<Q", 2**63) + header)))
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
