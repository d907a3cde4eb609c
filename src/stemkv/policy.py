"""Which block to give up first.

GreedyDual-Size-Frequency (Cherkasova 1998): a block's priority is the clock of its last use plus the seconds
of compute it is expected to save per byte it occupies. The clock rises to the priority of whatever was evicted
last, so blocks that are no longer used age without anyone visiting them. Tiers evict the lowest priority first
among blocks that no other stored block needs (suffix before prefix), and never a leased one.
"""

from __future__ import annotations

from stemkv.identity import HitPolicy
from stemkv.keys import BlockRef

_FLOOR_S = 1e-6
"""Least cost a block is taken to have, so that frequency still counts when the cost is unknown."""


def priority(clock: float, hits: int, cost_s: float, nbytes: int) -> float:
    """Seconds of compute saved per MiB, on top of ``clock``; ``hits`` counts the store as one."""
    return clock + hits * max(cost_s, _FLOOR_S) / (nbytes / 2**20)


def may_evict(ref: BlockRef, *, needed_is_here: bool) -> bool:
    """Whether a new block may push out others. ``needed_is_here``: the tier has the block ``ref.needs``.

    One that follows an absent block can be used only after that one is stored again: it may take free room, but if it
    pushed out others, a chain longer than the tier would eat its own beginning.
    """
    first = ref.index == 0 and ref.group == 0
    return first or needed_is_here or ref.spec.policy is not HitPolicy.PREFIX
