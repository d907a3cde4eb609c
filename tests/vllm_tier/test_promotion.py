"""Store, cascade to the tier, drop from host memory, promote: what comes back is what was stored."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult

from .harness import Engine, key, keys


def files(folder: Path) -> list[Path]:
    return sorted((folder / "blocks").rglob("*.safetensors"))


@pytest.mark.parametrize("groups", [1, 2])
def test_blocks_come_back_byte_for_byte(start: Any, groups: int) -> None:
    engine: Engine = start(groups=groups)
    wanted = [key(n, group) for group in range(groups) for n in range(4)]
    content = engine.store(wanted)
    engine.drop_primary()
    assert engine.load(wanted) == content


def test_groups_do_not_share_blocks(start: Any) -> None:
    engine: Engine = start(groups=2)
    engine.store([key(1, 0)])
    engine.drop_primary()
    assert engine.lookup([key(1, 1)]) == {key(1, 1): LookupResult.MISS}


def test_blocks_survive_a_restart(start: Any) -> None:
    first: Engine = start()
    content = first.store(keys(8))
    first.stop()
    second: Engine = start()
    assert second.load(keys(8)) == content


def test_a_second_replica_finds_what_the_first_has_just_stored(start: Any) -> None:
    one, two = start(), start()
    content = one.store(keys(6))
    assert two.load(keys(6)) == content
    more = two.store(keys(6, text=1))
    assert one.load(keys(6, text=1)) == more


def test_blocks_that_host_memory_gave_up_are_still_hits(start: Any) -> None:
    engine: Engine = start(rows=4)
    content: dict[bytes, bytes] = {}
    for text in range(5):
        content |= engine.store(keys(4, text))
    for text in range(5):
        wanted = keys(4, text)
        assert engine.load(wanted) == {one: content[one] for one in wanted}


def test_unknown_blocks_are_misses_and_known_ones_beside_them_hits(start: Any) -> None:
    engine: Engine = start()
    engine.store(keys(3))
    engine.drop_primary()
    found = engine.lookup(keys(6))
    assert [found[one] for one in keys(6)] == [LookupResult.HIT] * 3 + [LookupResult.MISS] * 3


def test_a_block_is_written_once(start: Any, tmp_path: Path) -> None:
    engine: Engine = start()
    engine.store(keys(3))
    before = {path: path.stat().st_mtime_ns for path in files(tmp_path / "pool")}
    engine.counters()
    engine.drop_primary()
    engine.store(keys(3), fill=1)  # other bytes: rounding differs from run to run
    assert {path: path.stat().st_mtime_ns for path in files(tmp_path / "pool")} == before
    assert engine.counters()["known_blocks", ("file",)] == 3


def test_many_blocks(start: Any) -> None:
    engine: Engine = start(rows=3000, stemkv={"queue_bytes": "256MiB"})
    content = engine.store(keys(3000))
    engine.drop_primary()
    assert engine.load(keys(3000)) == content


def test_sealed_blocks_hold_no_plain_bytes_and_come_back(start: Any, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(os.urandom(32))
    secret.chmod(0o600)
    engine: Engine = start({"secret_file": str(secret), "seal": True})
    content = engine.store(keys(2))
    engine.drop_primary()
    assert engine.load(keys(2)) == content
    stored = b"".join(path.read_bytes() for path in files(tmp_path / "pool"))
    assert len(stored) > sum(map(len, content.values()))
    assert not any(part[:64] in stored for part in content.values())


def test_a_full_store_gives_up_ends_of_texts_before_their_beginnings(start: Any) -> None:
    engine: Engine = start({"store_bytes": 12 * 16384}, rows=64)
    for text in range(3):
        engine.store(keys(8, text))
    engine.drop_primary()
    for text in range(3):
        found = engine.lookup(keys(8, text))
        hits = [found[one] is LookupResult.HIT for one in keys(8, text)]
        assert hits == sorted(hits, reverse=True), (text, hits)


def test_predecessors_are_found_however_the_keys_arrive(start: Any) -> None:
    engine: Engine = start(rows=64, groups=2)
    text = keys(6)
    context = engine.request(text)
    names = engine.tier._names

    def needs(*wanted: bytes) -> list[bytes]:
        return [ref.needs for ref in names.chained(wanted, names.before(wanted, context))]

    assert needs(text[3], text[0], text[5]) == [
        names.ref(text[2]).key,
        names.ref(text[0]).parent,
        names.ref(text[4]).key,
    ]
    late, other_group, unknown = key(6), key(1, 1), key(40)
    context.set_offload_key_position(late, 7 * 32)
    context.set_offload_key_position(other_group, 2 * 32)
    assert needs(late) == [names.ref(text[5]).key]
    assert needs(other_group, unknown) == [names.ref(other_group).parent, names.ref(unknown).parent]
