"""Whatever is done to the folder, with the tier open or closed: misses, one clear sentence, and it recovers."""

import logging
import os
import shutil
import socket
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stemkv.errors import StoreError, StoreFormatError
from stemkv.misses import Cause, Miss
from stemkv.testing import samples
from stemkv.testing.samples import Collector
from stemkv.tiers import _opening, session
from stemkv.tiers.file import FileTier
from stemkv.tiers.manifest import Manifest

from .harness import alter_file, block_files, check_consistent, file_of, leftovers

CHAIN = samples.chain(6)
REFS = samples.refs(CHAIN)
KEYS = [r.key for r in REFS]
NOBODY = 65534


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def opened(root: Path, **options: float) -> FileTier:
    return FileTier(root, max_bytes=1 << 24, reserve_bytes=0, retry_s=options.get("retry_s", 0.0))


def stored(root: Path) -> None:
    """A closed store with all of REFS."""
    tier = opened(root)
    assert tier.put(samples.records(REFS)) == [None] * 6
    tier.close()


def hits(tier: FileTier) -> int:
    return tier.get(REFS, Collector(), sealer=samples.PLAIN).count(None)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


# -- folders that cannot be written ------------------------------------------------------------------------


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
    monkeypatch.setattr("stemkv.tiers.manifest._REFRESH_S", 0.0)
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


# -- folders that are something else -----------------------------------------------------------------------


def test_a_newer_format_is_refused_by_name_and_left_alone(root: Path) -> None:
    stored(root)
    with sqlite3.connect(root / "manifest.sqlite3") as db:
        db.execute("PRAGMA user_version=2")
    db.close()
    before = sorted(root.rglob("*"))
    with pytest.raises(StoreFormatError, match=r"format 2, written by a newer stemkv.*up to format 1"):
        opened(root)
    assert sorted(root.rglob("*")) == before


@pytest.mark.parametrize("mark", ["", "PRAGMA user_version=7", "PRAGMA application_id=99"])
def test_a_database_of_somebody_else_is_refused_and_left_alone(root: Path, mark: str) -> None:
    root.mkdir()
    with sqlite3.connect(root / "manifest.sqlite3") as db:
        db.execute("CREATE TABLE recipes (name)")
        db.execute("INSERT INTO recipes VALUES ('soup')")
        db.execute(mark)
    db.close()
    before = (root / "manifest.sqlite3").read_bytes()
    with pytest.raises(StoreError, match="not a stemkv manifest"):
        opened(root)
    assert (root / "manifest.sqlite3").read_bytes() == before


@pytest.mark.parametrize("where", [".", "blocks"])
def test_a_file_where_a_folder_should_be_is_refused_by_name(root: Path, where: str) -> None:
    path = root / where
    path.parent.mkdir(exist_ok=True)
    path.write_text("")
    with pytest.raises(StoreError, match=f"{path} is a file, not a folder"):
        opened(root)


def test_a_folder_below_a_file_is_refused(root: Path) -> None:
    root.write_text("")
    with pytest.raises(StoreError, match=r"cannot create the store folder|is a file, not a folder"):
        opened(root / "deeper" / "store")


def test_an_unknown_durability_is_refused(root: Path) -> None:
    with pytest.raises(StoreError, match="'most' is unknown: choose one of none, batch, full"):
        FileTier(root, max_bytes=1, durability="most")


# -- a manifest that is damaged or gone --------------------------------------------------------------------


def spoil_head(path: Path) -> None:
    path.write_bytes(b"not a database" + path.read_bytes()[14:])


