"""Without room the file tier serves what it has, stores nothing, says so once, and recovers."""

import errno
import logging
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from stemkv.keys import Namespace
from stemkv.misses import Cause, Miss
from stemkv.testing import samples
from stemkv.testing.samples import Collector
from stemkv.tiers import _disk
from stemkv.tiers.file import FileTier

from .harness import check_consistent, leftovers

NO_SPACE = Miss(Cause.NO_SPACE)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 12 MiB: enough for the log of the manifest, which takes up to 4 MiB."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(tmp_path)], check=True)
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def fill(disk: Path, leave: int = 0) -> Path:
    """Fill the file system up to ``leave`` bytes."""
    path = disk / "somebody-elses-file"
    info = os.statvfs(disk)
    path.write_bytes(bytes(max(0, info.f_bavail * info.f_frsize - leave)))
    return path


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_full_disk_serves_stores_nothing_and_recovers(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = FileTier(small_disk / "store", max_bytes=1 << 24, reserve_bytes=0, retry_s=0.0)
    refs = samples.refs(samples.chain(6))
    assert tier.put(samples.records(refs[:3])) == [None] * 3
    tier.lease([r.key for r in refs])  # so that nothing can be given up for the new ones
    other = fill(small_disk)
    for _ in range(3):
        assert tier.put(samples.records(refs)) == [None] * 3 + [NO_SPACE] * 3
        assert tier.get(refs[:3], Collector(), sealer=samples.PLAIN) == [None] * 3
    assert len(warnings(caplog)) == 1
    assert "no room left" in warnings(caplog)[0]
    assert not leftovers(tier.path)
    other.unlink()
    assert tier.put(samples.records(refs)) == [None] * 6
    assert tier.get(refs, Collector(), sealer=samples.PLAIN) == [None] * 6
    check_consistent(tier)
    tier.close()


def test_a_full_disk_is_left_alone_for_a_while(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = FileTier(small_disk / "store", max_bytes=1 << 24, reserve_bytes=0, retry_s=60.0)
    refs = samples.refs(samples.chain(2))
    other = fill(small_disk)
    assert tier.put(samples.records(refs)) == [NO_SPACE] * 2
    other.unlink()
    assert tier.put(samples.records(refs)) == [NO_SPACE] * 2, "the pause is not over"
    monkeypatch.setattr(tier, "_full_until", 0.0)
    assert tier.put(samples.records(refs)) == [None] * 2
    tier.close()


def test_a_store_larger_than_its_disk_evicts_and_goes_on(small_disk: Path) -> None:
    tier = FileTier(small_disk / "store", max_bytes=1 << 30, reserve_bytes=0, retry_s=0.0)
    space = Namespace(samples.identity(payload_bytes=200_000))
    for seed in range(60):
        assert tier.put(samples.records(samples.refs(samples.chain(2, seed=seed, of=space)))) == [None, None], seed
    assert tier.stats().evicted > 0
    check_consistent(tier)
    tier.close()


def test_opened_on_a_full_disk_it_serves_and_recovers(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    refs = samples.refs(samples.chain(4))
    tier = FileTier(small_disk / "store", max_bytes=1 << 24, reserve_bytes=0)
    tier.put(samples.records(refs[:2]))
    tier.close()
    # Small files fill up what is left: not even a lock fits.
    other = fill(small_disk)
    tier = FileTier(small_disk / "store", max_bytes=1 << 24, reserve_bytes=0, retry_s=0.0)
    assert tier.get(refs[:2], Collector(), sealer=samples.PLAIN) == [None] * 2
    assert tier.contains([r.key for r in refs]) == [True, True, False, False]
    for _ in range(2):
        results = tier.put(samples.records(refs))
        assert results[2] is not None
        assert results[3] is not None
    assert len(warnings(caplog)) == 1
    other.unlink()
    assert tier.put(samples.records(refs)) == [None] * 4
    assert not tier.read_only
    check_consistent(tier)
    tier.close()


def test_a_new_store_on_a_full_disk_starts_empty_and_recovers(small_disk: Path) -> None:
    (small_disk / "store").mkdir()
    other = fill(small_disk)
    tier = FileTier(small_disk / "store", max_bytes=1 << 24, reserve_bytes=0, retry_s=0.0)
    refs = samples.refs(samples.chain(2))
    assert None not in tier.put(samples.records(refs))
    assert tier.contains([r.key for r in refs]) == [False, False]
    other.unlink()
    assert tier.put(samples.records(refs)) == [None, None]
    tier.close()


def test_the_reserve_is_left_free_and_the_store_is_not_emptied_for_it(small_disk: Path) -> None:
    tier = FileTier(small_disk / "store", max_bytes=1 << 24, reserve_bytes=0)
    space, size = Namespace(samples.identity(payload_bytes=204_800 - 4096)), 204_800
    refs = samples.refs(samples.chain(8, of=space))
    tier.put(samples.records(refs))
    tier.close()
    tier = FileTier(small_disk / "store", max_bytes=1 << 24, reserve_bytes=1 << 30, retry_s=0.0)
    more = samples.refs(samples.chain(2, seed=1, of=space))
    assert tier.put(samples.records(more)) == [NO_SPACE] * 2
    assert tier.get(refs, Collector(), sealer=samples.PLAIN) == [None] * 8
    tier.close()
    # A reserve that can be had: blocks give way to it.
    fill(small_disk, leave=5 * size)
    tier = FileTier(small_disk / "store", max_bytes=1 << 24, reserve_bytes=6 * size, retry_s=0.0)
    assert tier.put(samples.records(more[:1])) == [None]
    assert _disk.Folder(tier.path).free_bytes() >= 6 * size
    check_consistent(tier)
    tier.close()


def test_a_limit_on_file_size_refuses_large_blocks_only(tmp_path: Path) -> None:
    tier = FileTier(tmp_path / "store", max_bytes=1 << 24, reserve_bytes=0, retry_s=60.0)
    large = samples.chain(1, of=Namespace(samples.identity(payload_bytes=2_000_000))).ref(0, 0)
    small = samples.refs(samples.chain(2))
    tier.put(samples.records(small[:1]))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        assert tier.put(samples.records([large, small[1]])) == [NO_SPACE, None]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert tier.get(small, Collector(), sealer=samples.PLAIN) == [None, None], "nothing was evicted for it"
    assert tier.put(samples.records([large])) == [None]
    check_consistent(tier)
    tier.close()


def test_short_writes_are_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writev = os.writev

    def short(fd: int, parts: list[memoryview]) -> int:
        first = next(p for p in parts if len(p))
        return writev(fd, [first[:1000]])

    tier = FileTier(tmp_path / "store", max_bytes=1 << 24, reserve_bytes=0)
    refs = samples.refs(samples.chain(3))
    monkeypatch.setattr(os, "writev", short)
    assert tier.put(samples.records(refs)) == [None] * 3
    monkeypatch.undo()
    assert tier.get(refs, Collector(), sealer=samples.PLAIN) == [None] * 3
    tier.close()


def test_a_write_that_makes_no_progress_is_a_fault_not_a_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = FileTier(tmp_path / "store", max_bytes=1 << 24, reserve_bytes=0)
    monkeypatch.setattr(os, "writev", lambda *_: 0)
    assert tier.put(samples.records(samples.refs(samples.chain(1)))) == [Miss(Cause.IO_ERROR, "EIO")]
    assert not leftovers(tier.path)
    tier.close()


def test_short_reads_are_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv

    def short(fd: int, parts: list[memoryview], offset: int) -> int:
        return preadv(fd, [parts[0][:777]], offset)

    tier = FileTier(tmp_path / "store", max_bytes=1 << 24, reserve_bytes=0)
    refs = samples.refs(samples.chain(3))
    tier.put(samples.records(refs))
    monkeypatch.setattr(os, "preadv", short)
    assert tier.get(refs, Collector(), sealer=samples.PLAIN) == [None] * 3
    tier.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EMFILE])
def test_a_disk_that_cannot_be_read_is_a_miss_and_nothing_is_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    tier = FileTier(tmp_path / "store", max_bytes=1 << 24, reserve_bytes=0)
    refs = samples.refs(samples.chain(2))
    tier.put(samples.records(refs))

    def fail(*_: object) -> int:
        raise OSError(number, "injected")

    monkeypatch.setattr(os, "preadv", fail)
    assert tier.get(refs, Collector(), sealer=samples.PLAIN) == [Miss(Cause.IO_ERROR, errno.errorcode[number])] * 2
    monkeypatch.undo()
    assert tier.get(refs, Collector(), sealer=samples.PLAIN) == [None, None]
    assert tier.stats().quarantined == 0
    tier.close()
