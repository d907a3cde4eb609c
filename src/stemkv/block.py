"""The block record: one safetensors file, self-describing and tagged.

A record is a safetensors header padded to a multiple of 4096 bytes, then the payload. The header's
``__metadata__`` names the block and carries the tag; ``docs/format.md`` has the byte table and vectors.

In memory a record is *canonical*: the 32 hex digits of its tag field are zeros and the tag is kept beside it,
because the tag covers the record in exactly that form. :func:`take_tag` and :func:`with_tag` convert.
"""

from __future__ import annotations

import struct
import time
from functools import lru_cache
from typing import Any

import msgspec

from stemkv.identity import GroupSpec
from stemkv.keys import BlockRef
from stemkv.misses import Cause, Miss
from stemkv.sealing import NONCE_BYTES, TAG_BYTES, Sealer

FORMAT = "stemkv-block/1"
ALIGNMENT = 4096
"""The payload starts on a multiple of this, for direct I/O and mmap."""
_TAG_FIELD = b'"tag":"'
_NO_TAG = b"0" * (2 * TAG_BYTES)
_METADATA_BYTES = 1280
"""Upper bound of the metadata in JSON; two-digit fields and four hex digests of 64 need about 900."""


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
    """Size of the header of a block of ``spec``, a multiple of :data:`ALIGNMENT`; depends on ``spec`` alone."""
    entries = sum(2 * len(_entry_json(spec, i)) for i in range(len(spec.tensors)))
    return -(-(8 + _METADATA_BYTES + entries) // ALIGNMENT) * ALIGNMENT


def record_bytes(spec: GroupSpec) -> int:
    """Exact size of a record, and so of a block file, of ``spec``."""
    return header_bytes(spec) + spec.payload_bytes


def begin(ref: BlockRef) -> tuple[memoryview, memoryview]:
    """A new zeroed record for ``ref`` and the view of its payload, which the engine fills."""
    spec = ref.spec
    data = memoryview(bytearray(record_bytes(spec)))
    return data, data[header_bytes(spec) :]


def finish(ref: BlockRef, data: memoryview, cost_s: float, sealer: Sealer, *, nonce: bytes | None = None,
           created: float | None = None) -> Record:  # fmt: skip
    """Write the header of a record whose payload is filled, tag it and return it.

    ``nonce`` and ``created`` are for test vectors; leave them out otherwise.
    """
    nonce = nonce or sealer.nonce()
    created = time.time() if created is None else created
    size = header_bytes(ref.spec)
    header = _header_json(ref, cost_s, created, nonce, sealer)
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
    (length,) = struct.unpack_from("<Q", data)
    if not 0 < length <= len(data) - 8:
        raise BlockError(Cause.BAD_HEADER, f"header length {length}")
    header = bytes(data[: 8 + length])
    at = header.find(_TAG_FIELD) + len(_TAG_FIELD)
    try:
        tag = bytes.fromhex(header[at : at + len(_NO_TAG)].decode("ascii"))
    except ValueError:
        raise BlockError(Cause.BAD_HEADER, "tag is not hexadecimal") from None
    if len(tag) != TAG_BYTES or header[at : at + len(_NO_TAG)] != tag.hex().encode():
        raise BlockError(Cause.BAD_HEADER, "no tag")
    data[at : at + len(_NO_TAG)] = _NO_TAG
    return tag


def verify(data: memoryview, tag: bytes, ref: BlockRef, sealer: Sealer) -> memoryview:
    """Check a canonical record against what was asked for; return its verified plain payload.

    Checks run cheapest first and each has its own cause: size and header bounds, version, key, namespace,
    identity, generation, token digest, layout, sealing key, tag. Raises BlockError.
    """
    spec = ref.spec
    payload_at = header_bytes(spec)
    if len(data) != payload_at + spec.payload_bytes:
        raise BlockError(Cause.BAD_SIZE, f"{len(data)} bytes, not {payload_at + spec.payload_bytes}")
    if struct.unpack_from("<Q", data)[0] != payload_at - 8:
        raise BlockError(Cause.BAD_HEADER, "header length")
    meta, entries = parse_header(data[8:payload_at])
    _check_identity(meta, ref)
    expected = _entries(spec, sealer.seals)
    if entries != expected or meta.layout != _layout(spec) or meta.codec != "raw" or meta.codec_params:
        raise BlockError(Cause.BAD_LAYOUT)
    if meta.key_id != sealer.key_id:
        raise BlockError(Cause.BAD_SEAL, f"key id {meta.key_id[:16]}")
    nonce = _unhex(meta.nonce, NONCE_BYTES)
    payload = sealer.open(data, payload_at, nonce, tag)
    if payload is None:
        raise BlockError(Cause.BAD_TAG)
    return payload


def copy(ref: BlockRef, data: memoryview, tag: bytes) -> Record:
    """A :class:`Record` with its own copy of verified canonical ``data``."""
    meta, _ = parse_header(data[8 : header_bytes(ref.spec)])
    return Record(ref, memoryview(bytes(data)), tag, float(meta.cost), float(meta.created))


def parse_header(json_bytes: memoryview | bytes) -> tuple[Metadata, dict[str, Any]]:
    """Metadata and tensor entries of a header. Raises BlockError for anything malformed or a newer format."""
    try:
        header = msgspec.json.decode(json_bytes, type=dict[str, Any])
        raw = header.pop("__metadata__")
        if not str(raw["format"]).startswith("stemkv-block/"):
            raise BlockError(Cause.BAD_HEADER, "not a stemkv block")
        if raw["format"] != FORMAT:
            raise BlockError(Cause.BAD_VERSION, str(raw["format"])[:32])
        return msgspec.convert(raw, Metadata), header
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError, RecursionError) as error:
        raise BlockError(Cause.BAD_HEADER, type(error).__name__) from None


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


def _header_json(ref: BlockRef, cost_s: float, created: float, nonce: bytes, sealer: Sealer) -> bytes:
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
        created=f"{created:.3f}",
        cost=f"{cost_s:.6f}",
        key_id=sealer.key_id,
        nonce=nonce.hex(),
        tag=_NO_TAG.decode(),
    )
    return msgspec.json.encode({"__metadata__": meta, **_entries(ref.spec, sealer.seals)})


def _entries(spec: GroupSpec, sealed: bool) -> dict[str, Any]:
    """The safetensors entries: the tensors, or one U8 tensor of ciphertext."""
    if sealed:
        size = spec.payload_bytes
        return {"sealed": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    entries, at = {}, 0
    for t in spec.tensors:
        entries[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]}
        at += t.nbytes
    return entries


def _entry_json(spec: GroupSpec, index: int) -> bytes:
    t = spec.tensors[index]
    return msgspec.json.encode({t.name: [t.dtype, t.shape, spec.payload_bytes, spec.payload_bytes, "data_offsets"]})


@lru_cache(maxsize=256)
def _layout(spec: GroupSpec) -> str:
    """Dtypes and shapes of what is inside, also readable when the payload is sealed."""
    return ";".join(f"{t.name}:{t.dtype}:{'x'.join(map(str, t.shape))}" for t in spec.tensors)


def _unhex(text: str, size: int) -> bytes:
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        raw = b""
    if len(raw) != size:
        raise BlockError(Cause.BAD_HEADER, "nonce")
    return raw
