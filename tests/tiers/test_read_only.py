"""Folders that cannot be written are served, with one warning."""

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stemkv.errors import StoreError
from stemkv.misses import Cause, Miss
from stemkv.testing import samples
from stemkv.testing.samples import Collector

from .harness import KEYS, REFS, alter_file, block_files, hits, opened, stored, warnings

NOBODY = 65534


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A folder that every user may enter, but only root may write."""
    with tempfile.TemporaryDirectory(prefix="stemkv-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name) / "store"


def share(root: Path) -> None:
    for path in [root, *root.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)


def as_nobody(work: Callable[[], None]) -> None:
    os.seteuid(NOBODY)
    try:
        work()
    finally:
        os.seteuid(0)


def check_read_only(root: Path, expected_hits: int, caplog: pytest.LogCaptureFixture) -> None:
    tier = opened(root)
    assert tier.read_only
    assert tier.stats().read_only
    assert hits(tier) == expected_hits
    assert tier.contains(KEYS).count(True) == expected_hits
    new = samples.refs(samples.chain(1, seed=9))
    for _ in range(3):
        assert tier.put(samples.records(new)) == [Miss(Cause.READ_ONLY)]
    assert tier.delete(KEYS) == 0
    tier.touch(KEYS)
    tier.explain(new[0])
    assert len(warnings(caplog)) == 1, warnings(caplog)
    assert str(root) in warnings(caplog)[0]
    assert "cannot be written" in warnings(caplog)[0]
    tier.close()


def test_a_folder_of_another_user_is_served_read_only(open_to_all: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored(open_to_all)
    share(open_to_all)
    as_nobody(lambda: check_read_only(open_to_all, 6, caplog))
    assert len(block_files(open_to_all)) == 6


def test_a_folder_of_another_user_without_a_manifest_is_empty(
    open_to_all: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_to_all.mkdir()
    share(open_to_all)
    as_nobody(lambda: check_read_only(open_to_all, 0, caplog))


def test_a_folder_that_cannot_be_made_is_refused_by_name(open_to_all: Path) -> None:
    def work() -> None:
        with pytest.raises(StoreError, match=r"cannot create the store folder .*Permission denied"):
            opened(open_to_all)

    as_nobody(work)


def test_a_folder_that_may_not_be_entered_is_refused_by_name(open_to_all: Path) -> None:
    stored(open_to_all / "private")
    open_to_all.chmod(0o700)

    def work() -> None:
        with pytest.raises(StoreError, match=r"cannot create the store folder .*private: Permission denied"):
            opened(open_to_all / "private")

    as_nobody(work)


def test_a_folder_that_becomes_writable_is_written(open_to_all: Path) -> None:
    stored(open_to_all)
    share(open_to_all)

    def work() -> None:
        tier = opened(open_to_all)
        assert tier.stats().read_only
        os.seteuid(0)
        assert tier.put(samples.records(samples.refs(samples.chain(1, seed=9)))) == [None]
        assert not tier.read_only
        tier.close()

    as_nobody(work)


@pytest.fixture
def read_only_mount(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """(a folder, the same folder mounted read-only)."""
    real, view = tmp_path / "real", tmp_path / "view"
    real.mkdir()
    view.mkdir()
    subprocess.run(["mount", "--bind", str(real), str(view)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(view)], check=True)
    yield real, view
    subprocess.run(["umount", "--lazy", str(view)], check=True)


def test_a_read_only_mount_is_served_also_to_root(
    read_only_mount: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    real, view = read_only_mount
    stored(real)
    check_read_only(view, 6, caplog)


def test_a_read_only_mount_without_a_manifest_is_empty(
    read_only_mount: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    check_read_only(read_only_mount[1], 0, caplog)


@pytest.mark.parametrize("writer_first", [True, False])
def test_a_read_only_reader_sees_what_a_writer_adds(
    read_only_mount: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, writer_first: bool
) -> None:
    monkeypatch.setattr("stemkv.tiers.index._REFRESH_S", 0.0)
    real, view = read_only_mount
    stored(real)
    writer = opened(real) if writer_first else None
    reader = opened(view)
    writer = writer or opened(real)
    more = samples.refs(samples.chain(3, seed=5))
    writer.put(samples.records(more))
    assert reader.contains([r.key for r in more]) == [True] * 3
    assert reader.get(more, Collector(), sealer=samples.PLAIN) == [None] * 3
    writer.delete([r.key for r in more])
    assert reader.contains([r.key for r in more]) == [False] * 3
    writer.close()
    assert hits(reader) == 6
    reader.close()


def test_a_bad_block_in_a_read_only_folder_is_counted_and_not_offered_again(
    read_only_mount: tuple[Path, Path],
) -> None:
    real, view = read_only_mount
    stored(real)
    writer = opened(real)
    alter_file(writer, REFS[2], lambda raw: raw[:-1] + b"?")
    writer.close()
    reader = opened(view)
    assert hits(reader) == 5
    assert reader.contains(KEYS) == [True, True, False, True, True, True]
    assert reader.stats().quarantined == 1
    reader.close()
