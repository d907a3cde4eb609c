"""Bring a folder's files and its manifest into agreement after a crash or a damaged manifest."""

from __future__ import annotations

import os
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from stemkv import block
from stemkv.block import BlockError, Metadata
from stemkv.tiers._disk import Folder, on_disk, open_regular, remove
from stemkv.tiers.manifest import Manifest, Row

_MAX_NUMBER = 2**63 - 1


class Repaired(NamedTuple):
    """What a repair changed."""

    adopted: int = 0
    """Files that had no row and are good block files by their header."""
    removed_files: int = 0
    """Files with a block's name that had no row and were not adopted."""
    removed_rows: int = 0
    """Rows whose file is gone."""


def repair(folder: Folder, manifest: Manifest, boot: str, *, adopt: bool) -> Repaired:
    """Adopt or remove files without a row, remove rows without a file, recount. Raises OSError, sqlite3.Error.

    Without ``adopt`` every file without a row is removed: after the end of a process alone these are files of a put
    that nobody was told about, and the room they take may be in use again.

    Runs under the manifest's write lock, so other processes may be at work. Adopted files are verified when read,
    like all others. Only names that a block file can have are touched. ``boot`` is noted as the boot of the machine
    in which files and rows agree.
    """
    adopted = removed = lost = 0
    with manifest.transaction() as db:
        missing = {bytes(key) for (key,) in db.execute("SELECT key FROM blocks")}
        for path, key in _block_files(folder):
            if key in missing:
                missing.discard(key)
            elif adopt and _adopt(db, path, key):
                adopted += 1
            else:
                _discard(path)
                removed += 1
        for key in missing:
            lost += Manifest.delete(db, key)
        Manifest.recount(db)
        db.execute("UPDATE totals SET boot = ?", (boot,))
    return Repaired(adopted, removed, lost)


def _block_files(folder: Folder) -> Iterator[tuple[str, bytes]]:
    """Everything in the block folders that has a block's name."""
    with os.scandir(folder.blocks) as groups:
        for group in [g for g in groups if g.is_dir(follow_symlinks=False)]:
            with os.scandir(group) as entries:
                for entry in entries:
                    key = folder.key_of(group.name, entry.name)
                    if key is not None:
                        yield entry.path, key


def _adopt(db: sqlite3.Connection, path: str, key: bytes) -> bool:
    """Enter a block file that has no row; False if it is not a whole block file of that name."""
    try:
        meta, size = _read_header(path)
        needs = meta.anchor if _number(meta.group) else meta.parent
        row = Row(
            _digest(meta.key),
            _digest(needs),
            Manifest.bare_namespace_number(db, _digest(meta.namespace), _number(meta.generation)),
            _number(meta.group),
            _number(meta.first_token) // max(1, _number(meta.tokens)),
            _digest(meta.tokens_digest),
            on_disk(size),
            float(meta.cost),
        )
    except (OSError, BlockError, ValueError, KeyError, TypeError, struct.error):
        return False
    return row.key == key and Manifest.insert(db, row)


def _read_header(path: str) -> tuple[Metadata, int]:
    """Metadata and size of a whole block file. Raises OSError, BlockError or ValueError for anything else."""
    fd, size = open_regular(path)
    try:
        (length,) = struct.unpack("<Q", os.pread(fd, 8, 0))
        if not 0 < length <= block.MAX_HEADER_BYTES:
            raise ValueError("header length")
        meta, tensors = block.parse_header(os.pread(fd, length, 8))
    finally:
        os.close(fd)
    if size != 8 + length + max(t["data_offsets"][1] for t in tensors.values()):
        raise ValueError("size")
    return meta, size


def _number(text: str) -> int:
    """A decimal from a header. Raises ValueError if it is none, or not one that SQLite can hold."""
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= _MAX_NUMBER):
        raise ValueError("number")
    return int(text)


def _digest(text: str) -> bytes:
    raw = bytes.fromhex(text)
    if len(raw) != 32:
        raise ValueError("digest")
    return raw


def _discard(path: str) -> None:
    try:
        remove(path)
    except OSError:  # a folder with a block's name: not ours to empty, but out of the way
        Path(path).rename(f"{path}.not-a-block")
