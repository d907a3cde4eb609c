"""Bring a folder's files and its manifest into agreement after a crash or a damaged manifest."""

from __future__ import annotations

import os
import sqlite3
import struct
from pathlib import Path
from typing import NamedTuple

import msgspec

from stemkv import block
from stemkv.block import BlockError
from stemkv.tiers.manifest import Manifest, Row

_LARGEST_HEADER = 1 << 20
"""No header of ours is larger; checked before anything is allocated."""


class Repaired(NamedTuple):
    """What a repair changed."""

    adopted: int = 0
    """Files that had no row and are good block files by their header."""
    removed_files: int = 0
    """Files that had no row and are not."""
    removed_rows: int = 0
    """Rows whose file is gone."""


def repair(blocks: Path, manifest: Manifest) -> Repaired:
    """Adopt or remove files without a row, remove rows without a file, recount. Raises OSError, sqlite3.Error.

    Runs under the manifest's write lock, so other processes may be at work. Adopted files are verified when read,
    like all others.
    """
    adopted = removed = lost = 0
    with manifest.transaction() as db:
        rows = {bytes(key): False for (key,) in db.execute("SELECT key FROM blocks")}
        for path, key in _files(blocks):
            if key is not None and key in rows:
                rows[key] = True
                continue
            row = _row(db, path) if key is not None else None
            if row is not None and row.key == key and Manifest.insert(db, row):
                adopted += 1
            else:
                path.unlink(missing_ok=True)
                removed += 1
        for key in [key for key, seen in rows.items() if not seen]:
            lost += Manifest.delete(db, key)
    return Repaired(adopted, removed, lost)


def _files(blocks: Path) -> list[tuple[Path, bytes | None]]:
    """Everything in the block folders, with the key its name stands for, None if it is no block's name."""
    found: list[tuple[Path, bytes | None]] = []
    with os.scandir(blocks) as folders:
        for folder in [f for f in folders if f.is_dir(follow_symlinks=False)]:
            with os.scandir(folder) as entries:
                for entry in entries:
                    stem, _, suffix = entry.name.partition(".")
                    good = suffix == "safetensors" and len(stem) == 64 and stem[:2] == folder.name
                    try:
                        found.append((Path(entry.path), bytes.fromhex(stem) if good else None))
                    except ValueError:
                        found.append((Path(entry.path), None))
    return found


def _row(db: sqlite3.Connection, path: Path) -> Row | None:
    """The row for a block file, read from its header; None if it is not a whole block file."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if not 0 < length <= _LARGEST_HEADER:
                return None
            meta, tensors = block.parse_header(file.read(length))
            size = os.fstat(file.fileno()).st_size
        if size != 8 + length + max(t["data_offsets"][1] for t in tensors.values()):
            return None
        group, tokens = int(meta.group), int(meta.tokens)
        number = db.execute(
            "INSERT INTO namespaces (id, tenant, generation) VALUES (?, x'', ?) "
            "ON CONFLICT (id) DO UPDATE SET generation = excluded.generation RETURNING number",
            (bytes.fromhex(meta.namespace), int(meta.generation)),
        ).fetchone()[0]
        needs = bytes.fromhex(meta.anchor if group else meta.parent)
        return Row(
            bytes.fromhex(meta.key), needs, number, group, int(meta.first_token) // tokens,
            bytes.fromhex(meta.tokens_digest), -(-size // 4096) * 4096, float(meta.cost),
        )  # fmt: skip
    except (
        OSError,
        BlockError,
        struct.error,
        msgspec.MsgspecError,
        ValueError,
        KeyError,
        TypeError,
        ZeroDivisionError,
    ):
        return None
