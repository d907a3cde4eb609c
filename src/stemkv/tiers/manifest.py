"""The file tier's index: one SQLite database in WAL mode, shared by all processes that use the folder.

Counts, bytes and the number of blocks that need a block are kept by triggers, so that no reader ever has to scan.
Row and file are published and removed inside one write transaction (see file.py), which makes SQLite's write lock
the one lock of the folder. Everything here raises sqlite3.Error for faults; file.py turns them into misses.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from stemkv import policy
from stemkv.errors import StoreError, StoreFormatError
from stemkv.identity import Identity
from stemkv.keys import BlockRef, Namespace
from stemkv.misses import Cause, Miss
from stemkv.tiers.explain import GHOSTS, KnownNamespace

FORMAT = 1
APPLICATION_ID = 0x73746B76  # "stkv"
WRITE_WAIT_S = 30.0
"""How long a background write waits for another process's transaction before it counts as a fault."""
_READ_WAIT_S = 2.0
"""Readers wait only while another process recovers the log of a crashed one."""
_REFRESH_S = 1.0
"""How often a read-only tier looks whether a writer came by."""

_SCHEMA = """
CREATE TABLE namespaces (
  number INTEGER PRIMARY KEY, id BLOB NOT NULL UNIQUE, tenant BLOB NOT NULL, identity BLOB, generation INTEGER NOT NULL,
  blocks INTEGER NOT NULL DEFAULT 0);
CREATE INDEX namespaces_by_tenant ON namespaces (tenant);
CREATE TABLE blocks (
  key BLOB NOT NULL UNIQUE, needs BLOB NOT NULL, namespace INTEGER NOT NULL, grp INTEGER NOT NULL, idx INTEGER NOT NULL,
  tokens_digest BLOB NOT NULL, size INTEGER NOT NULL, cost REAL NOT NULL, hits INTEGER NOT NULL,
  priority REAL NOT NULL, used INTEGER NOT NULL, children INTEGER NOT NULL);
CREATE INDEX blocks_by_needs ON blocks (needs);
CREATE INDEX leaves ON blocks (priority, used) WHERE children = 0;
CREATE INDEX first_blocks ON blocks (tokens_digest) WHERE idx = 0;
CREATE TABLE totals (
  one INTEGER PRIMARY KEY CHECK (one = 1), blocks INTEGER NOT NULL, bytes INTEGER NOT NULL, clock REAL NOT NULL,
  evicted INTEGER NOT NULL, quarantined INTEGER NOT NULL, boot TEXT NOT NULL);
INSERT INTO totals VALUES (1, 0, 0, 0.0, 0, 0, '');
CREATE TABLE ghosts (number INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB NOT NULL UNIQUE);
CREATE TRIGGER stored AFTER INSERT ON blocks BEGIN
  UPDATE totals SET blocks = blocks + 1, bytes = bytes + new.size;
  UPDATE namespaces SET blocks = blocks + 1 WHERE number = new.namespace;
  UPDATE blocks SET children = children + 1 WHERE key = new.needs;
  DELETE FROM ghosts WHERE key = new.key;
END;
CREATE TRIGGER removed AFTER DELETE ON blocks BEGIN
  UPDATE totals SET blocks = blocks - 1, bytes = bytes - old.size;
  UPDATE namespaces SET blocks = blocks - 1 WHERE number = old.namespace;
  DELETE FROM namespaces WHERE number = old.namespace AND blocks = 0;
  UPDATE blocks SET children = children - 1 WHERE key = old.needs;
END;
"""


class Row(NamedTuple):
    """What the manifest knows about one block file."""

    key: bytes
    needs: bytes
    namespace: int
    group: int
    position: int
    tokens_digest: bytes
    size: int
    """Bytes on disk, in whole pages."""
    cost_s: float


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


