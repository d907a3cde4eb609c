"""Why a block is not in a tier, from what the tier knows about its neighbours. Pure functions, no I/O."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import NamedTuple

from stemkv.identity import Identity
from stemkv.keys import BlockRef
from stemkv.misses import Cause, Miss

GHOSTS = 65536
"""How many evicted keys a tier remembers, to tell "evicted" from "never seen"."""


class KnownNamespace(NamedTuple):
    """A namespace that a tier has heard of; ``identity`` is None if only its digest is known."""

    id: bytes
    tenant_id: bytes
    identity: Identity | None
    generation: int
    blocks: int


class Ghosts:
    """The last :data:`GHOSTS` evicted keys."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def add(self, key: bytes) -> None:
        self._keys[key] = None
        if len(self._keys) > GHOSTS:
            self._keys.popitem(last=False)

    def discard(self, key: bytes) -> None:
        self._keys.pop(key, None)


def explain_absence(
    ref: BlockRef, *, known: Iterable[KnownNamespace], same_text: Collection[bytes], diverged: bool, evicted: bool
) -> Miss | None:
    """The most specific cause, or None if nothing better than "not here" can be said.

    ``same_text``: ids of namespaces that hold a first block with the same tokens. ``diverged``: another block
    follows the same predecessor. Only namespaces of the same tenant are considered, so that a cause never tells
    one tenant about another.
    """
    if evicted:
        return Miss(Cause.EVICTED)
    if ref.index == 0:
        changed = _changed_identity(ref, known, same_text)
        if changed is not None:
            return changed
    # After the chain's root every prompt of the namespace "follows": there, other text is just unseen.
    return Miss(Cause.DIVERGED) if diverged and ref.index else None


def _changed_identity(ref: BlockRef, known: Iterable[KnownNamespace], same_text: Collection[bytes]) -> Miss | None:
    mine = ref.namespace
    others = [k for k in known if k.tenant_id == mine.tenant_id and k.blocks]
    stored_here = any(k.id == mine.id for k in others)
    candidates = [k for k in others if k.id in same_text and k.id != mine.id]
    if not candidates and not stored_here:
        candidates = [k for k in others if k.id != mine.id]
    misses = [_difference(ref, k) for k in candidates if k.identity is not None]
    return min(misses, key=lambda m: (m.detail.count(","), str(m)), default=None)


def _difference(ref: BlockRef, other: KnownNamespace) -> Miss:
    mine = ref.namespace
    fields = mine.identity.differing_fields(other.identity) if other.identity is not None else ()
    if fields:
        return Miss(Cause.IDENTITY, ",".join(fields))
    return Miss(Cause.GENERATION, f"stored under {other.generation}, asked for {mine.generation}")
