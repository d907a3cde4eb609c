"""What must be equal for KV to be reusable.

Two processes share blocks exactly when their :class:`Identity` records have the same digest. The record
is encoded canonically (fixed field order, type tags, length prefixes) so that no two records share an
encoding; ``docs/format.md`` has the byte table and the tests pin golden vectors.

A *name* is never identity: the same model name with other weights has another digest and misses.
Sampling parameters (temperature, top_p, seed) do not shape KV and are not in here.
"""

from __future__ import annotations

import hashlib
import math
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
    dtype: str
    shape: tuple[int, ...]

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


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the engine arranges KV in memory; ``isa`` matters where pages are packed for a processor."""

    engine: str
    name: str
    version: int
    isa: str = ""


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which slice of the model's KV this process holds (tensor, pipeline and context parallelism)."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1


class Identity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Everything that must be equal for KV to be reusable; see DESIGN notes in ``docs/format.md``.

    Fields may only be appended, with a default; an appended field that has its default is left out of the
    encoding, so that existing digests stay valid (add its name to ``_APPENDED``).
    """

    schema: int = 1
    weights_digest: bytes
    weights_source: str
    config_digest: bytes
    quantization: str = ""
    adapters: tuple[Adapter, ...] = ()
    kv_dtype: str
    kv_scale_digest: bytes = b""
    layout: Layout
    shard: Shard = Shard()
    groups: tuple[GroupSpec, ...]
    block_tokens: int = 64

    def encode(self) -> bytes:
        """The canonical encoding, the input of :attr:`digest`."""
        fields = [
            (name, getattr(self, name))
            for name in self.__struct_fields__
            if name not in _APPENDED or getattr(self, name) != _APPENDED[name]
        ]
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
        """Names of the fields in which ``other`` differs, in field order."""
        return tuple(n for n in self.__struct_fields__ if getattr(self, n) != getattr(other, n))


_APPENDED: dict[str, Any] = {}
"""Fields added after the first release, with their defaults."""


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
        return encode_value(tuple((name, getattr(value, name)) for name in value.__struct_fields__))
    raise TypeError(f"cannot encode {type(value).__name__} in an identity")
