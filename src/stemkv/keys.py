"""Namespace and block keys.

A key is 32 bytes that depend on everything that shaped a block's KV: the namespace (identity, tenant,
generation) and every token up to the block's end. Keys are computed here, from content, and are never
taken from a request. ``docs/format.md`` has the derivation and pinned vectors.

Different uses of one HMAC key never share a message: "id" and "root" have 2 and 4 bytes, "foreign" 7, a group key 39,
and a chain key 36 or 40 and more.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from hmac import digest as _hmac

import msgspec

from stemkv.identity import GroupSpec, Identity

PUBLIC_ROOT = b"stemkv public root, no secret".ljust(32, b"\0")
"""The root used when the operator configured no secret: keys are then unguessable only by content."""

TokenIds = Sequence[int]


def framed(*parts: bytes | str | int) -> bytes:
    """Join parts so that no other split of the same bytes encodes equally.

    Each part is preceded by its length as u32 little-endian; strings are UTF-8, integers u64 little-endian. Which
    part has which type is fixed by the label that comes first.
    """
    raw = [_part(p) for p in parts]
    return b"".join(struct.pack("<I", len(part)) + part for part in raw)


def _part(part: bytes | str | int) -> bytes:
    if isinstance(part, int):
        return struct.pack("<Q", part)
    # A tenant may be any text, even half a surrogate pair: it must neither fail nor meet another tenant.
    return part.encode(errors="surrogatepass") if isinstance(part, str) else part


def token_bytes(tokens: Iterable[int]) -> bytes:
    """Token ids as u32 little-endian. Raises OverflowError for an id outside 0..2**32-1, TypeError for no integers."""
    if isinstance(tokens, (bytes, bytearray, str)):
        raise TypeError(f"token ids are integers, not {type(tokens).__name__}")  # array would take bytes as packed ids
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


class Namespace:
    """Identity, tenant and generation: the root of a chain of keys. Immutable, safe to share.

    ``tenant`` is any text, ``generation`` 0 to 2**63-1 (ValueError otherwise), ``root`` the operator's secret.
    Its text form shows neither key nor tenant.
    """

    __slots__ = ("generation", "id", "identity", "key", "tenant_id", "tenant_key")

    def __init__(self, identity: Identity, *, tenant: str = "", generation: int = 0, root: bytes = PUBLIC_ROOT) -> None:
        if not 0 <= generation < 2**63:
            raise ValueError(f"generation {generation} is not in 0 to 2**63-1")
        self.identity = identity
        self.generation = generation
        self.key = _hmac(root, framed("stemkv-ns-1", identity.digest, tenant, generation), "sha256")
        self.id = _hmac(self.key, b"id", "sha256")
        """32 bytes that name the namespace in headers and manifests without revealing its key."""
        self.tenant_key = _hmac(root, framed("stemkv-tenant-1", tenant), "sha256")
        """Keys the digests of tokens: equal text of one tenant is recognized across identities, others' never is."""
        self.tenant_id = _hmac(self.tenant_key, b"id", "sha256")

    def __repr__(self) -> str:
        return f"Namespace({self.id.hex()[:16]}, generation={self.generation})"


class BlockRef(msgspec.Struct, frozen=True):
    """A request for one block: its key and everything a stored block is checked against."""

    namespace: Namespace
    key: bytes
    parent: bytes
    """k_{i-1} of the chain: the key of group 0's block before this one (or the chain's root)."""
    anchor: bytes
    """k_i of the chain, shared by all groups of this block."""
    group: int
    index: int
    """Position in the chain, in blocks."""
    tokens_digest: bytes
    """HMAC of the block's position and own tokens under the tenant's key."""

    @property
    def needs(self) -> bytes:
        """Key of the block without which this one is of no use: its predecessor, or group 0's block beside it."""
        return self.anchor if self.group else self.parent

    @property
    def spec(self) -> GroupSpec:
        return self.namespace.identity.groups[self.group]

    @property
    def first_token(self) -> int:
        return self.index * self.namespace.identity.block_tokens

    @property
    def token_count(self) -> int:
        return self.namespace.identity.block_tokens