class Manifest(Index):
    """The index with a connection of its own for writes, so that lookups never wait for this process's writes."""

    def __init__(self, path: Path, *, durability: str = "none") -> None:
        self._write_lock = threading.Lock()
        self._writer = _connect(path, "rwc", WRITE_WAIT_S)
        try:
            self.new = self._prepare(path)
            """Whether this call made the tables."""
            level = {"none": "OFF", "batch": "NORMAL", "full": "FULL"}[durability]
            self._writer.execute(f"PRAGMA synchronous={level}")
            super().__init__(path)
        except BaseException:
            self._writer.close()
            raise

    def _prepare(self, path: Path) -> bool:
        if _checked_format(self._writer, path):
            return False
        self._writer.execute("PRAGMA journal_mode=WAL")
        with self.transaction() as db:
            for statement in _statements(_SCHEMA):
                db.execute(statement)
            db.execute(f"PRAGMA application_id={APPLICATION_ID}")
            db.execute(f"PRAGMA user_version={FORMAT}")
        return True

    @contextmanager
    def transaction(
        self, wait_s: float = WRITE_WAIT_S, undo: Callable[[], None] | None = None
    ) -> Iterator[sqlite3.Connection]:
        """One write transaction; commits at the end, rolls back on any exception.

        Waits up to ``wait_s`` for other writers. ``undo`` runs before a rollback, while the lock is still held.
        """
        if not self._write_lock.acquire(timeout=wait_s):
            raise sqlite3.OperationalError("database is locked by another thread")
        try:
            self._writer.execute(f"PRAGMA busy_timeout={int(wait_s * 1000)}")
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:
                if undo is not None:
                    undo()
                with suppress(sqlite3.Error):
                    self._writer.execute("ROLLBACK")
                raise
        finally:
            self._write_lock.release()

    def boot(self) -> str:
        """The boot of this machine in which files and rows were last known to agree."""
        return str(self.query("SELECT boot FROM totals")[0][0])

    def intact(self, boot: str, *, suspect: bool) -> bool:
        """Whether SQLite finds the database sound; reads all of it if ``suspect`` or not written in ``boot``."""
        try:
            if not suspect and self.boot() in ("", boot):
                return True
            return bool(self.query("PRAGMA quick_check(1)")[0][0] == "ok")
        except sqlite3.Error as error:
            if damaged(error):
                return False
            raise

    def close(self) -> None:
        super().close()
        # The last connection to close folds the log into the database; that may fail on a full disk and is redone.
        with self._write_lock, suppress(sqlite3.Error):
            self._writer.close()

    # -- inside a transaction ------------------------------------------------------------------------------

    @staticmethod
    def namespace_number(db: sqlite3.Connection, namespace: Namespace) -> int:
        """The row of ``namespace``, made or completed if need be."""
        values = (namespace.id, namespace.tenant_id, msgspec.json.encode(namespace.identity), namespace.generation)
        db.execute(
            "INSERT INTO namespaces (id, tenant, identity, generation) VALUES (?, ?, ?, ?) ON CONFLICT (id) "
            "DO UPDATE SET tenant = excluded.tenant, identity = excluded.identity WHERE identity IS NULL",
            values,
        )
        return int(db.execute("SELECT number FROM namespaces WHERE id = ?", (namespace.id,)).fetchone()[0])

    @staticmethod
    def bare_namespace_number(db: sqlite3.Connection, namespace_id: bytes, generation: int) -> int:
        """The row of a namespace of which only a block's header is known; nobody is told about it."""
        db.execute(
            "INSERT OR IGNORE INTO namespaces (id, tenant, generation) VALUES (?, x'', ?)", (namespace_id, generation)
        )
        return int(db.execute("SELECT number FROM namespaces WHERE id = ?", (namespace_id,)).fetchone()[0])

    @staticmethod
    def insert(db: sqlite3.Connection, row: Row) -> bool:
        """Add a row; False if the key is there already."""
        clock = db.execute("SELECT clock FROM totals").fetchone()[0]
        children = db.execute("SELECT count(*) FROM blocks WHERE needs = ?", (row.key,)).fetchone()[0]
        rank = policy.priority(clock, 1, row.cost_s, row.size)
        done = db.execute(
            "INSERT OR IGNORE INTO blocks VALUES (?,?,?,?,?,?,?,?,1,?,?,?)", (*row, rank, time.time_ns(), children)
        )
        return done.rowcount == 1

    @staticmethod
    def delete(db: sqlite3.Connection, key: bytes) -> bool:
        return db.execute("DELETE FROM blocks WHERE key = ?", (key,)).rowcount == 1

    @staticmethod
    def has(db: sqlite3.Connection, key: bytes) -> bool:
        return db.execute("SELECT 1 FROM blocks WHERE key = ?", (key,)).fetchone() is not None

    @staticmethod
    def used_bytes(db: sqlite3.Connection) -> int:
        return int(db.execute("SELECT bytes FROM totals").fetchone()[0])

    @staticmethod
    def touch(db: sqlite3.Connection, keys: Sequence[bytes]) -> None:
        clock = db.execute("SELECT clock FROM totals").fetchone()[0]
        for key in keys:
            row = db.execute("SELECT hits, cost, size FROM blocks WHERE key = ?", (key,)).fetchone()
            if row is not None:
                rank = policy.priority(clock, row[0] + 1, row[1], row[2])
                values = (rank, time.time_ns(), key)
                db.execute("UPDATE blocks SET hits = hits + 1, priority = ?, used = ? WHERE key = ?", values)

    @staticmethod
    def cheapest_leaves(db: sqlite3.Connection, count: int) -> list[tuple[bytes, int, float]]:
        """(key, size, priority) of blocks that no other needs, lowest priority first, then unused longest."""
        return db.execute(
            "SELECT key, size, priority FROM blocks WHERE children = 0 ORDER BY priority, used LIMIT ?", (count,)
        ).fetchall()

    @staticmethod
    def note_evicted(db: sqlite3.Connection, key: bytes, priority: float) -> None:
        db.execute("UPDATE totals SET evicted = evicted + 1, clock = max(clock, ?)", (priority,))
        number = db.execute("INSERT OR REPLACE INTO ghosts (key) VALUES (?)", (key,)).lastrowid
        db.execute("DELETE FROM ghosts WHERE number <= ?", ((number or 0) - GHOSTS,))

    @staticmethod
    def recount(db: sqlite3.Connection) -> None:
        """Compute anew what triggers keep, in case a power cut took only some pages."""
        db.execute(
            "UPDATE totals SET blocks = (SELECT count(*) FROM blocks), "
            "bytes = (SELECT coalesce(sum(size), 0) FROM blocks)"
        )
        db.execute(
            "UPDATE blocks SET children = (SELECT count(*) FROM blocks AS c WHERE c.needs = blocks.key) "
            "WHERE children != (SELECT count(*) FROM blocks AS c WHERE c.needs = blocks.key)"
        )
        db.execute("UPDATE namespaces SET blocks = (SELECT count(*) FROM blocks WHERE namespace = namespaces.number)")


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


def row_for(ref: BlockRef, namespace: int, size: int, cost_s: float) -> Row:
    """The manifest row of a record that is being stored."""
    return Row(ref.key, ref.needs, namespace, ref.group, ref.index, ref.tokens_digest, size, cost_s)


def _connect(path: Path, mode: str, wait_s: float) -> sqlite3.Connection:
    return sqlite3.connect(
        f"{path.as_uri()}?mode={mode}", uri=True, timeout=wait_s, isolation_level=None, check_same_thread=False
    )


def _opened(path: Path, mode: str) -> sqlite3.Connection:
    """A connection to a manifest that is there. Raises sqlite3.Error, StoreError."""
    connection = _connect(path, mode, _READ_WAIT_S)
    try:
        if not _checked_format(connection, path):
            raise sqlite3.OperationalError(f"{path} is empty")
    except BaseException:
        connection.close()
        raise
    return connection


def _checked_format(connection: sqlite3.Connection, path: Path) -> int:
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


def _statements(script: str) -> Iterator[str]:
    """The statements of a schema; executescript would commit the transaction that surrounds it."""
    statement = ""
    for line in script.splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


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
