"""Folders that are something else are refused by name; a damaged manifest is built anew."""

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from stemkv.errors import StoreError, StoreFormatError
from stemkv.testing import samples
from stemkv.tiers.file import FileTier

from .harness import KEYS, REFS, check_consistent, hits, opened, stored


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


@pytest.mark.parametrize("where", [".", "blocks", "sessions"])
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
