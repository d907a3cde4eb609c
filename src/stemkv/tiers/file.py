"""The file tier: a folder of block files and a manifest, shared by all processes of a machine.

On an SSD it is the disk tier, on ``/dev/shm`` the shared-memory tier; the code is the same.

    FOLDER/manifest.sqlite3              the index
    FOLDER/blocks/ab/<key>.safetensors   one file a block; ``ab`` are the key's first two digits
    FOLDER/sessions/<process>/           its lock and its unfinished files
    FOLDER/quarantine/                   the last few files that did not verify
    FOLDER/lock                          held while somebody opens or repairs the folder

A file is written under a name of its own, then renamed into place and entered in the manifest inside one write
transaction; removal works the same way. A crash can therefore leave a file without a row or a row without a file
only while that lock was held, and whoever opens the folder next finds the dead session and repairs both.

What goes wrong later is met where it shows: a manifest that was replaced or a folder that was removed is opened
anew by the next write, a folder that cannot be written is tried again every few seconds.
"""

# Block paths are strings: one is built for every block that is read.
# ruff: noqa: PTH110, PTH120

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from stemkv import block, policy
from stemkv.block import BlockError, Record
from stemkv.errors import StoreError
from stemkv.keys import BlockRef
from stemkv.misses import Cause, Miss
from stemkv.tiers import _disk
from stemkv.tiers._disk import Folder, on_disk
from stemkv.tiers._store import Store
from stemkv.tiers.base import Tier, TierStats, io_miss
from stemkv.tiers.explain import explain_absence
from stemkv.tiers.index import Totals, fault
from stemkv.tiers.manifest import Manifest, row_for

log = logging.getLogger("stemkv")

DURABILITIES = ("none", "batch", "full")
RETRY_S = 5.0
"""How long a full or unwritable folder is left alone before the next put tries again."""
_EVICT_AT_ONCE = 256 << 20
"""Most bytes given up in one go when the disk is full, so that one put never empties the store."""

_LOG_BYTES = 256 << 10
"""Room that a commit may take in the manifest's log."""


