"""The block record: one safetensors file, self-describing and tagged.

A record is a safetensors header padded to a multiple of 4096 bytes, then the payload. The header's
``__metadata__`` names the block and carries the tag; ``docs/format.md`` has the byte table and vectors.

In memory a record is *canonical*: the 32 hex digits of its tag field are zeros and the tag is kept beside it,
because the tag covers the record in exactly that form. :func:`take_tag` and :func:`with_tag` convert.

A header has one valid form for its content: :func:`verify` writes it anew from what it parsed and compares, so that
two readers can never understand one file differently (duplicate keys, other spellings of a number, hidden bytes).
"""

from __future__ import annotations

import re
import struct
import time
from functools import lru_cache
from typing import Any

import msgspec

from stemkv.identity import GroupSpec, TensorSpec
from stemkv.keys import BlockRef
from stemkv.misses import Cause, Miss
from stemkv.sealing import NONCE_BYTES, TAG_BYTES, Sealer

FORMAT = "stemkv-block/1"
ALIGNMENT = 4096
"""The payload starts on a multiple of this, for direct I/O and mmap."""
MAX_HEADER_BYTES = 1 << 20
"""No header is larger; checked before anything is allocated."""
_TAG_FIELD = b'"tag":"'
_NO_TAG = b"0" * (2 * TAG_BYTES)
_METADATA_BYTES = 1536
"""More than the metadata ever take in JSON, without the layout and with the entry of a sealed payload."""
_ENTRY_BYTES = 128
"""More than one tensor's entry and its part of the layout ever take, without the names and dimensions in them."""
_MAX_COST_S = 1e9
_MAX_CREATED_S = 1e12
_COST = re.compile(r"(?:0|[1-9][0-9]{0,9})\.[0-9]{6}")
_CREATED = re.compile(r"(?:0|[1-9][0-9]{0,12})\.[0-9]{3}")
_NONCE = re.compile(f"[0-9a-f]{{{2 * NONCE_BYTES}}}")
_OWN_VALUES = re.compile(
    f'"created":"({_CREATED.pattern})","cost":"({_COST.pattern})","key_id":"[^"]*","nonce":"({_NONCE.pattern})"'.encode()
)
"""What a reader cannot know of a good header before it has read it."""


class BlockError(Exception):
    """A record is not the block that was asked for. Internal: tiers turn it into a miss."""

    def __init__(self, cause: Cause, detail: str = "") -> None:
        super().__init__(cause, detail)
        self.miss = Miss(cause, detail)


class Metadata(msgspec.Struct, forbid_unknown_fields=True):
    """``__metadata__`` of a block file. safetensors wants strings; numbers are decimal, bytes are hex."""

    format: str
    key: str
    parent: str
    anchor: str
    namespace: str
    identity: str
    generation: str
    first_token: str
    tokens: str
    tokens_digest: str
    group: str
    codec: str
    codec_params: str
    layout: str
    created: str
    cost: str
    key_id: str
    nonce: str
    tag: str


class Record(msgspec.Struct, frozen=True):
    """A finished block on its way into tiers."""

    ref: BlockRef
    data: memoryview
    """Canonical record bytes; never changed after this object exists."""
    tag: bytes
    cost_s: float
    """Seconds it took to compute this block."""
    created: float
    """Seconds since the epoch."""


