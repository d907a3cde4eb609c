"""Lookups in the file tier's index, and what a fault of it means. Writing is in manifest.py."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from stemkv.errors import StoreError, StoreFormatError
from stemkv.identity import Identity
from stemkv.keys import BlockRef
from stemkv.misses import Cause, Miss
from stemkv.tiers.explain import KnownNamespace

FORMAT = 1
APPLICATION_ID = 0x73746B76  # "stkv"
_READ_WAIT_S = 2.0
"""Readers wait only while another process recovers the log of a crashed one."""
_REFRESH_S = 1.0
"""How often a read-only tier looks whether a writer came by."""


class Totals(NamedTuple):
    """Counts of all processes together."""

    blocks: int
    bytes: int
    evicted: int
    quarantined: int


class Index:
    """Lookups in the manifest of a folder that this process need not be able to write. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._checked_at = time.monotonic()
        self._stamp: tuple[int, ...] | None = None
        """How the files looked when they were opened as unchanging; None while SQLite itself sees changes."""
        self._reader = self._open()
        self._files = _identities(path)

    def _open(self) -> sqlite3.Connection:
        stamp, self._stamp = _stamp(self.path), None
        try:
            return _opened(self.path, "ro")
        except sqlite3.OperationalError:
            # A folder without write permission and without a live writer: SQLite cannot make its shared memory.
            self._stamp = stamp
            return _opened(self.path, "ro&immutable=1")

    def moved(self) -> bool:
        """Whether the files that were opened are no longer those of the folder. Nobody removes them while in use."""
        return _identities(self.path) != self._files

    def contains(self, keys: Sequence[bytes]) -> set[bytes]:
        """Those of ``keys`` that have a row."""
        found: set[bytes] = set()
        with self._reading() as reader:
            for at in range(0, len(keys), 512):
                share = keys[at : at + 512]
                marks = ",".join("?" * len(share))
                found.update(
                    row[0]
                    for row in reader.execute(f"SELECT key FROM blocks WHERE key IN ({marks})", share)  # noqa: S608
                )
        return found

    def query(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """A read outside any transaction."""
        with self._reading() as reader:
            return reader.execute(sql, values).fetchall()

    def totals(self) -> Totals:
        return Totals(*self.query("SELECT blocks, bytes, evicted, quarantined FROM totals")[0])

    def namespaces(self, tenant_id: bytes) -> list[KnownNamespace]:
        """What is stored for one tenant."""
        rows = self.query("SELECT id, tenant, identity, generation, blocks FROM namespaces WHERE tenant = ?", tenant_id)
        return [KnownNamespace(i, t, _identity(raw), g, n) for i, t, raw, g, n in rows]

    def namespaces_with(self, tokens_digest: bytes) -> set[bytes]:
        """Ids of the namespaces that hold a first block with these tokens."""
        rows = self.query(
            "SELECT n.id FROM blocks b JOIN namespaces n ON n.number = b.namespace "
            "WHERE b.idx = 0 AND b.tokens_digest = ?",
            tokens_digest,
        )
        return {row[0] for row in rows}

    def has_sibling(self, ref: BlockRef) -> bool:
        """Whether another block of its group follows the same block as ``ref``."""
        sql = "SELECT 1 FROM blocks WHERE needs = ? AND grp = ? AND key != ? LIMIT 1"
        return bool(self.query(sql, ref.needs, ref.group, ref.key))

    def is_ghost(self, key: bytes) -> bool:
        """Whether ``key`` was evicted lately."""
        return bool(self.query("SELECT 1 FROM ghosts WHERE key = ?", key))

    def close(self) -> None:
        """Close every connection. Later calls raise sqlite3.ProgrammingError."""
        with self._lock:
            self._reader.close()

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self._stamp is not None and time.monotonic() - self._checked_at > _REFRESH_S:
                self._checked_at = time.monotonic()
                if _stamp(self.path) != self._stamp:
                    self._reader.close()
                    self._reader = self._open()
            yield self._reader


def damaged(error: sqlite3.Error) -> bool:
    """Whether ``error`` says that the database itself is broken, not that it cannot be reached."""
    if type(error) is sqlite3.DatabaseError:
        return True
    too_short = getattr(error, "sqlite_errorname", "") == "SQLITE_IOERR_SHORT_READ"  # named since Python 3.11
    return too_short or str(error).startswith(("no such table", "no such column"))


def fault(error: OSError | sqlite3.Error) -> Miss:
    """The miss for a fault of the manifest: ``no-space``, ``read-only`` or ``io-error:<NAME>``."""
    text = str(error)
    if "full" in text:
        return Miss(Cause.NO_SPACE)
    if "readonly" in text:
        return Miss(Cause.READ_ONLY)
    # sqlite_errorname came with Python 3.11
    return Miss(Cause.IO_ERROR, getattr(error, "sqlite_errorname", None) or type(error).__name__)


def connect(path: Path, mode: str, wait_s: float) -> sqlite3.Connection:
    return sqlite3.connect(
        f"{path.as_uri()}?mode={mode}", uri=True, timeout=wait_s, isolation_level=None, check_same_thread=False
    )


def _opened(path: Path, mode: str) -> sqlite3.Connection:
    """A connection to a manifest that is there. Raises sqlite3.Error, StoreError."""
    connection = connect(path, mode, _READ_WAIT_S)
    try:
        if not checked_format(connection, path):
            raise sqlite3.OperationalError(f"{path} is empty")
    except BaseException:
        connection.close()
        raise
    return connection


def checked_format(connection: sqlite3.Connection, path: Path) -> int:
    """The format of a manifest, 0 for an empty database. Raises StoreError for anybody else's database."""
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if application == APPLICATION_ID and version > FORMAT:
        raise StoreFormatError(
            f"the store {path.parent} has format {version}, written by a newer stemkv; this one reads up to "
            f"format {FORMAT}: upgrade stemkv or name another folder"
        )
    empty = not connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
    if application == APPLICATION_ID and version < 1:
        raise sqlite3.DatabaseError(f"{path} has no format")
    if application != APPLICATION_ID and (application or version or not empty):
        raise StoreError(f"{path} is a database, but not a stemkv manifest: name another folder")
    return version


def _identity(raw: bytes | None) -> Identity | None:
    try:
        return msgspec.json.decode(raw, type=Identity) if raw is not None else None
    except msgspec.MsgspecError:
        return None  # written by a version with other fields


def _identities(path: Path) -> list[tuple[int, int]]:
    """Device and inode of the database and its log."""
    found = []
    for name in (path, f"{path}-wal"):
        with suppress(OSError):
            info = Path(name).stat()
            found.append((info.st_dev, info.st_ino))
    return found


def _stamp(path: Path) -> tuple[int, ...]:
    """Changes whenever somebody writes the manifest."""
    stamp: tuple[int, ...] = ()
    for name in (path, f"{path}-wal"):
        with suppress(OSError):
            info = Path(name).stat()
            stamp += (info.st_ino, info.st_size, info.st_mtime_ns)
    return stamp
