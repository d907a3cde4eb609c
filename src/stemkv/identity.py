"""What must be equal for KV to be reusable.

Two processes share blocks exactly when their :class:`Identity` records have the same digest. The record
is encoded canonically (fixed field order, type tags, length prefixes) so that no two records share an
encoding; ``docs/format.md`` has the byte table and the tests pin golden vectors.

A *name* is never identity: the same model name with other weights has another digest and misses.
Sampling parameters (temperature, top_p, seed) do not shape KV and are not in here.

Every record checks itself when it is made, so that whatever comes later (encoding, block headers, one AES-GCM
call a block) cannot fail: a model that stemkv cannot describe is refused at start-up, not at its first request.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
from enum import Enum
from functools import cached_property
from typing import Any

import msgspec

DTYPE_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes per element of the safetensors dtypes that a block may hold."""
MAX_PAYLOAD_BYTES = 2**31 - 2**21
"""Most bytes of one block: AES-GCM takes less than 2**31 bytes a call, and the header (below 2**20) is part of it."""
MAX_GROUPS = 2**16
"""A group's number is a u16 in its blocks' keys."""
MAX_TENSORS = 1024
MAX_BLOCK_TOKENS = 2**20
_TENSOR_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_digest(what: str, value: object) -> None:
    if not isinstance(value, bytes) or len(value) != 32:
        raise ValueError(f"{what} is not 32 bytes: it is a SHA-256 digest, used whole")


def _check_text(**values: object) -> None:
    for what, value in values.items():
        if not isinstance(value, str):
            raise TypeError(f"{what} is not text: {value!r}")
        value.encode()  # UnicodeEncodeError, a ValueError, for half a surrogate pair


def _check_int(least: int, most: int, **values: object) -> None:
    for what, value in values.items():
        if not isinstance(value, int) or not _is_int(value) or not least <= value <= most:
            raise ValueError(f"{what} {value!r} is not an integer from {least} to {most}")


def _check_tuple(kind: type, **values: object) -> None:
    # A list would make two records that are equal encode differently, or not at all.
    for what, value in values.items():
        if type(value) is not tuple or not all(isinstance(v, kind) for v in value):
            raise TypeError(f"{what} is not a tuple of {kind.__name__}: {value!r}")


