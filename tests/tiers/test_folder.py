"""Whatever is done to the files of a folder, with the tier open or closed: misses, and it recovers."""

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from stemkv.misses import Cause, Miss
from stemkv.testing import samples
from stemkv.testing.samples import Collector

from .harness import KEYS, REFS, check_consistent, file_of, hits, opened, stored


def test_block_files_deleted_by_hand_are_misses_and_can_be_stored_again(root: Path) -> None:
    stored(root)
    tier = opened(root)
    for ref in REFS[::2]:
        file_of(tier, ref).unlink()
    assert tier.put(samples.records(REFS[:1])) == [None], "a row without its file is not here"
    sink = Collector()
    results = tier.get(REFS, sink, sealer=samples.PLAIN)
    assert results == [None, None, Miss(Cause.EVICTED), None, Miss(Cause.EVICTED), None]
    assert tier.contains(KEYS) == [True, True, False, True, False, True]
    check_consistent(tier)
    assert tier.put(samples.records(REFS)) == [None] * 6
    assert hits(tier) == 6
    check_consistent(tier)
    tier.close()


def link(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


def dangling(path: Path, outside: Path) -> None:
    path.symlink_to(outside.parent / "nothing")


def pipe(path: Path, outside: Path) -> None:
    os.mkfifo(path)


def folder(path: Path, outside: Path) -> None:
    path.mkdir()
    (path / "file").write_text("mine")


def local_socket(path: Path, outside: Path) -> None:
    # A socket's name may be 107 bytes long: bind it under a short one.
    with tempfile.TemporaryDirectory() as short, socket.socket(socket.AF_UNIX) as sock:
        sock.bind(f"{short}/s")
        Path(f"{short}/s").rename(path)


def device(path: Path, outside: Path) -> None:
    subprocess.run(["mknod", str(path), "c", "1", "5"], check=True)  # /dev/zero


@pytest.mark.parametrize("make", [link, dangling, pipe, folder, local_socket, device], ids=lambda f: f.__name__)
@pytest.mark.parametrize("while_open", [True, False])
def test_what_is_no_regular_file_is_never_followed_or_waited_for(
    tmp_path: Path, make: Callable[[Path, Path], None], while_open: bool
) -> None:
    root, outside = tmp_path / "store", tmp_path / "outside"
    stored(root)
    tier = opened(root)
    path = file_of(tier, REFS[1])
    shutil.copy(path, outside)
    path.unlink()
    make(path, outside)
    if not while_open:
        tier.close()
        (root / "manifest.sqlite3").unlink()
        tier = opened(root)  # scans the folder
    assert hits(tier) == 5
    assert tier.contains(KEYS).count(True) == 5
    assert tier.put(samples.records(REFS)) == [None] * 6
    assert hits(tier) == 6
    assert outside.exists()
    assert file_of(tier, REFS[1]).is_file()
    tier.close()


def test_other_files_in_the_folder_are_left_alone(root: Path) -> None:
    stored(root)
    notes = [root / "README", root / "blocks" / "README", root / "blocks" / KEYS[0].hex()[:2] / "notes.txt"]
    upper = root / "blocks" / "ab"
    upper.mkdir(exist_ok=True)
    notes.append(upper / ("AB" * 32 + ".safetensors"))
    for note in notes:
        note.write_text("mine")
    (root / "manifest.sqlite3").unlink()
    tier = opened(root)
    assert hits(tier) == 6
    assert all(note.read_text() == "mine" for note in notes)
    tier.close()


@pytest.mark.parametrize("what", [".", "blocks", "sessions", "manifest.sqlite3", "quarantine", "lock"])
def test_parts_of_the_folder_removed_while_it_is_open_are_made_again(root: Path, what: str) -> None:
    tier = opened(root)
    tier.put(samples.records(REFS))
    path = root / what
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    for _ in range(2):
        assert len(tier.contains(KEYS)) == 6
        hits(tier)
        tier.touch(KEYS)
        tier.delete([KEYS[5]])
        tier.explain(REFS[0])
        tier.stats()
    assert tier.put(samples.records(REFS)) == [None] * 6
    assert hits(tier) == 6
    check_consistent(tier)
    tier.close()
    tier = opened(root)
    assert hits(tier) == 6
    check_consistent(tier)
    tier.close()


def test_a_folder_that_was_removed_and_cannot_be_made_is_read_only_without_exceptions(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = opened(root)
    tier.put(samples.records(REFS))
    shutil.rmtree(root)
    root.write_text("now a file")
    for _ in range(2):
        assert hits(tier) == 0
        assert None not in tier.put(samples.records(REFS))
        assert tier.contains(KEYS) == [False] * 6
    assert "is a file, not a folder" in caplog.text
    root.unlink()
    assert tier.put(samples.records(REFS)) == [None] * 6
    tier.close()
