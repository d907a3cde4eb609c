"""From vLLM's keys (a block hash and a group) to blocks of a pool. Imports neither vLLM nor torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from stemkv.identity import Identity
from stemkv.keys import BlockRef, Namespace, foreign_ref

_GROUP_BYTES = 4


class _FollowingRef(BlockRef, frozen=True):
    """A block whose predecessor is known, so that a full tier gives up ends of texts before their beginnings.

    The predecessor is not part of what is verified: another request may not know it.
    """

    after: bytes = b""

    @property
    def needs(self) -> bytes:
        """Key of the block before this one."""
        return self.after


class Positions:
    """Where in one request's text the keys that vLLM has told so far end."""

    def __init__(self) -> None:
        self._at: dict[tuple[bytes, int], bytes] = {}
        self._seen = 0

    def before(self, key: bytes, ends: Mapping[bytes, int], chunk_tokens: int) -> bytes | None:
        """The key of the chunk before ``key`` in the same group; ``ends`` only grows from call to call."""
        if len(ends) > self._seen:
            for other, end in islice(ends.items(), self._seen, None):
                self._at[other[-_GROUP_BYTES:], end] = other
            self._seen = len(ends)
        end = ends.get(key, 0)
        return self._at.get((key[-_GROUP_BYTES:], (end - 1) // chunk_tokens * chunk_tokens)) if end else None


class Names:
    """The namespaces of an engine's groups and how its hashes were made. Thread-safe."""

    def __init__(
        self, identities: Mapping[int, Identity], scheme: str, *, tenant: str, generation: int, root: bytes
    ) -> None:
        self._identities, self._scheme = identities, scheme
        self._tenant, self._generation, self._root = tenant, generation, root
        self._namespaces = {group: self._namespace(identity) for group, identity in identities.items()}

    def _namespace(self, identity: Identity) -> Namespace:
        return Namespace(identity, tenant=self._tenant, generation=self._generation, root=self._root)

    def set_apart(self, mark: bytes) -> None:
        """From now on, name blocks of weights that the files no longer describe; ``mark`` is unlike any before."""
        self._namespaces = {
            group: self._namespace(
                msgspec.structs.replace(
                    identity,
                    weights_digest=hashlib.sha256(identity.weights_digest + mark).digest(),
                    weights_source=f"{identity.weights_source}+memory",
                )
            )
            for group, identity in self._identities.items()
        }

    def ref(self, key: bytes) -> BlockRef:
        """The block for one of vLLM's keys. Raises ValueError or KeyError if it names none. Takes 10 microseconds."""
        group = int.from_bytes(key[-_GROUP_BYTES:], "big")
        return foreign_ref(self._namespaces[group], self._scheme, bytes(key[:-_GROUP_BYTES]))

    def before(self, keys: Sequence[bytes], context: Any) -> list[bytes | None]:
        """For each key the one before it in the text of a request (vLLM's ``ReqContext``), where vLLM has told it."""
        positions = context.get_state(Positions)
        if positions is None:
            positions = Positions()
            context.set_state(positions)
        ends = getattr(context, "_offload_key_positions", {})
        return [positions.before(key, ends, self._chunk_tokens(key)) for key in keys]

    def _chunk_tokens(self, key: bytes) -> int:
        identity = self._identities.get(int.from_bytes(key[-_GROUP_BYTES:], "big"))
        return identity.block_tokens if identity is not None else 1

    def chained(self, keys: Sequence[bytes], before: Sequence[bytes | None]) -> list[BlockRef]:
        """Blocks for keys, with what comes before them. Raises like :meth:`ref`."""
        refs = {key: self.ref(key) for key in keys}
        chained = []
        for key, other in zip(keys, before, strict=True):
            if other is not None and other not in refs:
                refs[other] = self.ref(other)
            chained.append(refs[key] if other is None else _following(refs[key], refs[other]))
        return chained


def _following(ref: BlockRef, other: BlockRef) -> BlockRef:
    return _FollowingRef(**{name: getattr(ref, name) for name in ref.__struct_fields__}, after=other.key)
