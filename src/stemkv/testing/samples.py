"""Small namespaces, chains and records whose content is known from their key."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

import msgspec

from stemkv import block
from stemkv.block import Record
from stemkv.identity import GroupSpec, HitPolicy, Identity, Layout, TensorSpec
from stemkv.keys import BlockRef, Chain, Namespace
from stemkv.sealing import Sealer
from stemkv.tiers.base import Sink

SECRET = b"a secret for tests, of 32 bytes."
PLAIN = Sealer()
SEALED = Sealer(SECRET, seal=True)


def identity(
    name: str = "model",
    *,
    block_tokens: int = 4,
    payload_bytes: int = 960,
    groups: int = 1,
    policy: HitPolicy | None = None,
) -> Identity:
    """An identity of a model called ``name``; two names are two models. ``payload_bytes`` is a multiple of 4.

    ``policy`` is that of the groups after the first.
    """
    half = (payload_bytes // 4,)
    tensors = (TensorSpec("k", "BF16", half), TensorSpec("v", "BF16", half))
    policies = [HitPolicy.PREFIX] + [policy or HitPolicy.PREFIX] * (groups - 1)
    return Identity(
        weights_digest=hashlib.sha256(name.encode()).digest(),
        weights_source="samples",
        config_digest=hashlib.sha256(b"config").digest(),
        kv_dtype="bfloat16",
        layout=Layout(engine="samples", name="flat", version=1),
        groups=tuple(
            GroupSpec(policy=p, layers=(i,), tensors=tensors, window=2 * block_tokens if p == "trailing" else 0)
            for i, p in enumerate(policies)
        ),
        block_tokens=block_tokens,
    )


def namespace(name: str = "model", *, tenant: str = "", generation: int = 0) -> Namespace:
    """The namespace of ``identity(name)``."""
    return Namespace(identity(name), tenant=tenant, generation=generation)


def chain(blocks: int, *, seed: int = 0, of: Namespace | None = None, shared: int = 0) -> Chain:
    """A chain of ``blocks`` full blocks; chains of one namespace have the first ``shared`` in common."""
    of = of or namespace()
    size = of.identity.block_tokens
    common, own = random.Random("common"), random.Random(seed)  # noqa: S311 - token ids, not secrets
    tokens = [(common if i < shared * size else own).randrange(2**32) for i in range(blocks * size)]
    return Chain(of, tokens)


def refs(of: Chain, group: int = 0) -> list[BlockRef]:
    """The requests for all blocks of a chain."""
    return [of.ref(group, index) for index in range(len(of))]


def payload(ref: BlockRef) -> bytes:
    """What the sample record of ``ref`` holds; different for every key."""
    return hashlib.shake_128(ref.key).digest(ref.spec.payload_bytes)


def record(ref: BlockRef, *, sealer: Sealer = PLAIN, cost_s: float = 0.01) -> Record:
    """The sample record of ``ref``."""
    data, view = block.begin(ref)
    view[:] = payload(ref)
    return block.finish(ref, data, cost_s, sealer)


def records(of: Sequence[BlockRef], *, sealer: Sealer = PLAIN, cost_s: float = 0.01) -> list[Record]:
    return [record(ref, sealer=sealer, cost_s=cost_s) for ref in of]


def stored_form(of: Record) -> bytes:
    """The bytes of a record as a block file has them."""
    header = block.with_tag(of)
    return header + bytes(of.data[len(header) :])


def forged(
    ref: BlockRef,
    *,
    sealer: Sealer = PLAIN,
    key: bytes | None = None,
    namespace_id: bytes | None = None,
    other_identity: Identity | None = None,
    generation: int | None = None,
    tokens_digest: bytes | None = None,
) -> bytes:
    """A whole, rightly tagged block file for ``ref`` in which one claim of the header is another."""
    space = Namespace.__new__(Namespace)
    for slot in Namespace.__slots__:
        setattr(space, slot, getattr(ref.namespace, slot))
    space.id = namespace_id or space.id
    space.identity = other_identity or space.identity
    space.generation = space.generation if generation is None else generation
    false = msgspec.structs.replace(
        ref, namespace=space, key=key or ref.key, tokens_digest=tokens_digest or ref.tokens_digest
    )
    return stored_form(record(false, sealer=sealer))


class Collector(Sink):
    """Keeps the payloads it is given; ``buffered`` offers a buffer for each, as an engine would."""

    def __init__(self, *, buffered: bool = False) -> None:
        self.payloads: dict[int, bytes] = {}
        self.buffers: dict[int, memoryview] = {}
        self._buffered = buffered

    def buffer(self, index: int, nbytes: int) -> memoryview | None:
        if not self._buffered:
            return None
        return self.buffers.setdefault(index, memoryview(bytearray(nbytes)))

    def accept(self, index: int, payload: memoryview) -> None:
        self.payloads[index] = bytes(payload)