@lru_cache(maxsize=256)
def header_bytes(spec: GroupSpec) -> int:
    """Size of the header of a block of ``spec``, a multiple of :data:`ALIGNMENT`; depends on ``spec`` alone.

    Enough for every block of ``spec``: numbers in the metadata are bounded, names and dimensions appear at most
    twice. At most 1 MiB, so that ``MAX_PAYLOAD_BYTES`` leaves room for it in one AES-GCM call.
    """
    tensors = sum(_ENTRY_BYTES + 2 * (len(t.name) + len(_dimensions(t))) for t in spec.tensors)
    return -(-(8 + _METADATA_BYTES + tensors) // ALIGNMENT) * ALIGNMENT


def record_bytes(spec: GroupSpec) -> int:
    """Exact size of a record, and so of a block file, of ``spec``."""
    return header_bytes(spec) + spec.payload_bytes


def begin(ref: BlockRef, buffer: bytearray | None = None) -> tuple[memoryview, memoryview]:
    """A record for ``ref`` and the view of its payload, all of which the engine fills.

    The record is new and zeroed, or lies in ``buffer`` if that has its size: fresh memory costs as much as tagging.
    """
    spec, size = ref.spec, record_bytes(ref.spec)
    data = memoryview(buffer if buffer is not None and len(buffer) == size else bytearray(size))
    return data, data[header_bytes(spec) :]


def finish(
    ref: BlockRef,
    data: memoryview,
    cost_s: float,
    sealer: Sealer,
    *,
    nonce: bytes | None = None,
    created: float | None = None,
) -> Record:
    """Write the header of a record whose payload is filled, tag it and return it. Seals the payload in place.

    ``cost_s`` counts as 0 if it is not a number, and is bounded. ``nonce`` and ``created`` are for test vectors;
    leave them out otherwise.
    """
    nonce = sealer.nonce() if nonce is None else nonce
    cost_s = _bounded(cost_s, _MAX_COST_S)
    created = _bounded(time.time() if created is None else created, _MAX_CREATED_S)
    size = header_bytes(ref.spec)
    header = _header_json(ref, f"{cost_s:.6f}", f"{created:.3f}", nonce.hex(), sealer)
    if len(header) > size - 8:
        raise ValueError(f"header of {len(header)} bytes does not fit its {size - 8}")
    data[:8] = struct.pack("<Q", size - 8)
    data[8:size] = header.ljust(size - 8)
    tag = sealer.protect(data, size, nonce)
    return Record(ref, data.toreadonly(), tag, cost_s, created)


def with_tag(record: Record) -> bytes:
    """The header of ``record`` as stored, with its tag in place."""
    header = bytes(record.data[: header_bytes(record.ref.spec)])
    at = header.index(_TAG_FIELD) + len(_TAG_FIELD)
    return header[:at] + record.tag.hex().encode() + header[at + len(_NO_TAG) :]


def take_tag(data: memoryview) -> bytes:
    """Make stored bytes canonical in place and return their tag. Raises BlockError if there is none."""
    if len(data) < 8:
        raise BlockError(Cause.BAD_SIZE, f"{len(data)} bytes")
    (length,) = struct.unpack_from("<Q", data)
    if not 0 < length <= min(len(data) - 8, MAX_HEADER_BYTES):
        raise BlockError(Cause.BAD_HEADER, f"header length {length}")
    header = bytes(data[: 8 + length])
    found = header.find(_TAG_FIELD, 8)
    at = found + len(_TAG_FIELD)
    digits = header[at : at + len(_NO_TAG)]
    try:
        tag = bytes.fromhex(digits.decode("ascii"))
    except ValueError:
        raise BlockError(Cause.BAD_HEADER, "tag is not hexadecimal") from None
    # bytes.fromhex skips spaces and takes capitals; a tag has one form.
    if found < 0 or len(tag) != TAG_BYTES or digits != tag.hex().encode():
        raise BlockError(Cause.BAD_HEADER, "no tag")
    data[at : at + len(_NO_TAG)] = _NO_TAG
    return tag


def verify(data: memoryview, tag: bytes, ref: BlockRef, sealer: Sealer) -> memoryview:
    """Check a canonical record against what was asked for; return its verified plain payload.

    Checks run cheapest first and each has its own cause: size, header bounds, version, header form, key, namespace,
    identity, generation, tokens, sealing key, layout, tag. Raises BlockError and nothing else, whatever ``data`` is.
    """
    spec = ref.spec
    payload_at = header_bytes(spec)
    if len(data) != payload_at + spec.payload_bytes:
        raise BlockError(Cause.BAD_SIZE, f"{len(data)} bytes, not {payload_at + spec.payload_bytes}")
    if struct.unpack_from("<Q", data)[0] != payload_at - 8:
        raise BlockError(Cause.BAD_HEADER, "header length")
    json = bytes(data[8:payload_at])
    nonce = _nonce_of_expected(json, ref, sealer) or _checked_nonce(json, ref, sealer)
    payload = sealer.open(data, payload_at, nonce, tag)
    if payload is None:
        raise BlockError(Cause.BAD_TAG)
    return payload


def _nonce_of_expected(json: bytes, ref: BlockRef, sealer: Sealer) -> bytes | None:
    """The nonce, if the header is the one that this block has; a third of the time that parsing it takes.

    All but three values of a good header are known beforehand. None if anything else is different.
    """
    own = _OWN_VALUES.search(json)
    if own is None:
        return None
    created, cost, nonce = (value.decode() for value in own.groups())
    if _header_json(ref, cost, created, nonce, sealer).ljust(len(json)) != json:
        return None
    return bytes.fromhex(nonce)


def _checked_nonce(json: bytes, ref: BlockRef, sealer: Sealer) -> bytes:
    """The nonce of a header, checked field by field. Raises BlockError with the cause of the first difference."""
    meta, entries = parse_header(json)
    encoded = _encode(meta, entries)
    if encoded.ljust(len(json)) != json:
        raise BlockError(Cause.BAD_HEADER, "not in canonical form")
    _check_identity(meta, ref)
    if meta.key_id != sealer.key_id:
        raise BlockError(Cause.BAD_SEAL, f"key id {_printable(meta.key_id)}")
    # Compared as encoded: 1, 1.0 and true are equal to Python, but not to other readers.
    expected = _encode(meta, _entries(ref.spec, sealer.seals))
    layout = _layout(ref.spec)
    if encoded != expected or meta.layout != layout or meta.codec != "raw" or meta.codec_params:
        raise BlockError(Cause.BAD_LAYOUT)
    return bytes.fromhex(meta.nonce)


def copy(ref: BlockRef, data: memoryview, tag: bytes) -> Record:
    """A :class:`Record` with its own copy of verified canonical ``data``."""
    meta, _ = parse_header(data[8 : header_bytes(ref.spec)])
    return Record(ref, memoryview(bytes(data)), tag, float(meta.cost), float(meta.created))


def parse_header(json: memoryview | bytes) -> tuple[Metadata, dict[str, Any]]:
    """Metadata and tensor entries of a header. Raises BlockError for anything malformed or a newer format."""
    try:
        header = msgspec.json.decode(json, type=dict[str, Any])
        raw = header.pop("__metadata__")
        version = raw["format"]
        if not isinstance(version, str) or not version.startswith("stemkv-block/"):
            raise BlockError(Cause.BAD_HEADER, "not a stemkv block")
        if version != FORMAT:
            raise BlockError(Cause.BAD_VERSION, _printable(version))
        meta = msgspec.convert(raw, Metadata)
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError, RecursionError) as error:
        raise BlockError(Cause.BAD_HEADER, type(error).__name__) from None
    if not (_COST.fullmatch(meta.cost) and _CREATED.fullmatch(meta.created) and _NONCE.fullmatch(meta.nonce)):
        raise BlockError(Cause.BAD_HEADER, "cost, created or nonce")
    return meta, header


