"""A store folder as this process has it open now: what met a fault is opened anew, what is lost is noted."""

# Block paths are strings: one is built for every block that is read.

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from stemkv.errors import StoreError
from stemkv.misses import Cause, Miss
from stemkv.tiers._disk import Folder
from stemkv.tiers._opening import Opened, open_folder
from stemkv.tiers.base import io_miss
from stemkv.tiers.index import Index, damaged, fault
from stemkv.tiers.manifest import WRITE_WAIT_S, Manifest

log = logging.getLogger("stemkv")

_READ_PATH_WAIT_S = 0.05
"""Most that noting a lost block may wait for another writer, on the way of a request."""
_GONE = 4096
"""How many lost blocks are remembered until their rows can be removed."""


class Store:
    """The open folder. Thread-safe. Raises StoreError from the constructor only."""

    def __init__(self, folder: Folder, *, durability: str, retry_s: float) -> None:
        self.folder = folder
        self.closed = False
        self._durability, self._retry_s = durability, retry_s
        self._retry_at = 0.0
        self._suspect = False
        self._state_lock = threading.Lock()
        self._gone: dict[bytes, int] = {}
        """Blocks found lost or bad whose rows are still there, with how often each was quarantined."""
        self._gone_lock = threading.Lock()
        self.opened = Opened(None)
        self._open()
        _OPEN.add(self)

    @property
    def reader(self) -> Index | None:
        """The index, None when there is nothing to look up."""
        return None if self.closed else self.opened.reader

    @property
    def read_only(self) -> bool:
        return self.opened.session is None

    def refusal(self) -> Miss | None:
        """None when the folder can be written, after opening it anew if need be; else why it cannot."""
        with self._state_lock:
            if self.closed:
                return Miss(Cause.CLOSED)
            opened = self.opened
            if opened.writer is not None and opened.session is not None and not self._suspect:
                if opened.session.there() and not opened.writer.moved():
                    return None
                self._suspect = True  # somebody removed or replaced parts of the folder
            elif time.monotonic() < self._retry_at:
                return opened.why
            try:
                self._open()
            except StoreError as error:
                log.warning("%s: storing nothing", error)
                self.opened = Opened(None, why=Miss(Cause.READ_ONLY))
                self._retry_at = time.monotonic() + self._retry_s
            return self.opened.why

    def _open(self) -> None:
        """Open the folder anew, whatever is open now. Raises StoreError."""
        old, self.opened = self.opened, Opened(None)
        old.close()
        self.opened = open_folder(self.folder, durability=self._durability, suspect=self._suspect)
        self._suspect = False
        if self.opened.why is None:
            if old.why is not None:
                log.info("%s can be written again", self.folder.root)
            return
        self._retry_at = time.monotonic() + self._retry_s
        if old.why is None:
            log.warning(
                "%s cannot be written (%s): serving what is stored there, storing nothing",
                self.folder.root,
                self.opened.sentence,
            )

    def note(self, error: OSError | sqlite3.Error) -> Miss:
        """The miss for ``error``; a broken manifest is checked and built anew by the next write."""
        if isinstance(error, OSError):
            return io_miss(error)
        self._suspect = self._suspect or damaged(error)
        return fault(error)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Swallow faults of the folder."""
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            log.debug("%s: %s", self.folder.root, self.note(error))

    @contextmanager
    def transaction(
        self, wait_s: float = WRITE_WAIT_S, undo: Callable[[], None] | None = None
    ) -> Iterator[sqlite3.Connection]:
        """A write transaction, which also removes the rows of blocks found lost since the last one.

        Waits up to ``wait_s`` for other writers; ``undo`` runs before a rollback. Raises OSError, sqlite3.Error.
        """
        writer = self.opened.writer
        if writer is None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        with self._gone_lock:
            gone = dict(self._gone)
        with writer.transaction(wait_s, undo) as db:
            for key, quarantined in gone.items():
                if not os.path.lexists(self.folder.file(key)):
                    Manifest.delete(db, key)
                db.execute("UPDATE totals SET quarantined = quarantined + ?", (quarantined,))
            yield db
        with self._gone_lock:
            for key, quarantined in gone.items():
                left = self._gone.pop(key, 0) - quarantined
                if left > 0:  # found bad once more in the meantime
                    self._gone[key] = left

    def lost(self, key: bytes, *, quarantined: int) -> None:
        """Take a block without a good file out of use now, and out of the manifest when it can be written."""
        with self._gone_lock:
            if len(self._gone) < _GONE or key in self._gone:
                self._gone[key] = self._gone.get(key, 0) + quarantined
        if self.refusal() is None:
            with self.noting(), self.transaction(_READ_PATH_WAIT_S):
                pass

    def without_gone(self, keys: set[bytes]) -> set[bytes]:
        """``keys`` less those that were found lost."""
        if not self._gone:
            return keys
        with self._gone_lock:
            return keys.difference(self._gone)

    def unreported(self) -> int:
        """Quarantined blocks that the manifest does not count yet."""
        with self._gone_lock:
            return sum(self._gone.values())

    def close(self) -> None:
        with self._state_lock:
            if not self.closed:
                self.closed = True
                _OPEN.discard(self)
                self.opened.close()

    def abandon(self) -> None:
        """In a forked child: let go of what belongs to the parent, whose locks SQLite would get wrong here."""
        self.closed = True
        self._state_lock, self._gone_lock = threading.Lock(), threading.Lock()
        _ABANDONED.append(self.opened)
        if self.opened.session is not None:
            self.opened.session.drop()
        self.opened = Opened(None)


_OPEN: weakref.WeakSet[Store] = weakref.WeakSet()
_ABANDONED: list[Opened] = []
"""Connections of the parent, kept so that they are not closed in a child."""


def _after_fork() -> None:
    with suppress(RuntimeError):  # another thread was opening a store at the moment of the fork
        for store in list(_OPEN):
            store.abandon()


os.register_at_fork(after_in_child=_after_fork)
