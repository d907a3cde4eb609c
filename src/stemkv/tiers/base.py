"""The contract of a tier: one place that holds blocks.

All methods may be called from any thread. None raises for a fault of its storage: faults come back as a
:class:`~stemkv.misses.Miss` in the position of the block that was asked for. A tier may forget any block at
any time; it must never return bytes that did not verify.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence

import msgspec

from stemkv.block import Record
from stemkv.keys import BlockRef
from stemkv.misses import Miss
from stemkv.sealing import Sealer


class TierStats(msgspec.Struct, frozen=True):
    """What a tier holds now and what it did since it was opened."""

    blocks: int
    bytes: int
    max_bytes: int
    evicted: int = 0
    quarantined: int = 0
    read_only: bool = False


class Sink(ABC):
    """Where loaded blocks go. Called from several threads at once, for different indexes."""

    def buffer(self, index: int, nbytes: int) -> memoryview | None:
        """A writable buffer of ``nbytes`` (header included) to read record ``index`` into, or None for a scratch buffer.

        What is in it counts only after :meth:`accept` was called for the same index.
        """
        return None

    @abstractmethod
    def accept(self, index: int, payload: memoryview) -> None:
        """Take the verified payload of block ``index``. The view is valid only during the call; do not write to it."""


class Tier(ABC):
    """One place that holds blocks; see the module docstring for what holds for every method."""

    name: str
    """Short name for metrics and headers, for example ``memory`` or ``file``."""

    def __init__(self) -> None:
        self._leases: Counter[bytes] = Counter()
        self._lease_lock = threading.Lock()

    @abstractmethod
    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each key is (very likely) here. Does not touch, does not read payloads. All False on a fault."""

    @abstractmethod
    def get(
        self, refs: Sequence[BlockRef], sink: Sink, *, sealer: Sealer, deadline: float | None = None
    ) -> list[Miss | None]:
        """Read, verify and hand over blocks; one result per ref, None for a hit, positions as in ``refs``.

        Blocks until done or until ``deadline`` (``time.monotonic`` seconds) has passed; what was not read by then
        is ``Cause.DEADLINE``. A block that fails verification is quarantined and is a miss with its own cause.
        """

    @abstractmethod
    def put(self, records: Sequence[Record]) -> list[Miss | None]:
        """Store records; None where the block is now here (also if it already was). Blocks; may evict others."""

    @abstractmethod
    def delete(self, keys: Sequence[bytes]) -> int:
        """Remove blocks; returns how many were here. Leases do not protect against it."""

    @abstractmethod
    def stats(self) -> TierStats:
        """Counts and bytes now."""

    @abstractmethod
    def close(self) -> None:
        """Finish and release everything. Further calls are misses. May be called twice."""

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that blocks were used, for eviction order. May be applied later; never fails."""

    def explain(self, ref: BlockRef) -> Miss | None:
        """Why ``ref`` is not here, as far as this tier knows; None if it knows nothing better than "not here"."""
        return None

    def lease(self, keys: Sequence[bytes]) -> None:
        """Keep this process from evicting ``keys`` until :meth:`release`. Counts; does not need them to be here."""
        with self._lease_lock:
            self._leases.update(keys)

    def release(self, keys: Sequence[bytes]) -> None:
        """Undo one :meth:`lease` of the same keys."""
        with self._lease_lock:
            for key in keys:
                self._leases[key] -= 1
                if self._leases[key] <= 0:
                    del self._leases[key]

    def leased(self, key: bytes) -> bool:
        """Whether ``key`` is under lease in this process."""
        return key in self._leases
