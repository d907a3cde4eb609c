"""What each mode of durability syncs, and when: before a name is given, before put returns."""

import errno
import os
import sqlite3
from pathlib import Path

import pytest

from stemkv.misses import Cause, Miss
from stemkv.testing import samples
from stemkv.testing.samples import Collector
from stemkv.tiers.file import FileTier
from stemkv.tiers.manifest import Manifest

from .harness import block_files, check_consistent, leftovers

REFS = samples.refs(samples.chain(4))


class Log:
    """The syncs and renames of this process, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def of(self, kind: str) -> list[str]:
        return [name for what, name in self.calls if what == kind]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log, fsync, rename = Log(), os.fsync, os.rename

    def logged_fsync(fd: int) -> None:
        log.calls.append(("sync", Path(os.readlink(f"/proc/self/fd/{fd}")).suffix or "folder"))
        fsync(fd)

    def logged_rename(source: object, target: object) -> None:
        log.calls.append(("rename", Path(str(target)).suffix))
        rename(source, target)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(os, "rename", logged_rename)
    return log


def put(root: Path, durability: str) -> FileTier:
    tier = FileTier(root, max_bytes=1 << 24, reserve_bytes=0, durability=durability)
    assert tier.put(samples.records(REFS)) == [None] * 4
    return tier


def synchronous(tier: FileTier) -> int:
    writer = tier._store.opened.writer
    assert writer is not None
    return int(writer._writer.execute("PRAGMA synchronous").fetchone()[0])


def test_none_leaves_it_to_the_kernel(tmp_path: Path, log: Log) -> None:
    tier = put(tmp_path, "none")
    assert log.of("sync") == []
    assert synchronous(tier) == 0
    tier.close()


def test_batch_syncs_every_file_before_the_first_gets_its_name(tmp_path: Path, log: Log) -> None:
    tier = put(tmp_path, "batch")
    syncs = [i for i, call in enumerate(log.calls) if call == ("sync", ".tmp")]
    names = [i for i, call in enumerate(log.calls) if call == ("rename", ".safetensors")]
    assert len(syncs) == 4
    assert max(syncs) < min(names)
    assert synchronous(tier) == 1
    tier.close()


def test_full_syncs_files_folders_and_manifest_before_put_returns(tmp_path: Path, log: Log) -> None:
    tier = put(tmp_path, "full")
    folders = {name[:2] for name in block_files(tmp_path)}
    assert log.of("sync").count(".tmp") == 4
    assert log.of("sync").count("folder") == len(folders) + 1, "the folders of the files, and the one they are in"
    last_name = max(i for i, call in enumerate(log.calls) if call[0] == "rename")
    assert all(i > last_name for i, call in enumerate(log.calls) if call == ("sync", "folder"))
    assert synchronous(tier) == 2
    tier.close()


@pytest.mark.parametrize("durability", ["batch", "full"])
def test_a_sync_that_fails_is_a_failed_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: str) -> None:
    """After a failed fsync the kernel may have dropped the pages: the file must not be published."""
    tier = FileTier(tmp_path, max_bytes=1 << 24, reserve_bytes=0, durability=durability)

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "injected")

    monkeypatch.setattr(os, "fsync", fail)
    assert tier.put(samples.records(REFS)) == [Miss(Cause.IO_ERROR, "EIO")] * 4
    monkeypatch.undo()
    assert not block_files(tmp_path)
    assert not leftovers(tmp_path)
    check_consistent(tier)
    assert tier.put(samples.records(REFS)) == [None] * 4
    tier.close()


def test_a_folder_that_cannot_be_synced_takes_the_names_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = FileTier(tmp_path, max_bytes=1 << 24, reserve_bytes=0, durability="full")
    fsync = os.fsync

    def fail(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EIO, "injected")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", fail)
    assert tier.put(samples.records(REFS)) == [Miss(Cause.IO_ERROR, "EIO")] * 4
    assert not block_files(tmp_path)
    assert not leftovers(tmp_path)
    check_consistent(tier)
    tier.close()


def test_a_commit_that_finds_no_room_is_tried_once_more_after_making_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = FileTier(tmp_path, max_bytes=1 << 24, reserve_bytes=0)
    old = samples.refs(samples.chain(5, seed=8))
    assert tier.put(samples.records(old)) == [None] * 5
    monkeypatch.setattr("stemkv.tiers.file._LOG_BYTES", 8192)
    insert, calls = Manifest.insert, []

    def full_once(db: sqlite3.Connection, row: object) -> bool:
        calls.append(row)
        if len(calls) == 3:
            raise sqlite3.OperationalError("database or disk is full")
        return insert(db, row)  # type: ignore[arg-type]

    monkeypatch.setattr(Manifest, "insert", full_once)
    assert tier.put(samples.records(REFS)) == [None] * 4
    assert tier.get(REFS, Collector(), sealer=samples.PLAIN) == [None] * 4
    assert tier.stats().evicted > 0
    check_consistent(tier)
    tier.close()
