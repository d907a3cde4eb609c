"""Opening at once, forking, power cuts and closing under load."""

import os
import sqlite3
from pathlib import Path

import pytest

from stemkv.misses import Cause, Miss
from stemkv.testing import samples
from stemkv.testing.samples import Collector
from stemkv.tiers import _opening, session
from stemkv.tiers.file import FileTier
from stemkv.tiers.manifest import Manifest

from .harness import KEYS, REFS, alter_file, block_files, check_consistent, file_of, hits, leftovers, opened, stored


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


@pytest.mark.parametrize("lost", ["row", "manifest"])
def test_what_a_repair_finds_never_lifts_the_store_above_its_cap(root: Path, lost: str) -> None:
    stored(root)
    if lost == "row":  # a process was killed between the name and the row; others filled the store since
        with sqlite3.connect(root / "manifest.sqlite3") as db:
            db.execute("DELETE FROM blocks WHERE idx = 5")
        db.close()
        (root / "sessions" / "1-dead").mkdir()
    else:
        (root / "manifest.sqlite3").unlink()
    tier = FileTier(root, max_bytes=5 * 8192, reserve_bytes=0)
    assert tier.contains(KEYS) == [True] * 5 + [False]
    assert tier.stats().bytes == 5 * 8192
    check_consistent(tier)
    tier.close()


def test_a_smaller_cap_is_met_when_the_folder_is_opened(root: Path) -> None:
    stored(root)
    tier = FileTier(root, max_bytes=2 * 8192, reserve_bytes=0)
    assert tier.contains(KEYS) == [True] * 2 + [False] * 4
    check_consistent(tier)
    tier.close()


def test_without_a_fault_nothing_is_opened_anew(root: Path) -> None:
    tier = opened(root)
    before = tier._store.opened
    for seed in range(3):
        other = opened(root)
        assert other.put(samples.records(samples.refs(samples.chain(2, seed=seed)))) == [None] * 2
        assert tier.put(samples.records(samples.refs(samples.chain(2, seed=seed + 10)))) == [None] * 2
        other.close()
    assert tier._store.opened is before
    tier.close()


def test_a_log_removed_by_hand_loses_no_room(root: Path) -> None:
    """Rows that were only in the manifest's log are gone; their files are adopted, not left without a row."""
    tier = opened(root)
    tier.put(samples.records(REFS))
    (root / "manifest.sqlite3-wal").unlink()
    assert tier.put(samples.records(REFS)) == [None] * 6
    check_consistent(tier)
    tier.close()
    tier = opened(root)
    check_consistent(tier)
    tier.close()
