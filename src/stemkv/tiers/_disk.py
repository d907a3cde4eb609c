"""Where a block's file is, and the system calls that read, write and move it. Everything raises OSError."""

# Block paths are strings: one is built for every block that is read.
# ruff: noqa: PTH103, PTH104, PTH108, PTH120

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from stemkv.block import BlockError
from stemkv.misses import Cause

PAGE = 4096
QUARANTINE_FILES = 8
"""How many files that did not verify are kept for a look; older ones are deleted."""
SUFFIX = ".safetensors"


class Folder:
    """The names inside one store folder; see file.py for the picture."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.blocks = root / "blocks"
        self.manifest = root / "manifest.sqlite3"
        self.quarantine = root / "quarantine"
        self._prefix = f"{self.blocks}{os.sep}"

    def file(self, key: bytes) -> str:
        """Path of the block file of ``key``; a string, because it is built for every block that is read."""
        digits = key.hex()
        return f"{self._prefix}{digits[:2]}{os.sep}{digits}{SUFFIX}"

    def key_of(self, folder: str, name: str) -> bytes | None:
        """The key that file ``name`` in ``blocks/folder`` stands for, None if it is no block's name."""
        digits = name.removesuffix(SUFFIX)
        if digits == name or len(digits) != 64 or digits[:2] != folder or digits != digits.lower():
            return None
        try:
            return bytes.fromhex(digits)
        except ValueError:
            return None

    def free_bytes(self) -> int:
        """Bytes of the file system that this user may still write."""
        info = os.statvfs(self.root)
        return info.f_bavail * info.f_frsize

    def set_aside(self, key: bytes, cause: Cause) -> None:
        """Move a block file into quarantine and delete the oldest there; a file that is gone already is fine."""
        with contextlib.suppress(FileNotFoundError):
            self.quarantine.mkdir(mode=0o700, exist_ok=True)
            name = f"{key.hex()}-{cause.value}-{secrets.token_hex(4)}"
            os.rename(self.file(key), self.quarantine / name)
        with contextlib.suppress(OSError):  # another process may be tidying up too
            kept = sorted(os.scandir(self.quarantine), key=lambda e: e.stat(follow_symlinks=False).st_mtime)
            for old in kept[:-QUARANTINE_FILES]:
                remove(old.path)


def on_disk(size: int) -> int:
    """Bytes a file of ``size`` occupies, in whole pages, as ``du`` counts."""
    return -(-size // PAGE) * PAGE


def open_regular(path: str) -> tuple[int, int]:
    """(descriptor, size) of a regular file. Raises BlockError for a link, a pipe, a folder; never waits for a peer."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a symbolic link, a socket
            raise BlockError(Cause.BAD_HEADER, "not a regular file") from None
        raise
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        os.close(fd)
        raise BlockError(Cause.BAD_HEADER, "not a regular file")
    return fd, info.st_size


def read_file(path: str, data: memoryview) -> None:
    """Fill ``data`` from a file of exactly its size. Raises BlockError for any other size."""
    fd, found = open_regular(path)
    try:
        if found != len(data):
            raise BlockError(Cause.BAD_SIZE, f"{found} bytes, not {len(data)}")
        done = os.preadv(fd, (data,), 0)
        while done < len(data):
            got = os.preadv(fd, (data[done:],), done)
            if not got:
                raise BlockError(Cause.BAD_SIZE, f"file ended after {done} bytes")
            done += got
    finally:
        os.close(fd)


def write_file(path: Path, parts: Sequence[memoryview | bytes], *, sync: bool) -> None:
    """Write a new file with ``parts``; ``sync`` waits until it is on the medium."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        left = [memoryview(part) for part in parts]
        while left:
            done = os.writev(fd, left)
            if done <= 0:
                raise OSError(errno.EIO, "nothing was written")
            while left and done >= len(left[0]):
                done -= len(left.pop(0))
            if left:
                left[0] = left[0][done:]
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)


def publish(source: Path, target: str) -> None:
    """Give a finished file its name; makes the folder when it is not there yet."""
    try:
        os.rename(source, target)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
        os.rename(source, target)


def take_back(target: str, source: Path) -> None:
    """Undo :func:`publish`; where that fails the file is removed, so that none is left without a row."""
    try:
        os.rename(target, source)
    except OSError:
        remove(target)
        raise


def remove(path: str | Path) -> None:
    """Delete a file; one that is gone already is fine."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def sync(paths: Iterable[str | Path]) -> None:
    """Wait until these files or folders are on the medium."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