class Chain:
    """The keys of a token sequence's full blocks. Immutable, safe to share between threads.

    ``extras`` maps a block index to byte strings mixed into that block's key and so into all later ones:
    media digests at the block where the media starts, a caller-chosen scope at block 0. An index at or behind the
    end is allowed (that block is not full yet); a negative one is a ValueError. Raises OverflowError and TypeError
    for token ids that are none (see :func:`token_bytes`).
    """

    __slots__ = ("_packed", "keys", "namespace", "root", "token_count")

    def __init__(
        self, namespace: Namespace, tokens: TokenIds, extras: Mapping[int, Sequence[bytes]] | None = None
    ) -> None:
        self.namespace = namespace
        self.token_count = len(tokens)
        self._packed = token_bytes(tokens)
        self.root = _hmac(namespace.key, b"root", "sha256")
        if extras and min(extras) < 0:
            raise ValueError(f"extras at block {min(extras)}: would be ignored")
        self.keys: list[bytes] = self._derive(extras or {})
        """k_1 .. k_n, one for each full block, in order."""

    def _derive(self, extras: Mapping[int, Sequence[bytes]]) -> list[bytes]:
        key, packed, previous = self.namespace.key, self._packed, self.root
        step = 4 * self.namespace.identity.block_tokens
        keys = []
        for i, at in enumerate(range(0, len(packed) - step + 1, step)):
            message = previous + packed[at : at + step]
            if i in extras:
                message += framed(*extras[i])
            previous = _hmac(key, message, "sha256")
            keys.append(previous)
        return keys

    def __len__(self) -> int:
        return len(self.keys)

    def group_keys(self, group: int, indexes: range) -> list[bytes]:
        """Names of the blocks of ``group`` at ``indexes``."""
        if group == 0:
            return self.keys[indexes.start : indexes.stop]
        suffix = b"group" + struct.pack("<H", group)
        return [_hmac(self.namespace.key, self.keys[i] + suffix, "sha256") for i in indexes]

    def ref(self, group: int, index: int) -> BlockRef:
        """The request for block ``index`` of ``group``. Raises IndexError if there is no such full block or group."""
        if not (0 <= index < len(self.keys) and 0 <= group < len(self.namespace.identity.groups)):
            raise IndexError(f"no block {index} of group {group}")
        step = 4 * self.namespace.identity.block_tokens
        own = self._packed[index * step : (index + 1) * step]
        return BlockRef(
            namespace=self.namespace,
            key=self.group_keys(group, range(index, index + 1))[0],
            parent=self.keys[index - 1] if index else self.root,
            anchor=self.keys[index],
            group=group,
            index=index,
            tokens_digest=_hmac(self.namespace.tenant_key, struct.pack("<Q", index * step // 4) + own, "sha256"),
        )


def foreign_ref(namespace: Namespace, scheme: str, digest: bytes) -> BlockRef:
    """The request for a block that an engine names by its own hash of all tokens up to the block's end.

    For engines that tell a hash but not the tokens behind it. ``scheme`` says how the hash was made (engine, algorithm,
    seed), ``digest`` is the hash: 32 bytes of a collision-resistant function (ValueError otherwise). The result depends
    on nothing else. Such a block has no position and no predecessor: it is block 0 of group 0 in a chain of its own
    kind, whose keys no chain of tokens can have.
    """
    if len(digest) != 32:
        raise ValueError(f"a hash of {len(digest)} bytes cannot name a block: it takes 32 of a function like SHA-256")
    name = framed(scheme, digest)
    # Both under keys of their own, so that no name is a message of another use.
    own = _hmac(namespace.key, b"foreign", "sha256")
    key = _hmac(own, name, "sha256")
    return BlockRef(
        namespace=namespace,
        key=key,
        parent=_hmac(own, b"root", "sha256"),
        anchor=key,
        group=0,
        index=0,
        tokens_digest=_hmac(_hmac(namespace.tenant_key, b"foreign", "sha256"), name, "sha256"),
    )
