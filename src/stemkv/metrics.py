"""Counters of one pool, in the process, without any dependency.

``stemkv.server`` exposes them to Prometheus; ``tests/core`` checks that they add up, once the queue is empty:

    prompt_tokens  = hit_tokens + miss_tokens
    wanted_blocks  = loaded_blocks + lost_blocks
    offered_blocks = for each tier: stored_blocks{by="store"} + known_blocks
                     + unstored_blocks{by="store"} of the tier and of the queue
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

COUNTERS: Mapping[str, str] = {
    "lookups": "Lookups of a prompt.",
    "prompt_tokens": "Prompt tokens looked up.",
    "hit_tokens": "Prompt tokens that were loaded instead of computed.",
    "miss_tokens": "Prompt tokens that were computed, by the cause that ended the hit.",
    "wanted_blocks": "Blocks that loads asked for.",
    "loaded_blocks": "Blocks loaded and verified, by tier.",
    "loaded_bytes": "Bytes loaded and verified, by tier.",
    "load_seconds": "Seconds spent loading, by tier.",
    "failed_blocks": "Blocks that a tier could not give, by tier and cause; another tier may still have given them.",
    "lost_blocks": "Blocks that no tier could give, by the cause of the nearest.",
    "offered_blocks": "Blocks given to the pool to be stored.",
    "known_blocks": "Blocks given to be stored that the tier had already, by tier.",
    "stored_blocks": "Blocks stored, by tier, and whether by a store or a promotion from a farther tier.",
    "stored_bytes": "Bytes stored, by tier, and whether by a store or a promotion from a farther tier.",
    "unstored_blocks": "Blocks not stored, by tier (or queue), cause, and whether for a store or a promotion.",
    "tier_faults": "Calls in which a tier broke its contract, by tier and call; the blocks were misses.",
}
"""Every counter, with its help text. Names are exported as ``stemkv_<name>_total``."""

Labels = tuple[tuple[str, str], ...]


class Metrics:
    """A set of monotonic counters. Thread-safe; adding takes a lock for under a microsecond."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[tuple[str, Labels], float] = {}

    def add(self, name: str, value: float = 1, **labels: str) -> None:
        """Raise counter ``name`` (one of :data:`COUNTERS`; KeyError otherwise) by ``value``."""
        if name not in COUNTERS:
            raise KeyError(name)
        key = (name, tuple(sorted(labels.items())))
        with self._lock:
            self._values[key] = self._values.get(key, 0) + value

    def snapshot(self) -> dict[tuple[str, Labels], float]:
        """All values now."""
        with self._lock:
            return dict(self._values)

    def total(self, name: str, **labels: str) -> float:
        """Sum of ``name`` over all label sets that contain ``labels``."""
        wanted = set(labels.items())
        return sum(v for (n, have), v in self.snapshot().items() if n == name and wanted <= set(have))
