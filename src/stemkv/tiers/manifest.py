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
from typing import NamedTuple

import msgspec

from stemkv import policy
from stemkv.keys import BlockRef, Namespace
from stemkv.tiers.explain import GHOSTS
from stemkv.tiers.index import APPLICATION_ID, FORMAT, Index, checked_format, connect, damaged

WRITE_WAIT_S = 30.0
"""How long a background write waits for another process's transaction before it counts as a fault."""

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


class Manifest(Index):
    """The index with a connection of its own for writes, so that lookups never wait for this process's writes."""

    def __init__(self, path: Path, *, durability: str = "none") -> None:
        self._write_lock = threading.Lock()
        self._writer = connect(path, "rwc", WRITE_WAIT_S)
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
        if checked_format(self._writer, path):
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


def row_for(ref: BlockRef, namespace: int, size: int, cost_s: float) -> Row:
    """The manifest row of a record that is being stored."""
    return Row(ref.key, ref.needs, namespace, ref.group, ref.index, ref.tokens_digest, size, cost_s)


def _statements(script: str) -> Iterator[str]:
    """The statements of a schema; executescript would commit the transaction that surrounds it."""
    statement = ""
    for line in script.splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
