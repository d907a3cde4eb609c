"""The contract of a tier: one place that holds blocks.

All methods may be called from any thread. None raises for a fault of its storage: faults come back as a
:class:`~stemkv.misses.Miss` in the position of the block that was asked for. A tier may forget any block at
any time; it must never return bytes that did not verify.
"""

from __future__ import annotations

import errno
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from stemkv import block
from stemkv.block import BlockError, Record
from stemkv.keys import BlockRef
from stemkv.misses import CORRUPT, Cause, Miss
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
        """A writable buffer of ``nbytes`` (header included) to read record ``index`` into; None for a scratch one.

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

    keeps_records: bool = True
    """Whether :meth:`put` may hold on to a record's memory; if no tier does, the pool uses that memory again."""

    def __init__(self) -> None:
        self._leases: Counter[bytes] = Counter()
        self._lease_lock = threading.Lock()

    @abstractmethod
    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each key is (very likely) here. Does not touch, does not read payloads. All False on a fault."""

    @abstractmethod
    def fetch(self, ref: BlockRef, buffer: memoryview | None) -> tuple[memoryview, bytes]:
        """The stored record of ``ref`` in canonical form, and its tag; nothing is verified yet.

        The record is ``buffer`` if the tier could use it, else memory that stays valid and unchanged until the same
        thread calls again. Raises BlockError when the block is not here, OSError for a fault. For subclasses and
        tests; everybody else calls :meth:`get`.
        """

    @abstractmethod
    def quarantine(self, ref: BlockRef, miss: Miss) -> None:
        """Take a block that did not verify out of use, keep it aside where possible, and count it. Never fails."""

    def get(
        self, refs: Sequence[BlockRef], sink: Sink, *, sealer: Sealer, deadline: float | None = None
    ) -> list[Miss | None]:
        """Read, verify and hand over blocks; one result per ref, None for a hit, positions as in ``refs``.

        Blocks until done or until ``deadline`` (``time.monotonic`` seconds) has passed; what was not begun by then
        is ``Cause.DEADLINE``. A block that fails verification is quarantined and is a miss with its own cause.
        """
        results: list[Miss | None] = []
        for index, ref in enumerate(refs):
            if deadline is not None and time.monotonic() >= deadline:
                results.append(Miss(Cause.DEADLINE))
            else:
                results.append(self._get_one(index, ref, sink, sealer))
        return results

    def record(self, ref: BlockRef, *, sealer: Sealer) -> Record | Miss:
        """A verified copy of a whole record, as another tier would store it."""
        try:
            data, tag = self.fetch(ref, None)
            block.verify(data, tag, ref, sealer)
            return block.copy(ref, data, tag)
        except BlockError as error:
            return self._failed(ref, error.miss)
        except OSError as error:
            return io_miss(error, reading=True)

    def _get_one(self, index: int, ref: BlockRef, sink: Sink, sealer: Sealer) -> Miss | None:
        try:
            buffer = sink.buffer(index, block.record_bytes(ref.spec))
            data, tag = self.fetch(ref, buffer)
            payload = block.verify(data, tag, ref, sealer)
        except BlockError as error:
            return self._failed(ref, error.miss)
        except OSError as error:
            return io_miss(error, reading=True)
        if buffer is not None and (data is not buffer or sealer.seals):
            buffer[block.header_bytes(ref.spec) :] = payload
        sink.accept(index, payload)
        return None

    def _failed(self, ref: BlockRef, miss: Miss) -> Miss:
        if miss.cause in CORRUPT:
            self.quarantine(ref, miss)
        return miss

    @abstractmethod
    def put(self, records: Sequence[Record]) -> list[Miss | None]:
        """Store records; None where the block is now here (also if it already was). Blocks.

        May evict others, but neither one of these records nor what one of them needs; see :meth:`holding`.
        """

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

    @contextmanager
    def holding(self, records: Sequence[Record]) -> Iterator[None]:
        """Lease ``records`` and the blocks they need while they are stored, so that they do not push out each other."""
        keys = [key for record in records for key in (record.ref.key, record.ref.needs)]
        self.lease(keys)
        try:
            yield
        finally:
            self.release(keys)

    def leased(self, key: bytes) -> bool:
        """Whether ``key`` is under lease in this process."""
        return key in self._leases


def io_miss(error: OSError, *, reading: bool = False) -> Miss:
    """The miss for an operating-system error: ``io-error:<NAME>``, when writing also ``no-space`` or ``read-only``."""
    if not reading and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return Miss(Cause.NO_SPACE)
    if not reading and error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return Miss(Cause.READ_ONLY)
    return Miss(Cause.IO_ERROR, errno.errorcode.get(error.errno or 0, type(error).__name__))
