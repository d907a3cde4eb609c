"""The file tier: a folder of block files and a manifest, shared by all processes of a machine.

On an SSD it is the disk tier, on ``/dev/shm`` the shared-memory tier; the code is the same.

    FOLDER/manifest.sqlite3              the index
    FOLDER/blocks/ab/<key>.safetensors   one file a block; ``ab`` are the key's first two digits
    FOLDER/sessions/<process>/           its lock and its unfinished files
    FOLDER/quarantine/                   the last few files that did not verify

A file is written under a name of its own, then renamed into place and entered in the manifest inside one write
transaction; removal works the same way. A crash can therefore leave a file without a row or a row without a file
only while that lock was held, and whoever opens the folder next finds the dead session and repairs both.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from stemkv import block
from stemkv.block import BlockError, Record
from stemkv.errors import StoreError
from stemkv.keys import BlockRef
from stemkv.misses import Cause, Miss
from stemkv.tiers import session
from stemkv.tiers.base import Tier, TierStats, io_miss
from stemkv.tiers.explain import explain_absence
from stemkv.tiers.manifest import Manifest, row_for
from stemkv.tiers.repair import repair

log = logging.getLogger("stemkv")

DURABILITIES = ("none", "batch", "full")
_PAGE = 4096
_QUARANTINE_FILES = 8
"""How many files that did not verify are kept for a look; older ones are deleted."""
_FULL_PAUSE_S = 5.0
"""After the disk was full, puts fail at once for this long, so that a full disk costs next to nothing."""


class FileTier(Tier):
    """Blocks as files under ``path``, at most ``max_bytes`` of them for all processes together.

    ``reserve_bytes`` of the file system are left free. ``durability`` says what survives a power cut: ``none``
    leaves it to the kernel (every read verifies, so a torn file is a miss), ``batch`` syncs once per put of many
    blocks, ``full`` syncs every file and its folder. A folder that cannot be written is served read-only, with one
    warning. Raises StoreError (StoreFormatError for a newer format) from the constructor only.
    """

    name = "file"

    def __init__(
        self, path: str | os.PathLike[str], *, max_bytes: int, reserve_bytes: int = 256 << 20, durability: str = "none"
    ) -> None:
        super().__init__()
        if durability not in DURABILITIES:
            raise StoreError(f"durability {durability!r} is unknown: choose one of {', '.join(DURABILITIES)}")
        self.path = Path(path).absolute()
        self._blocks = self.path / "blocks"
        self._max_bytes, self._reserve_bytes, self._durability = max_bytes, reserve_bytes, durability
        self._scratch = threading.local()
        self._full_until = 0.0
        self._closed = False
        self._session: session.Session | None = None
        self._manifest: Manifest | None = None
        self._open()

    def _open(self) -> None:
        try:
            self._blocks.mkdir(parents=True, exist_ok=True)
            self._session = session.Session(self.path)
        except OSError as error:
            self._open_read_only(error)
            return
        self._manifest = self._open_manifest()
        dead = session.take_over_dead(self.path)
        if dead:
            try:
                fixed = repair(self._blocks, self._manifest)
                session.forget(dead)
                log.info("repaired %s after %d unclean ends: %s", self.path, len(dead), fixed)
            except (OSError, sqlite3.Error):
                log.exception("could not repair %s; its blocks are verified when they are read", self.path)

    def _open_manifest(self) -> Manifest:
        path = self.path / "manifest.sqlite3"
        new = not path.exists()
        try:
            manifest = Manifest(path, durable=self._durability != "none")
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise StoreError(f"cannot open {path}: {error}") from None
            # Not a database any more. The block files say everything the manifest needs to know.
            log.warning("%s is damaged and is built anew from the block files", path)
            for suffix in ("", "-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    Path(f"{path}{suffix}").replace(f"{path}.damaged{suffix}")
            manifest, new = Manifest(path, durable=self._durability != "none"), True
        if new:
            repair(self._blocks, manifest)
        return manifest

    def _open_read_only(self, why: OSError) -> None:
        if not self.path.is_dir():
            raise StoreError(
                f"cannot create the store folder {self.path}: {why.strerror}; name a folder that can be written"
            ) from None
        log.warning("%s cannot be written (%s): serving what is stored there, storing nothing", self.path, why.strerror)
        path = self.path / "manifest.sqlite3"
        with contextlib.suppress(sqlite3.Error):
            if path.exists():
                self._manifest = Manifest(path, durable=False, read_only=True)

    @property
    def read_only(self) -> bool:
        return self._session is None

    # -- reading -------------------------------------------------------------------------------------------

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        try:
            if self._manifest is not None and not self._closed:
                return self._manifest.contains(keys)
        except sqlite3.Error as error:
            log.warning("lookup in %s failed: %s", self.path, error)
        return [False] * len(keys)

    def fetch(self, ref: BlockRef, buffer: memoryview | None) -> tuple[memoryview, bytes]:
        if self._closed:
            raise BlockError(Cause.CLOSED)
        size = block.record_bytes(ref.spec)
        try:
            fd = os.open(self._file(ref.key), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self._forget_lost(ref.key)
            raise BlockError(Cause.EVICTED) from None
        try:
            found = os.fstat(fd).st_size
            if found != size:
                raise BlockError(Cause.BAD_SIZE, f"{found} bytes, not {size}")
            data = self._scratch_of(size) if buffer is None else buffer
            _read_whole(fd, data)
        finally:
            os.close(fd)
        return data, block.take_tag(data)

    def explain(self, ref: BlockRef) -> Miss | None:
        manifest = self._manifest
        if manifest is None or self._closed:
            return None
        try:
            rows = manifest.query(
                "SELECT n.id FROM blocks b JOIN namespaces n ON n.number = b.namespace "
                "WHERE b.idx = 0 AND b.tokens_digest = ?", ref.tokens_digest,
            ) if ref.index == 0 else []  # fmt: skip
            return explain_absence(
                ref,
                known=manifest.namespaces() if ref.index == 0 else (),
                same_text={row[0] for row in rows},
                diverged=bool(
                    manifest.query("SELECT 1 FROM blocks WHERE needs = ? AND grp = ? LIMIT 1", ref.needs, ref.group)
                ),
                evicted=bool(manifest.query("SELECT 1 FROM ghosts WHERE key = ?", ref.key)),
            )
        except sqlite3.Error:
            return None

    def stats(self) -> TierStats:
        blocks = size = evicted = quarantined = 0
        with contextlib.suppress(sqlite3.Error):
            if self._manifest is not None and not self._closed:
                blocks, size, evicted, quarantined = self._manifest.totals()
        return TierStats(blocks, size, self._max_bytes, evicted, quarantined, self.read_only)

    # -- writing -------------------------------------------------------------------------------------------

    def put(self, records: Sequence[Record]) -> list[Miss | None]:
        if self._closed:
            return [Miss(Cause.CLOSED)] * len(records)
        if self._session is None or self._manifest is None:
            return [Miss(Cause.READ_ONLY)] * len(records)
        results: list[Miss | None] = [None] * len(records)
        written: list[tuple[int, Path]] = []
        try:
            here = self._manifest.contains([r.ref.key for r in records])
            for i, record in enumerate(records):
                if not here[i]:
                    outcome = self._write(record)
                    if isinstance(outcome, Path):
                        written.append((i, outcome))
                    else:
                        results[i] = outcome
            if self._durability == "batch":
                _sync_all([path for _, path in written])
            self._publish(records, written, results)
        except (OSError, sqlite3.Error) as error:
            miss = io_miss(error) if isinstance(error, OSError) else Miss(Cause.IO_ERROR, type(error).__name__)
            for i, _ in written:
                results[i] = results[i] or miss
        finally:
            for _, path in written:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
        return results

    def delete(self, keys: Sequence[bytes]) -> int:
        if self._manifest is None or self.read_only or self._closed:
            return 0
        count = 0
        with contextlib.suppress(OSError, sqlite3.Error), self._manifest.transaction() as db:
            for key in keys:
                self._file(key).unlink(missing_ok=True)
                count += Manifest.delete(db, key)
        return count

    def touch(self, keys: Sequence[bytes]) -> None:
        if self._manifest is None or self.read_only or self._closed:
            return
        with contextlib.suppress(sqlite3.Error), self._manifest.transaction() as db:
            Manifest.touch(db, keys)

    def quarantine(self, ref: BlockRef, miss: Miss) -> None:
        log.warning(
            "block %s did not verify (%s); it is set aside and will be computed again", ref.key.hex()[:16], miss
        )
        if self._manifest is None or self.read_only or self._closed:
            return
        folder = self.path / "quarantine"
        with contextlib.suppress(OSError, sqlite3.Error), self._manifest.transaction() as db:
            folder.mkdir(exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                self._file(ref.key).replace(folder / f"{ref.key.hex()}-{miss.cause.value}-{secrets.token_hex(4)}")
            Manifest.delete(db, ref.key)
            db.execute("UPDATE totals SET quarantined = quarantined + 1")
            kept = sorted(folder.iterdir(), key=lambda p: p.stat().st_mtime)
            for old in kept[:-_QUARANTINE_FILES]:
                old.unlink(missing_ok=True)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._manifest is not None:
            self._manifest.close()
        if self._session is not None:
            self._session.close()

    def _write(self, record: Record) -> Path | Miss:
        """An unfinished file with the whole record, or why there is none. Makes room and tries once more when full."""
        if len(record.data) > self._max_bytes or time.monotonic() < self._full_until:
            return Miss(Cause.NO_SPACE)
        for last in (False, True):
            path = self._required_session().temporary()
            try:
                if self._free_bytes() - len(record.data) < self._reserve_bytes:
                    raise OSError(28, "the reserve would be used")
                _write_file(path, block.with_tag(record), record.data, sync=self._durability == "full")
                return path
            except OSError as error:
                path.unlink(missing_ok=True)
                if io_miss(error).cause is not Cause.NO_SPACE:
                    return io_miss(error)
                if last or not self._evict_bytes(4 * len(record.data)):
                    break
        self._full_until = time.monotonic() + _FULL_PAUSE_S
        log.warning("no room left in %s: serving what is stored, storing nothing for now", self.path)
        return Miss(Cause.NO_SPACE)

    def _publish(self, records: Sequence[Record], written: list[tuple[int, Path]], results: list[Miss | None]) -> None:
        if not written:
            return
        published: list[Path] = []
        try:
            with self._required_manifest().transaction() as db:
                for i, path in written:
                    record = records[i]
                    size = _on_disk(len(record.data))
                    if not self._make_room(db, size):
                        results[i] = Miss(Cause.NO_SPACE)
                        continue
                    number = Manifest.namespace_number(db, record.ref.namespace)
                    if Manifest.insert(db, row_for(record.ref, number, size, record.cost_s)):
                        target = self._file(record.ref.key)
                        _rename(path, target)
                        published.append(target)
        except BaseException:
            for target in published:  # their rows were rolled back
                with contextlib.suppress(OSError):
                    target.unlink()
            raise
        if self._durability == "full":
            for folder in {p.parent for p in published}:
                _sync_folder(folder)

    def _make_room(self, db: sqlite3.Connection, size: int) -> bool:
        """Evict until ``size`` more bytes fit under the cap; inside a transaction."""
        while True:
            used = db.execute("SELECT bytes FROM totals").fetchone()[0]
            if used + size <= self._max_bytes:
                return True
            if not self._evict(db, used + size - self._max_bytes):
                return False

    def _evict(self, db: sqlite3.Connection, nbytes: int) -> int:
        """Remove the cheapest leaves until ``nbytes`` are freed; returns the bytes freed, 0 if nothing may go."""
        freed = 0
        for key, size, priority in Manifest.cheapest_leaves(db, 64 + len(self._leases)):
            if freed >= nbytes:
                break
            if self.leased(key):
                continue
            self._file(key).unlink(missing_ok=True)
            Manifest.delete(db, key)
            Manifest.note_evicted(db, key, priority)
            freed += size
        return freed

    def _evict_bytes(self, nbytes: int) -> int:
        with self._required_manifest().transaction() as db:
            return self._evict(db, nbytes)

    def _forget_lost(self, key: bytes) -> None:
        """The file is gone without its row: someone deleted it by hand, or it was evicted just now."""
        if self._manifest is None or self.read_only:
            return
        with contextlib.suppress(sqlite3.Error), self._manifest.transaction() as db:
            if not self._file(key).exists():
                Manifest.delete(db, key)

    # -- small things --------------------------------------------------------------------------------------

    def _file(self, key: bytes) -> Path:
        digits = key.hex()
        return self._blocks / digits[:2] / f"{digits}.safetensors"

    def _scratch_of(self, size: int) -> memoryview:
        """This thread's read buffer; stays warm in the processor's cache from block to block."""
        held: bytearray | None = getattr(self._scratch, "held", None)
        if held is None or len(held) < size:
            held = self._scratch.held = bytearray(size)
        return memoryview(held)[:size]

    def _free_bytes(self) -> int:
        info = os.statvfs(self.path)
        return info.f_bavail * info.f_frsize

    def _required_session(self) -> session.Session:
        if self._session is None:
            raise OSError(30, "read-only")
        return self._session

    def _required_manifest(self) -> Manifest:
        if self._manifest is None:
            raise OSError(30, "read-only")
        return self._manifest


def _on_disk(size: int) -> int:
    """Bytes a file of ``size`` occupies, in whole pages, as ``du`` counts."""
    return -(-size // _PAGE) * _PAGE


def _read_whole(fd: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        got = os.preadv(fd, [data[done:]], done)
        if not got:
            raise BlockError(Cause.BAD_SIZE, f"file ended after {done} bytes")
        done += got


def _write_file(path: Path, header: bytes, data: memoryview, *, sync: bool) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        parts = [memoryview(header), data[len(header) :]]
        while parts:
            done = os.writev(fd, parts)
            while parts and done >= len(parts[0]):
                done -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][done:]
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)


def _rename(source: Path, target: Path) -> None:
    try:
        source.rename(target)
    except FileNotFoundError:
        target.parent.mkdir(exist_ok=True)
        source.rename(target)


def _sync_all(paths: Sequence[Path]) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
