"""The file tier's index: one SQLite database in WAL mode, shared by all processes that use the folder.

Counts, bytes and the number of blocks that need a block are kept by triggers, so that no reader ever has to scan.
Row and file are published and removed inside one write transaction (see file.py), which makes SQLite's write lock
the one lock of the folder.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from stemkv import policy
from stemkv.errors import StoreError, StoreFormatError
from stemkv.identity import Identity
from stemkv.keys import BlockRef, Namespace
from stemkv.tiers.explain import GHOSTS, KnownNamespace

FORMAT = 1
APPLICATION_ID = 0x73746B76  # "stkv"
_BUSY_MS = 30_000
"""How long a write waits for another process's transaction before it counts as a fault."""

_SCHEMA = """
CREATE TABLE namespaces (
  number INTEGER PRIMARY KEY, id BLOB NOT NULL UNIQUE, tenant BLOB NOT NULL, identity BLOB, generation INTEGER NOT NULL,
  blocks INTEGER NOT NULL DEFAULT 0);
CREATE TABLE blocks (
  key BLOB PRIMARY KEY, needs BLOB NOT NULL, namespace INTEGER NOT NULL, grp INTEGER NOT NULL, idx INTEGER NOT NULL,
  tokens_digest BLOB NOT NULL, size INTEGER NOT NULL, cost REAL NOT NULL, hits INTEGER NOT NULL,
  priority REAL NOT NULL, children INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX blocks_by_needs ON blocks (needs);
CREATE INDEX leaves ON blocks (priority) WHERE children = 0;
CREATE INDEX first_blocks ON blocks (tokens_digest) WHERE idx = 0;
CREATE TABLE totals (
  one INTEGER PRIMARY KEY CHECK (one = 1), blocks INTEGER NOT NULL, bytes INTEGER NOT NULL, clock REAL NOT NULL,
  evicted INTEGER NOT NULL, quarantined INTEGER NOT NULL);
INSERT INTO totals VALUES (1, 0, 0, 0.0, 0, 0);
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
    cost_s: float


class Manifest:
    """The database of one folder. Thread-safe: lookups and writes use a connection each, behind a lock each.

    Methods raise sqlite3.Error for faults; file.py turns them into misses.
    """

    def __init__(self, path: Path, *, durable: bool, read_only: bool = False) -> None:
        self.read_only = read_only
        self._read_lock, self._write_lock = threading.Lock(), threading.RLock()
        self._writer: sqlite3.Connection | None = None
        if not read_only:
            self._writer = self._connect(f"{path.as_uri()}?mode=rwc")
            self._create(path)
            self._writer.execute(f"PRAGMA synchronous={'NORMAL' if durable else 'OFF'}")
        self._reader = self._open_reader(path)
        self._check_format(path)

    @staticmethod
    def _connect(uri: str) -> sqlite3.Connection:
        connection = sqlite3.connect(
            uri, uri=True, timeout=_BUSY_MS / 1000, isolation_level=None, check_same_thread=False
        )
        connection.execute(f"PRAGMA busy_timeout={_BUSY_MS}")
        return connection

    def _create(self, path: Path) -> None:
        connection = self._require_writer()
        self._check_format(path, connection)
        if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            connection.execute("PRAGMA journal_mode=WAL")
        if connection.execute("PRAGMA user_version").fetchone()[0] == 0:
            with self.transaction():
                if connection.execute("PRAGMA user_version").fetchone()[0] == 0:
                    for statement in _statements(_SCHEMA):
                        connection.execute(statement)
                    connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
                    connection.execute(f"PRAGMA user_version={FORMAT}")

    def _open_reader(self, path: Path) -> sqlite3.Connection:
        try:
            reader = self._connect(f"{path.as_uri()}?mode=ro")
            reader.execute("SELECT count(*) FROM totals").fetchone()
        except sqlite3.OperationalError:
            if not self.read_only:
                raise
            # A folder without write permission and without a live writer: no shared memory file can be made.
            reader = self._connect(f"{path.as_uri()}?mode=ro&immutable=1")
        return reader

    def _check_format(self, path: Path, connection: sqlite3.Connection | None = None) -> None:
        connection = connection or self._reader
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version > FORMAT:
            raise StoreFormatError(
                f"the store {path.parent} has format {version}, written by a newer stemkv; this one reads up to "
                f"format {FORMAT}: upgrade stemkv or name another folder"
            )
        if connection.execute("PRAGMA application_id").fetchone()[0] not in (0, APPLICATION_ID):
            raise StoreError(f"{path} is not a stemkv manifest: name another folder")

    def _require_writer(self) -> sqlite3.Connection:
        if self._writer is None:
            raise sqlite3.OperationalError("attempt to write a readonly database")
        return self._writer

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """One write transaction; commits at the end, rolls back on any exception."""
        with self._write_lock:
            connection = self._require_writer()
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                raise

    def close(self) -> None:
        with self._write_lock, self._read_lock:
            for connection in (self._reader, self._writer):
                if connection is not None:
                    connection.close()

    # -- lookups -------------------------------------------------------------------------------------------

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        found: set[bytes] = set()
        with self._read_lock:
            for at in range(0, len(keys), 1024):
                share = keys[at : at + 1024]
                marks = ",".join("?" * len(share))
                found.update(
                    row[0]
                    for row in self._reader.execute(f"SELECT key FROM blocks WHERE key IN ({marks})", share)  # noqa: S608
                )
        return [key in found for key in keys]

    def query(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """A read outside any transaction."""
        with self._read_lock:
            return self._reader.execute(sql, values).fetchall()

    def totals(self) -> tuple[int, int, int, int]:
        """(blocks, bytes, evicted, quarantined) of all processes together."""
        with self._read_lock:
            row = self._reader.execute("SELECT blocks, bytes, evicted, quarantined FROM totals").fetchone()
        return row[0], row[1], row[2], row[3]

    def namespaces(self) -> list[KnownNamespace]:
        with self._read_lock:
            rows = self._reader.execute("SELECT id, tenant, identity, generation, blocks FROM namespaces").fetchall()
        return [KnownNamespace(i, t, _identity(raw), g, n) for i, t, raw, g, n in rows]

    # -- writes, inside a transaction ----------------------------------------------------------------------

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
    def insert(db: sqlite3.Connection, row: Row) -> bool:
        """Add a row; False if the key is there already."""
        clock = db.execute("SELECT clock FROM totals").fetchone()[0]
        children = db.execute("SELECT count(*) FROM blocks WHERE needs = ?", (row.key,)).fetchone()[0]
        rank = policy.priority(clock, 1, row.cost_s, row.size)
        done = db.execute("INSERT OR IGNORE INTO blocks VALUES (?,?,?,?,?,?,?,?,1,?,?)", (*row, rank, children))
        return done.rowcount == 1

    @staticmethod
    def delete(db: sqlite3.Connection, key: bytes) -> bool:
        return db.execute("DELETE FROM blocks WHERE key = ?", (key,)).rowcount == 1

    @staticmethod
    def touch(db: sqlite3.Connection, keys: Sequence[bytes]) -> None:
        clock = db.execute("SELECT clock FROM totals").fetchone()[0]
        for key in keys:
            row = db.execute("SELECT hits, cost, size FROM blocks WHERE key = ?", (key,)).fetchone()
            if row is not None:
                rank = policy.priority(clock, row[0] + 1, row[1], row[2])
                db.execute("UPDATE blocks SET hits = hits + 1, priority = ? WHERE key = ?", (rank, key))

    @staticmethod
    def cheapest_leaves(db: sqlite3.Connection, count: int) -> list[tuple[bytes, int, float]]:
        """(key, size, priority) of blocks that no other needs, lowest priority first."""
        return db.execute(
            "SELECT key, size, priority FROM blocks WHERE children = 0 ORDER BY priority LIMIT ?", (count,)
        ).fetchall()

    @staticmethod
    def note_evicted(db: sqlite3.Connection, key: bytes, priority: float) -> None:
        db.execute("UPDATE totals SET evicted = evicted + 1, clock = max(clock, ?)", (priority,))
        number = db.execute("INSERT OR REPLACE INTO ghosts (key) VALUES (?)", (key,)).lastrowid
        db.execute("DELETE FROM ghosts WHERE number <= ?", ((number or 0) - GHOSTS,))


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


def row_for(ref: BlockRef, namespace: int, size: int, cost_s: float) -> Row:
    """The manifest row of a record that is being stored."""
    return Row(ref.key, ref.needs, namespace, ref.group, ref.index, ref.tokens_digest, size, cost_s)