class HitPolicy(str, Enum):
    """Which blocks of a group must be there for a hit that ends after block ``n``."""

    PREFIX = "prefix"
    """Every block from 0 to n (full attention)."""
    TRAILING = "trailing"
    """The last ``ceil((window - 1) / block_tokens)`` blocks up to n (sliding-window attention)."""
    EXACT = "exact"
    """One snapshot taken exactly at the end of block n (recurrent state)."""


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor inside a block: its name, safetensors dtype and shape."""

    name: str
    """1 to 128 of ``A-Z a-z 0-9 _ . -``, so that it needs no escaping wherever it is written."""
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not _TENSOR_NAME.fullmatch(self.name) or self.name == "__metadata__":
            raise ValueError(f"{self.name!r} cannot name a tensor: use 1 to 128 letters, digits, _, . or -")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(
                f"dtype {self.dtype!r} of tensor {self.name!r} is unknown: known are {', '.join(DTYPE_BYTES)}"
            )
        if not all(_is_int(n) and 0 < n < 2**31 for n in self.shape) or len(self.shape) > 16:
            raise ValueError(f"shape {self.shape} of tensor {self.name!r} is not up to 16 positive integers")
        msgspec.structs.force_setattr(self, "shape", tuple(self.shape))  # not torch.Size

    @property
    def nbytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * math.prod(self.shape)


class GroupSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Layers that share a hit policy and tensor shapes, and so live in one block.

    ``tensors`` describe one block; for attention layers ``shape[0]`` is the number of layers. ``window``
    is the attention window in tokens for TRAILING groups, else 0.
    """

    policy: HitPolicy
    layers: tuple[int, ...]
    tensors: tuple[TensorSpec, ...]
    window: int = 0

    def __post_init__(self) -> None:
        _check_tuple(TensorSpec, tensors=self.tensors)
        _check_tuple(int, layers=self.layers)
        _check_int(0, 2**63 - 1, window=self.window)
        names = [t.name for t in self.tensors]
        if not names or len(set(names)) != len(names) or len(names) > MAX_TENSORS:
            raise ValueError(f"a group needs 1 to {MAX_TENSORS} tensors with different names, not {names[:8]}")
        if self.payload_bytes > MAX_PAYLOAD_BYTES:
            raise ValueError(
                f"a block of {self.payload_bytes} bytes is too large: use fewer block_tokens, so that it has at most "
                f"{MAX_PAYLOAD_BYTES}"
            )
        if not all(_is_int(n) and 0 <= n < 2**31 for n in self.layers):
            raise ValueError(f"layers {self.layers} are not layer numbers")
        if not isinstance(self.policy, HitPolicy) or bool(self.window) != (self.policy is HitPolicy.TRAILING):
            raise ValueError(f"window {self.window} does not fit policy {self.policy}: only TRAILING groups have one")

    @property
    def payload_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    def blocks_needed(self, boundary: int, block_tokens: int) -> range:
        """Indexes of the blocks that a hit ending before block ``boundary`` must load."""
        if self.policy is HitPolicy.EXACT:
            return range(boundary - 1, boundary)
        if self.policy is HitPolicy.TRAILING:
            return range(max(0, boundary - -(-(self.window - 1) // block_tokens)), boundary)
        return range(boundary)


class Adapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter (LoRA and the like) by the digest of its content, and its scale."""

    digest: bytes
    scale: float

    def __post_init__(self) -> None:
        _check_digest("adapter digest", self.digest)
        if not math.isfinite(self.scale):
            raise ValueError(f"adapter scale {self.scale} is not a finite number")
        # 1, 1.0 and True are equal and must encode equally; so must 0.0 and -0.0.
        msgspec.structs.force_setattr(self, "scale", float(self.scale) + 0.0)


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the engine arranges KV in memory; ``isa`` matters where pages are packed for a processor."""

    engine: str
    name: str
    version: int
    isa: str = ""

    def __post_init__(self) -> None:
        _check_text(engine=self.engine, name=self.name, isa=self.isa)
        _check_int(-(2**63), 2**63 - 1, version=self.version)


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which slice of the model's KV this process holds (tensor, pipeline and context parallelism)."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1

    def __post_init__(self) -> None:
        _check_int(1, 2**31, tp_size=self.tp_size, pp_size=self.pp_size, cp_size=self.cp_size)
        _check_int(0, self.tp_size - 1, tp_rank=self.tp_rank)
        _check_int(0, self.pp_size - 1, pp_rank=self.pp_rank)
        _check_int(0, self.cp_size - 1, cp_rank=self.cp_rank)


class Identity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Everything that must be equal for KV to be reusable. Digests are 32 bytes. Raises ValueError, TypeError.

    Fields, here and in the records inside, may only be appended, with a default, and are entered in ``_APPENDED``:
    an appended field that has its default is left out of the encoding, so that existing digests stay valid.
    """

    schema: int = 1
    weights_digest: bytes
    weights_source: str
    """How ``weights_digest`` was obtained; digests obtained differently are never comparable."""
    config_digest: bytes
    """Everything in the model's configuration that shapes KV: rope, window, heads, layer types, attention."""
    quantization: str = ""
    adapters: tuple[Adapter, ...] = ()
    """In the order in which they are applied."""
    kv_dtype: str
    kv_scale_digest: bytes = b""
    """Digest of the scales of a quantized KV; empty if it has none."""
    layout: Layout
    shard: Shard = Shard()
    groups: tuple[GroupSpec, ...]
    block_tokens: int = 64

    def __post_init__(self) -> None:
        _check_int(1, 2**63 - 1, schema=self.schema)
        _check_int(1, MAX_BLOCK_TOKENS, block_tokens=self.block_tokens)
        _check_text(weights_source=self.weights_source, quantization=self.quantization, kv_dtype=self.kv_dtype)
        _check_digest("weights_digest", self.weights_digest)
        _check_digest("config_digest", self.config_digest)
        if self.kv_scale_digest:
            _check_digest("kv_scale_digest", self.kv_scale_digest)
        _check_tuple(Adapter, adapters=self.adapters)
        _check_tuple(GroupSpec, groups=self.groups)
        if not 0 < len(self.groups) <= MAX_GROUPS:
            raise ValueError(f"{len(self.groups)} groups: an identity has 1 to {MAX_GROUPS}")
        if not isinstance(self.layout, Layout) or not isinstance(self.shard, Shard):
            raise TypeError("layout and shard are a Layout and a Shard")

    def encode(self) -> bytes:
        """The canonical encoding, the input of :attr:`digest`."""
        fields = _fields(self)
        parts = [b"stemkv-identity-1", struct.pack("<I", len(fields))]
        parts += [encode_value(name) + encode_value(value) for name, value in fields]
        return b"".join(parts)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of :meth:`encode`, 32 bytes."""
        return hashlib.sha256(self.encode()).digest()

    def prefix(self, group: int) -> bool:
        """Whether ``group`` needs every block of a hit."""
        return self.groups[group].policy is HitPolicy.PREFIX

    def differing_fields(self, other: Identity) -> tuple[str, ...]:
        """Names of the fields in which ``other`` differs, in field order; ``layout.isa`` for a field of a record."""
        names: list[str] = []
        for name in self.__struct_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, msgspec.Struct):
                inner = mine.__struct_fields__
                names += [f"{name}.{n}" for n in inner if getattr(mine, n) != getattr(theirs, n)]
            elif mine != theirs:
                names.append(name)
        return tuple(names)


_APPENDED: dict[str, dict[str, Any]] = {}
"""For each record by class name, the fields added after the first release, with their defaults."""


def _fields(record: msgspec.Struct) -> tuple[tuple[str, Any], ...]:
    """The (name, value) pairs of ``record`` that are encoded."""
    appended = _APPENDED.get(type(record).__name__, {})
    pairs = ((name, getattr(record, name)) for name in record.__struct_fields__)
    return tuple((n, v) for n, v in pairs if n not in appended or v != appended[n])


def encode_value(value: Any) -> bytes:  # noqa: PLR0911 - one return a type
    """Encode one value with a type tag and, where its size varies, a length prefix (u32 little-endian)."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, bool):
        return b"o\x01" if value else b"o\x00"
    if isinstance(value, int):
        return b"i" + struct.pack("<q", value)
    if isinstance(value, float):
        return b"f" + struct.pack("<d", value)
    if isinstance(value, str):
        raw = value.encode()
        return b"s" + struct.pack("<I", len(raw)) + raw
    if isinstance(value, bytes):
        return b"b" + struct.pack("<I", len(value)) + value
    if isinstance(value, tuple):
        return b"t" + struct.pack("<I", len(value)) + b"".join(encode_value(v) for v in value)
    if isinstance(value, msgspec.Struct):
        return encode_value(_fields(value))
    raise TypeError(f"cannot encode {type(value).__name__} in an identity")