def spoil_pages(path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[:4096] + b"\xff" * (len(raw) - 4096))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def no_tables(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("DROP TABLE totals")
    db.close()


def replace_by_noise(path: Path) -> None:
    path.write_bytes(bytes(i * 37 % 256 for i in range(20_000)))


DAMAGES = [spoil_head, spoil_pages, truncate, empty, no_tables, replace_by_noise, Path.unlink]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_a_damaged_manifest_is_built_anew_from_the_block_files(root: Path, damage: Callable[[Path], None]) -> None:
    stored(root)
    damage(root / "manifest.sqlite3")
    tier = opened(root)
    assert tier.contains(KEYS) == [True] * 6
    assert hits(tier) == 6
    check_consistent(tier)
    assert tier.put(samples.records(samples.refs(samples.chain(2, seed=3)))) == [None, None]
    tier.close()


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_a_manifest_damaged_while_it_is_open_is_met_with_misses_and_recovers(
    root: Path, damage: Callable[[Path], None]
) -> None:
    stored(root)
    tier = opened(root)
    assert hits(tier) == 6
    damage(root / "manifest.sqlite3")
    more = samples.records(samples.refs(samples.chain(3, seed=3)))
    for _ in range(3):
        assert len(tier.contains(KEYS)) == 6
        assert hits(tier) == 6, "block files need no manifest"
        tier.explain(REFS[0])
        tier.touch(KEYS)
        tier.put(more)
        tier.stats()
    tier.close()
    tier = opened(root)
    assert tier.put(more) == [None] * 3
    assert hits(tier) == 6
    check_consistent(tier)
    tier.close()


def test_a_writer_notices_that_another_process_replaced_the_manifest(root: Path) -> None:
    first = opened(root)
    first.put(samples.records(REFS[:2]))
    (root / "manifest.sqlite3").unlink()
    second = opened(root)
    assert first.put(samples.records(REFS)) == [None] * 6
    assert second.contains(KEYS) == [True] * 6
    assert first.contains(KEYS) == [True] * 6
    first.close()
    second.close()
    tier = opened(root)
    check_consistent(tier)
    tier.close()


# -- files that somebody touched ---------------------------------------------------------------------------


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


# -- opening at once, forking, power cuts ------------------------------------------------------------------


def test_an_opener_never_takes_a_living_session_for_a_dead_one(root: Path) -> None:
    first = opened(root)
    mine = first._store.opened.session
    assert mine is not None
    unfinished = mine.temporary()
    unfinished.write_bytes(b"")
    opened(root).close()
    assert unfinished.exists()
    assert mine.there()
    first.close()
    assert not leftovers(root)


def test_a_dead_session_is_cleared_away_even_without_its_lock(root: Path) -> None:
    stored(root)
    for name in ("1-dead", "2-dead"):
        (root / "sessions" / name).mkdir()
        (root / "sessions" / name / "0.tmp").write_bytes(b"half a block")
    (root / "sessions" / "2-dead" / "lock").write_bytes(b"")
    tier = opened(root)
    assert len(list((root / "sessions").iterdir())) == 1
    assert not leftovers(root)
    tier.close()


def test_who_waits_too_long_for_another_opener_serves_read_only_and_recovers(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stored(root)
    monkeypatch.setattr(session, "OPENING_WAIT_S", 0.05)
    with session.opening(root):
        tier = opened(root)
        assert hits(tier) == 6
        assert tier.read_only
    assert "another process has been opening it" in caplog.text
    assert tier.put(samples.records(samples.refs(samples.chain(1, seed=4)))) == [None]
    tier.close()


def test_noting_a_bad_block_does_not_wait_for_another_writer(root: Path) -> None:
    stored(root)
    tier, other = opened(root), Manifest(root / "manifest.sqlite3")
    alter_file(tier, REFS[0], lambda raw: raw[:-1] + b"?")
    file_of(tier, REFS[1]).unlink()
    with other.transaction():
        assert hits(tier) == 4
        assert tier.contains(KEYS) == [False, False, True, True, True, True]
        assert tier.stats().quarantined == 1
    other.close()
    assert tier.put(samples.records(REFS[:1])) == [None]
    assert tier.stats().quarantined == 1
    check_consistent(tier)
    tier.close()


def test_in_a_forked_child_the_tier_is_closed_and_the_parent_is_not_disturbed(root: Path) -> None:
    tier = opened(root)
    tier.put(samples.records(REFS[:3]))
    pid = os.fork()
    if not pid:
        try:
            assert tier.contains(KEYS) == [False] * 6
            assert tier.put(samples.records(REFS)) == [Miss(Cause.CLOSED)] * 6
            tier.close()
            mine = opened(root)  # a tier of its own works
            assert mine.put(samples.records(REFS[3:5])) == [None] * 2
            mine.close()
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert status == 0
    assert tier.contains(KEYS).count(True) == 5
    assert tier.put(samples.records(REFS)) == [None] * 6
    check_consistent(tier)
    tier.close()


def test_after_a_power_cut_files_and_rows_are_compared(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take the last rows, the last names and the session that would have told of it."""
    stored(root)
    with sqlite3.connect(root / "manifest.sqlite3") as db:
        db.execute("DELETE FROM blocks WHERE idx >= 4")
        db.execute("UPDATE totals SET blocks = 17, bytes = 3")
        db.execute("UPDATE blocks SET children = 0")
    db.close()
    next(p for p in (root / "blocks").rglob(f"{KEYS[1].hex()}*")).unlink()
    tier = opened(root)
    assert tier.contains(KEYS) == [True] * 4 + [False] * 2, "nothing hints at a crash in the same boot"
    tier.close()
    monkeypatch.setattr(_opening, "_boot_id", lambda: "after the power cut")
    tier = opened(root)
    assert tier.contains(KEYS) == [True, False, True, True, True, True]
    check_consistent(tier)
    tier.close()


def test_a_put_that_fails_half_way_stores_nothing_and_says_so(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = opened(root)
    insert, calls = Manifest.insert, []

    def failing(db: sqlite3.Connection, row: object) -> bool:
        calls.append(row)
        if len(calls) == 4:
            raise sqlite3.OperationalError("disk I/O error")
        return insert(db, row)  # type: ignore[arg-type]

    monkeypatch.setattr(Manifest, "insert", failing)
    results = tier.put(samples.records(REFS))
    assert [m.cause for m in results if m] == [Cause.IO_ERROR] * 6
    assert not block_files(root)
    assert not leftovers(root)
    check_consistent(tier)
    monkeypatch.undo()
    assert tier.put(samples.records(REFS)) == [None] * 6
    tier.close()


def test_closing_while_others_work_raises_nowhere(root: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415

    tier = opened(root)

    def work(seed: int) -> None:
        for turn in range(30):
            some = samples.refs(samples.chain(2, seed=seed * 100 + turn))
            tier.put(samples.records(some))
            tier.get(some, Collector(), sealer=samples.PLAIN)
            tier.contains(KEYS)
            tier.touch(KEYS)

    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(work, seed) for seed in range(3)]
        pool.submit(tier.close)
        for job in jobs:
            job.result()
    tier = opened(root)
    assert not leftovers(root)
    check_consistent(tier)
    tier.close()