def _check_identity(meta: Metadata, ref: BlockRef) -> None:
    namespace = ref.namespace
    checks = (
        (Cause.BAD_KEY, meta.key, ref.key.hex()),
        (Cause.BAD_KEY, meta.anchor, ref.anchor.hex()),
        (Cause.BAD_KEY, meta.parent, ref.parent.hex()),
        (Cause.BAD_KEY, meta.group, str(ref.group)),
        (Cause.BAD_NAMESPACE, meta.namespace, namespace.id.hex()),
        (Cause.BAD_IDENTITY, meta.identity, namespace.identity.digest.hex()),
        (Cause.BAD_GENERATION, meta.generation, str(namespace.generation)),
        (Cause.BAD_TOKENS, meta.first_token, str(ref.first_token)),
        (Cause.BAD_TOKENS, meta.tokens, str(ref.token_count)),
        (Cause.BAD_TOKENS, meta.tokens_digest, ref.tokens_digest.hex()),
    )
    for cause, found, wanted in checks:
        if found != wanted:
            raise BlockError(cause)


def _header_json(ref: BlockRef, cost: str, created: str, nonce: str, sealer: Sealer) -> bytes:
    namespace = ref.namespace
    meta = Metadata(
        format=FORMAT,
        key=ref.key.hex(),
        parent=ref.parent.hex(),
        anchor=ref.anchor.hex(),
        namespace=namespace.id.hex(),
        identity=namespace.identity.digest.hex(),
        generation=str(namespace.generation),
        first_token=str(ref.first_token),
        tokens=str(ref.token_count),
        tokens_digest=ref.tokens_digest.hex(),
        group=str(ref.group),
        codec="raw",
        codec_params="",
        layout=_layout(ref.spec),
        created=created,
        cost=cost,
        key_id=sealer.key_id,
        nonce=nonce,
        tag=_NO_TAG.decode(),
    )
    return _encode(meta, _entries(ref.spec, sealer.seals))


def _encode(meta: Metadata, entries: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"__metadata__": meta, **entries})


@lru_cache(maxsize=256)
def _entries(spec: GroupSpec, sealed: bool) -> dict[str, Any]:
    """The safetensors entries: the tensors, or one U8 tensor of ciphertext. Shared: do not change the result."""
    if sealed:
        size = spec.payload_bytes
        return {"sealed": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    entries, at = {}, 0
    for t in spec.tensors:
        entries[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]}
        at += t.nbytes
    return entries


@lru_cache(maxsize=256)
def _layout(spec: GroupSpec) -> str:
    """Dtypes and shapes of what is inside, also readable when the payload is sealed."""
    return ";".join(f"{t.name}:{t.dtype}:{_dimensions(t)}" for t in spec.tensors)


def _dimensions(tensor: TensorSpec) -> str:
    return "x".join(map(str, tensor.shape))


def _bounded(value: float, most: float) -> float:
    return min(value, most) if value > 0 else 0.0  # also for NaN and -0.0, which would be written with a sign


def _printable(text: str) -> str:
    """At most 32 characters that any log or header can show."""
    return "".join(c if " " < c <= "~" else "?" for c in text[:32])
