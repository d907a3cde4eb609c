"""How a store folder is opened: made, repaired after a crash, refused, or served read-only."""

# os.path.exists and isdir, because those of Path raise where a folder may not be entered.
# ruff: noqa: PTH110, PTH112

from __future__ import annotations

import errno
import logging
import os
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from stemkv.errors import StoreError
from stemkv.misses import Miss
from stemkv.tiers import session
from stemkv.tiers._disk import Folder
from stemkv.tiers.base import io_miss
from stemkv.tiers.index import Index, damaged, fault
from stemkv.tiers.manifest import Manifest
from stemkv.tiers.repair import repair
from stemkv.tiers.session import Session

log = logging.getLogger("stemkv")


class Opened(NamedTuple):
    """What there is to work with. Without ``writer`` and ``session`` the folder is read-only, for ``why``."""

    reader: Index | None
    writer: Manifest | None = None
    session: Session | None = None
    why: Miss | None = None
    sentence: str = ""

    def close(self) -> None:
        """Release everything; never fails."""
        if self.reader is not None:
            with suppress(sqlite3.Error):
                self.reader.close()
        if self.session is not None:
            self.session.close()


def open_folder(folder: Folder, *, durability: str, suspect: bool = False) -> Opened:
    """Open ``folder`` for writing, or read-only where that is not possible.

    ``suspect`` asks for a thorough check of the manifest first. Raises StoreError for a folder that is not a stemkv
    store or cannot be made, StoreFormatError for one of a newer format. Waits while another process repairs it.
    """
    try:
        folder.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with session.opening(folder.root):
            return _open_writable(folder, durability, suspect=suspect)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTDIR) or not os.path.isdir(folder.root):
            raise _unusable(folder, error) from None
        return _open_read_only(folder, io_miss(error), error.strerror or str(error))
    except sqlite3.Error as error:
        if damaged(error) and not suspect:
            return open_folder(folder, durability=durability, suspect=True)
        return _open_read_only(folder, fault(error), f"{folder.manifest.name}: {error}")


def _unusable(folder: Folder, error: OSError) -> StoreError:
    parts = (folder.root, folder.blocks, folder.root / "sessions")
    where = next((p for p in parts if os.path.exists(p) and not os.path.isdir(p)), None)
    if where is not None:
        return StoreError(f"{where} is a file, not a folder: name another folder for the store")
    return StoreError(
        f"cannot create the store folder {folder.root}: {error.strerror}; name a folder that can be written"
    )


def _open_writable(folder: Folder, durability: str, *, suspect: bool) -> Opened:
    manifest = _open_manifest(folder, durability, suspect=suspect)
    mine = None
    try:
        folder.blocks.mkdir(mode=0o700, exist_ok=True)
        mine = Session(folder.root)
        others = session.others(folder.root, mine)
        boot = _boot_id()
        # A power cut can take the sessions too, so a new boot counts as an unclean end.
        lost_rows = suspect or manifest.new or manifest.boot() != boot
        if lost_rows or others.dead:
            _repair(folder, manifest, others, boot, adopt=lost_rows)
    except BaseException:
        Opened(manifest, session=mine).close()
        raise
    return Opened(manifest, manifest, mine)


def _open_manifest(folder: Folder, durability: str, *, suspect: bool) -> Manifest:
    if not folder.manifest.exists():
        _set_aside(folder)  # only its log may be left, of a manifest that others still hold open
    try:
        manifest = Manifest(folder.manifest, durability=durability)
        if manifest.intact(_boot_id(), suspect=suspect):
            return manifest
        manifest.close()
    except sqlite3.Error as error:
        if not damaged(error):
            raise
    # Not a sound database any more. The block files say everything that the manifest needs to know.
    log.warning("%s is damaged and is built anew from the block files", folder.manifest)
    _set_aside(folder)
    return Manifest(folder.manifest, durability=durability)


def _set_aside(folder: Folder) -> None:
    """Rename the manifest, its log first: that must never meet another database."""
    for suffix in ("-wal", "-shm", ""):
        with suppress(FileNotFoundError):
            Path(f"{folder.manifest}{suffix}").replace(f"{folder.manifest}.damaged{suffix}")


def _repair(folder: Folder, manifest: Manifest, others: session.Others, boot: str, *, adopt: bool) -> None:
    try:
        # Another live process may still hold the manifest that this one replaces and publish a file in it until it
        # notices: without a boot noted, the next to open the folder looks once more.
        fixed = repair(folder, manifest, "" if manifest.new and others.alive else boot, adopt=adopt)
    except (OSError, sqlite3.Error) as error:
        if isinstance(error, sqlite3.Error) and damaged(error):
            raise
        log.warning("could not repair %s (%s); its blocks are verified when they are read", folder.root, error)
        return
    session.forget(others.dead)
    if any(fixed):
        log.info("repaired %s: %s", folder.root, fixed)


def _open_read_only(folder: Folder, why: Miss, sentence: str) -> Opened:
    try:
        return Opened(Index(folder.manifest), why=why, sentence=sentence)
    except sqlite3.Error:
        return Opened(None, why=why, sentence=sentence)


def _boot_id() -> str:
    """Names this boot of the machine; empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
