"""Small identities, chains, blocks and tiers for the tests of the core."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from stemkv import block
from stemkv.block import Record
from stemkv.identity import GroupSpec, HitPolicy, Identity, Layout, TensorSpec
from stemkv.keys import PUBLIC_ROOT, BlockRef, Chain, Namespace
from stemkv.misses import Miss
from stemkv.pool import Pool
from stemkv.sealing import Sealer
from stemkv.tiers.base import Sink
from stemkv.tiers.memory import MemoryTier

BLOCK_TOKENS = 4
PREFIX = GroupSpec(HitPolicy.PREFIX, (0, 1), (TensorSpec("k", "BF16", (2, 4)), TensorSpec("v", "BF16", (2, 4))))
TRAILING = GroupSpec(HitPolicy.TRAILING, (2,), (TensorSpec("k", "U8", (1, 8)),), window=8)
EXACT = GroupSpec(HitPolicy.EXACT, (3,), (TensorSpec("state0", "F32", (1, 2)),))
SECRET = bytes(range(32))


def identity(*groups: GroupSpec, **changes: Any) -> Identity:
    fields: dict[str, Any] = {
        "weights_digest": hashlib.sha256(b"weights").digest(),
        "weights_source": "files",
        "config_digest": hashlib.sha256(b"config").digest(),
        "kv_dtype": "BF16",
        "layout": Layout("test", "LHTD", 1),
        "groups": groups or (PREFIX,),
        "block_tokens": BLOCK_TOKENS,
    }
    return Identity(**{**fields, **changes})


def namespace(
    *groups: GroupSpec, tenant: str = "", generation: int = 0, root: bytes = PUBLIC_ROOT, **changes: Any
) -> Namespace:
    return Namespace(identity(*groups, **changes), tenant=tenant, generation=generation, root=root)


def chain(
    blocks: int, *, first: int = 0, ns: Namespace | None = None, extras: Mapping[int, Sequence[bytes]] | None = None
) -> Chain:
    """A prompt of ``blocks`` full blocks and one more token; other ``first``, other prompt."""
    ns = ns or namespace()
    return Chain(ns, range(first, first + blocks * ns.identity.block_tokens + 1), extras)


def content(ref: BlockRef) -> bytes:
    """What the payload of ``ref`` is in all tests: bytes that no other block has."""
    return hashlib.shake_128(b"payload" + ref.key).digest(ref.spec.payload_bytes)


def record(ref: BlockRef, sealer: Sealer | None = None, **fixed: Any) -> Record:
    data, payload = block.begin(ref)
    payload[:] = content(ref)
    return block.finish(ref, data, fixed.pop("cost_s", 0.125), sealer or Sealer(), **fixed)


def stored(rec: Record) -> bytearray:
    """The bytes of a record as they are in a file."""
    header = block.with_tag(rec)
    return bytearray(header + bytes(rec.data[len(header) :]))


def reopen(raw: bytes | bytearray, ref: BlockRef, sealer: Sealer | None = None) -> bytes:
    """Read stored bytes as a tier does. Raises BlockError."""
    data = memoryview(bytearray(raw))
    tag = block.take_tag(data)
    return bytes(block.verify(data, tag, ref, sealer or Sealer()))


class Source:
    """A block source that writes :func:`content`."""

    def __init__(self) -> None:
        self.filled: list[BlockRef] = []

    def fill(self, ref: BlockRef, payload: memoryview) -> None:
        payload[:] = content(ref)
        self.filled.append(ref)


class Collected(Sink):
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.payloads: dict[int, bytes] = {}

    def accept(self, index: int, payload: memoryview) -> None:
        assert index not in self.payloads, "handed over twice"
        self.payloads[index] = bytes(payload)


def all_blocks(of: Chain) -> list[tuple[int, int]]:
    return [(g, i) for i in range(len(of)) for g in range(len(of.namespace.identity.groups))]


def store(pool: Pool, of: Chain, blocks: Sequence[tuple[int, int]] | None = None) -> None:
    """Store and wait for it."""
    pool.store(of, all_blocks(of) if blocks is None else blocks, Source(), cost_s=0.1)
    assert pool.flush(30)


def fetched(pool: Pool, of: Chain) -> tuple[int, Miss | None]:
    """Match and load; (blocks, cause of the end) after checking every byte."""
    match = pool.match(of)
    sink = Collected()
    failed = pool.load(match, sink)
    pool.release(match)
    assert not failed
    assert sink.payloads == {i: content(ref) for i, ref in enumerate(match.refs)}
    return match.blocks, match.miss


class Named(MemoryTier):
    """A memory tier with a name of its own."""

    def __init__(self, name: str, blocks: int = 1000) -> None:
        super().__init__(blocks * block.record_bytes(PREFIX))
        self.name = name


def two(near: int = 1000, far: int = 1000, **options: float) -> tuple[Pool, Named, Named]:
    tiers = Named("near", near), Named("far", far)
    return Pool(tiers, **options), *tiers  # type: ignore[arg-type]


class Slow(Source):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def fill(self, ref: BlockRef, payload: memoryview) -> None:
        time.sleep(self._seconds)
        super().fill(ref, payload)


class Gated(Source):
    def __init__(self) -> None:
        super().__init__()
        self.entered, self.opened = threading.Event(), threading.Event()

    def fill(self, ref: BlockRef, payload: memoryview) -> None:
        self.entered.set()
        assert self.opened.wait(10)
        super().fill(ref, payload)
