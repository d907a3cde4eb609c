"""Counters of one pool, in the process, without any dependency.

``stemkv.server`` exposes them to Prometheus; ``tests/`` checks that they add up:
``prompt_tokens = hit_tokens + sum(miss_tokens)`` and ``lookups = sum of lookup outcomes``.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

COUNTERS: Mapping[str, str] = {
    "lookups": "Lookups of a prompt.",
    "prompt_tokens": "Prompt tokens looked up.",
    "hit_tokens": "Prompt tokens that were loaded instead of computed.",
    "miss_tokens": "Prompt tokens that were computed, by the cause that ended the hit.",
    "loaded_blocks": "Blocks loaded and verified, by tier.",
    "loaded_bytes": "Bytes loaded and verified, by tier.",
    "load_seconds": "Seconds spent loading, by tier.",
    "failed_blocks": "Blocks that a tier could not give, by tier and cause.",
    "stored_blocks": "Blocks stored, by tier.",
    "stored_bytes": "Bytes stored, by tier.",
    "unstored_blocks": "Blocks that were not stored, by tier and cause.",
}
"""Every counter, with its help text. Names are exported as ``stemkv_<name>_total``."""

Labels = tuple[tuple[str, str], ...]


class Metrics:
    """A set of monotonic counters. Thread-safe; adding takes a lock for under a microsecond."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Counter[tuple[str, Labels]] = Counter()

    def add(self, name: str, value: float = 1, **labels: str) -> None:
        """Raise counter ``name`` (one of :data:`COUNTERS`; KeyError otherwise) by ``value``."""
        COUNTERS[name]
        with self._lock:
            self._values[name, tuple(sorted(labels.items()))] += value  # type: ignore[assignment]

    def snapshot(self) -> dict[tuple[str, Labels], float]:
        """All values now."""
        with self._lock:
            return dict(self._values)

    def total(self, name: str, **labels: str) -> float:
        """Sum of ``name`` over all label sets that contain ``labels``."""
        wanted = set(labels.items())
        return sum(v for (n, have), v in self.snapshot().items() if n == name and wanted <= set(have))
