"""How far a prompt's blocks reach: from presence per group to the boundary of a hit."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from stemkv.identity import GroupSpec, HitPolicy
from stemkv.keys import BlockRef, Chain
from stemkv.misses import Miss

ABSENT = -1
Presence = tuple[Sequence[int], ...]
"""For each group, for each block, the index of the first tier that has it, or :data:`ABSENT`."""


class Match(msgspec.Struct, frozen=True):
    """The longest usable run of blocks of a prompt, and why it ends there.

    While it is held, its blocks are leased: this process does not evict them. Give it to ``Pool.release``
    when loading is over.
    """

    chain: Chain
    blocks: int
    """Blocks of the chain that need not be computed."""
    refs: tuple[BlockRef, ...]
    """What must be loaded for that, group by group."""
    where: tuple[int, ...]
    """For each ref, the index of the tier to read it from."""
    miss: Miss | None
    """Why the hit is not longer; None exactly when it covers every block it may."""
    limit: int
    """Blocks that could have been used: at least one token is always left to compute."""

    @property
    def tokens(self) -> int:
        """Tokens that need not be computed."""
        return self.blocks * self.chain.namespace.identity.block_tokens


def usable_blocks(groups: Sequence[GroupSpec], presence: Presence, run: int, block_tokens: int) -> int:
    """The last boundary within ``run`` at which every group has what it needs.

    ``run`` is how far keys and values reach in every PREFIX group. A result below it means that they are there but
    a window or a recurrent state is not.
    """
    usable = [True] * (run + 1)
    for spec, where in zip(groups, presence, strict=True):
        if spec.policy is HitPolicy.PREFIX:
            continue
        streak = 0  # present blocks without a gap up to the boundary; makes this linear in ``run``
        for boundary in range(1, run + 1):
            streak = streak + 1 if where[boundary - 1] != ABSENT else 0
            if streak < len(spec.blocks_needed(boundary, block_tokens)):
                usable[boundary] = False
    return next((boundary for boundary in range(run, 0, -1) if usable[boundary]), 0)


def refs_to_load(chain: Chain, presence: Presence, blocks: int) -> tuple[tuple[BlockRef, ...], tuple[int, ...]]:
    """The refs a hit of ``blocks`` must load, with the tier of each."""
    identity = chain.namespace.identity
    refs, where = [], []
    for group, spec in enumerate(identity.groups):
        for index in spec.blocks_needed(blocks, identity.block_tokens) if blocks else ():
            refs.append(chain.ref(group, index))
            where.append(presence[group][index])
    return tuple(refs), tuple(where)