class FileTier(Tier):
    """Blocks as files under ``path``, at most ``max_bytes`` of them for all processes together.

    ``reserve_bytes`` of the file system are left free. ``durability`` says what survives a power cut: ``none``
    leaves it to the kernel (every read verifies, so a torn file is a miss); ``batch`` puts the blocks of one put on
    the medium before they get their names, so that no torn file is ever found; ``full`` also the folders and the
    manifest, before put returns. A folder that cannot be written is served read-only, with one warning, and tried
    again every ``retry_s`` seconds, as is a full disk. Raises StoreError (StoreFormatError for a newer format) from
    the constructor only. In a forked child the tier is closed: open it after forking.
    """

    name = "file"
    keeps_records = False

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_bytes: int,
        reserve_bytes: int = 256 << 20,
        durability: str = "none",
        retry_s: float = RETRY_S,
    ) -> None:
        super().__init__()
        if durability not in DURABILITIES:
            raise StoreError(f"durability {durability!r} is unknown: choose one of {', '.join(DURABILITIES)}")
        self.path = Path(path).absolute()
        self._folder = Folder(self.path)
        self._max_bytes, self._reserve_bytes, self._durability = max_bytes, reserve_bytes, durability
        self._retry_s, self._full_until, self._said_full = retry_s, 0.0, False
        self._scratch = threading.local()
        self._store = Store(self._folder, durability=durability, retry_s=retry_s)
        if not self.read_only:
            self._shrink()

    @property
    def read_only(self) -> bool:
        """Whether blocks are served but not stored, at the moment."""
        return self._store.read_only

    # -- reading -------------------------------------------------------------------------------------------

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        found = self._present(keys)
        return [key in found for key in keys]

    def fetch(self, ref: BlockRef, buffer: memoryview | None) -> tuple[memoryview, bytes]:
        if self._store.closed:
            raise BlockError(Cause.CLOSED)
        data = self._scratch_of(block.record_bytes(ref.spec)) if buffer is None else buffer
        try:
            _disk.read_file(self._folder.file(ref.key), data)
        except FileNotFoundError:
            # Evicted just now, or deleted by hand: then its row is still there.
            if self._present([ref.key]):
                self._store.lost(ref.key, quarantined=0)
            raise BlockError(Cause.EVICTED) from None
        return data, block.take_tag(data)

    def explain(self, ref: BlockRef) -> Miss | None:
        reader = self._store.reader
        if reader is None:
            return None
        try:
            first = ref.index == 0
            return explain_absence(
                ref,
                known=reader.namespaces(ref.namespace.tenant_id) if first else (),
                same_text=reader.namespaces_with(ref.tokens_digest) if first else (),
                diverged=reader.has_sibling(ref),
                evicted=reader.is_ghost(ref.key),
            )
        except sqlite3.Error as error:
            self._store.note(error)
            return None

    def stats(self) -> TierStats:
        totals, reader = Totals(0, 0, 0, 0), self._store.reader
        if reader is not None:
            with suppress(sqlite3.Error):
                totals = reader.totals()
        quarantined = totals.quarantined + self._store.unreported()
        return TierStats(totals.blocks, totals.bytes, self._max_bytes, totals.evicted, quarantined, self.read_only)

    def _present(self, keys: Sequence[bytes]) -> set[bytes]:
        """Those of ``keys`` that have a row and are not known to be lost."""
        reader = self._store.reader
        try:
            return self._store.without_gone(reader.contains(keys)) if reader is not None else set()
        except sqlite3.Error as error:
            self._store.note(error)
            return set()

    def _scratch_of(self, size: int) -> memoryview:
        """This thread's read buffer; stays warm in the processor's cache from block to block."""
        held: bytearray | None = getattr(self._scratch, "held", None)
        if held is None or len(held) < size:
            held = self._scratch.held = bytearray(size)
        return memoryview(held)[:size]

    # -- writing -------------------------------------------------------------------------------------------

    def put(self, records: Sequence[Record]) -> list[Miss | None]:
        refusal = self._store.refusal()
        if refusal is not None:
            return [refusal] * len(records)
        results: dict[int, Miss | None] = {}
        written: dict[int, Path] = {}
        with self.holding(records):
            try:
                self._put(records, results, written)
            except (OSError, sqlite3.Error) as error:
                miss = self._store.note(error)
                for i in range(len(records)):
                    results.setdefault(i, miss)
            finally:
                for path in written.values():
                    with suppress(OSError):
                        _disk.remove(path)
        return [results[i] for i in range(len(records))]

    def _put(self, records: Sequence[Record], results: dict[int, Miss | None], written: dict[int, Path]) -> None:
        """Fill ``results`` as far as it gets; ``written`` are files that still have to be removed."""
        here = self._present([key for r in records for key in (r.ref.key, r.ref.needs)])
        for i, record in enumerate(records):
            # A row alone does not count: someone may have deleted the file.
            if record.ref.key in here and os.path.exists(self._folder.file(record.ref.key)):
                results[i] = None
                continue
            outcome = self._write(record, needed_is_here=record.ref.needs in here)
            if isinstance(outcome, Path):
                written[i] = outcome
                here.add(record.ref.key)
            else:
                results[i] = outcome
        if self._durability == "batch":
            _disk.sync(written.values())
        if written:
            try:
                results.update(self._publish(records, written))
            except sqlite3.Error as error:
                # The files fitted, the manifest's log did not.
                if fault(error).cause is not Cause.NO_SPACE or not self._give_up(_LOG_BYTES):
                    raise
                results.update(self._publish(records, written))

    def delete(self, keys: Sequence[bytes]) -> int:
        deleted = 0
        if keys and self._store.refusal() is None:
            with self._store.noting():
                with self._store.transaction() as db:
                    for key in keys:
                        _disk.remove(self._folder.file(key))
                    count = sum(Manifest.delete(db, key) for key in keys)
                deleted = count  # only after the commit
        return deleted

    def touch(self, keys: Sequence[bytes]) -> None:
        if keys and self._store.refusal() is None:
            with self._store.noting(), self._store.transaction() as db:
                Manifest.touch(db, keys)

    def quarantine(self, ref: BlockRef, miss: Miss) -> None:
        if self._store.closed:
            return
        log.warning(
            "block %s did not verify (%s); it is set aside and will be computed again", ref.key.hex()[:16], miss
        )
        if not self.read_only:
            with self._store.noting():
                self._folder.set_aside(ref.key, miss.cause)
        self._store.lost(ref.key, quarantined=1)

    def close(self) -> None:
        self._store.close()

    def _write(self, record: Record, *, needed_is_here: bool) -> Path | Miss:
        """An unfinished file with the whole record, or why there is none. Makes room and tries once more when full."""
        size = on_disk(len(record.data))
        if size > self._max_bytes or time.monotonic() < self._full_until:
            return Miss(Cause.NO_SPACE)
        for last in (False, True):
            try:
                path = self._write_once(record, size)
            except OSError as error:
                miss = io_miss(error)
                if miss.cause is not Cause.NO_SPACE or error.errno == errno.EFBIG:  # EFBIG concerns this block alone
                    return miss
                may_evict = policy.may_evict(record.ref, needed_is_here=needed_is_here)
                if last or not may_evict or not self._give_up(size):
                    break
            else:
                self._said_full = False
                return path
        self._full_until = time.monotonic() + self._retry_s
        if not self._said_full:
            log.warning("no room left in %s: serving what is stored, storing nothing for now", self.path)
        self._said_full = True
        return Miss(Cause.NO_SPACE)

    def _write_once(self, record: Record, size: int) -> Path:
        session = self._store.opened.session
        if session is None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        if self._free_bytes() < size:
            raise OSError(errno.ENOSPC, "the reserve would be used")
        header, path = block.with_tag(record), session.temporary()
        try:
            _disk.write_file(path, (header, record.data[len(header) :]), sync=self._durability == "full")
        except BaseException:
            with suppress(OSError):
                _disk.remove(path)
            raise
        return path

    def _publish(self, records: Sequence[Record], written: dict[int, Path]) -> dict[int, Miss | None]:
        """Give finished files their names and rows, all or none of them; what found no room is a miss."""
        results: dict[int, Miss | None] = {}
        published: dict[str, Path] = {}

        def undo() -> None:
            for target, path in published.items():
                with suppress(OSError):
                    _disk.take_back(target, path)

        with self._store.transaction(undo=undo) as db:
            for i, path in written.items():
                ref, size = records[i].ref, on_disk(len(records[i].data))
                results[i] = self._make_room(db, size, ref)
                if results[i] is not None:
                    continue
                number = Manifest.namespace_number(db, ref.namespace)
                target = self._folder.file(ref.key)
                if Manifest.insert(db, row_for(ref, number, size, records[i].cost_s)) or not os.path.exists(target):
                    published[target] = path
                    _disk.publish(path, target)
            if self._durability == "full":
                _disk.sync([*{os.path.dirname(target) for target in published}, self._folder.blocks])
        return results

    # -- room ----------------------------------------------------------------------------------------------

    def _free_bytes(self) -> int:
        """Bytes of the file system that may be used without touching the reserve; negative if it is touched."""
        return self._folder.free_bytes() - self._reserve_bytes

    def _give_up(self, size: int) -> bool:
        """Evict for a full disk, some blocks ahead; False if that would not help or nothing may go."""
        wanted = max(4 * size, size - self._free_bytes())
        with self._store.transaction() as db:
            if wanted > Manifest.used_bytes(db) + 4 * size:
                return False  # it is others who fill the disk
            return self._evict(db, min(wanted, _EVICT_AT_ONCE)) > 0

    def _shrink(self) -> None:
        """Meet a cap that is smaller than what a repair or another process left."""
        with self._store.noting():
            while self.stats().bytes > self._max_bytes:
                with self._store.transaction() as db:
                    over = Manifest.used_bytes(db) - self._max_bytes
                    if not self._evict(db, min(over, _EVICT_AT_ONCE)):
                        return

    def _make_room(self, db: sqlite3.Connection, size: int, ref: BlockRef) -> Miss | None:
        """Evict until ``size`` more bytes fit under the cap, for ``ref``; inside a transaction."""
        over = Manifest.used_bytes(db) + size - self._max_bytes
        if over > 0 and not policy.may_evict(ref, needed_is_here=Manifest.has(db, ref.needs)):
            return Miss(Cause.NO_SPACE)
        return None if over <= 0 or self._evict(db, over) >= over else Miss(Cause.NO_SPACE)

    def _evict(self, db: sqlite3.Connection, nbytes: int) -> int:
        """Remove the cheapest unleased leaves until ``nbytes`` are freed; the bytes freed, 0 if nothing may go."""
        freed, before = 0, -1
        while freed < nbytes and freed > before:  # what was needed by an evicted block is a leaf in the next round
            before = freed
            for key, size, priority in Manifest.cheapest_leaves(db, 64 + len(self._leases)):
                if freed >= nbytes:
                    break
                if self.leased(key):
                    continue
                _disk.remove(self._folder.file(key))
                Manifest.delete(db, key)
                Manifest.note_evicted(db, key, priority)
                freed += size
        return freed
