"""Whatever happens to the pool, the engine sees misses and failed jobs, in time, and goes on."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult, make_offload_key

from stemkv.engines import vllm_tier
from stemkv.tiers.file import FileTier

from .harness import Engine, key, keys

MISS, HIT = LookupResult.MISS, LookupResult.HIT
PLENTY_S = 10.0


def files(folder: Path) -> list[Path]:
    return sorted((folder / "blocks").rglob("*.safetensors"))


def file_of(engine: Engine, one: bytes, pool: Path) -> Path:
    (found,) = (pool / "blocks").rglob(f"{engine.tier._names.ref(one).key.hex()}.safetensors")
    return found


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "one bit": flip,
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "deleted": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", list(DAMAGE.values()), ids=list(DAMAGE))
def test_a_damaged_block_is_a_miss_beside_hits_and_can_be_stored_anew(
    start: Any, tmp_path: Path, damage: Callable[[Path], Any]
) -> None:
    engine: Engine = start()
    content = engine.store(keys(5))
    engine.drop_primary()
    damage(file_of(engine, key(2), tmp_path / "pool"))
    good = {one: content[one] for one in keys(5) if one != key(2)}
    assert engine.load(keys(5)) == good
    assert engine.lookup([key(2)]) == {key(2): MISS}
    anew = engine.store([key(2)], fill=1)
    engine.drop_primary()
    assert engine.load(keys(5)) == good | anew


def test_another_blocks_file_in_its_place_is_a_miss(start: Any, tmp_path: Path) -> None:
    engine: Engine = start()
    content = engine.store(keys(2))
    engine.drop_primary()
    one, two = (file_of(engine, k, tmp_path / "pool") for k in keys(2))
    shutil.copyfile(one, two)
    assert engine.load(keys(2)) == {key(0): content[key(0)]}


def test_a_partly_failed_load_tells_vllm_which_keys_arrived(start: Any, tmp_path: Path) -> None:
    engine: Engine = start()
    engine.store(keys(3))
    engine.drop_primary()
    flip(file_of(engine, key(1), tmp_path / "pool"))
    results = []
    original = engine.tier.get_finished_jobs

    def spy() -> Any:
        got = list(original())
        results.extend(got)
        return got

    engine.tier.get_finished_jobs = spy  # type: ignore[method-assign]
    engine.lookup(keys(3))
    (job,) = results
    assert not job.success
    assert set(job.successful_keys or ()) == {key(0), key(2)}
    assert job.transfer_bytes == 2 * engine.row_bytes
    assert engine.counters()["load_results", ("bad-tag",)] == 1


def test_the_folder_deleted_while_serving(start: Any, tmp_path: Path) -> None:
    engine: Engine = start()
    engine.store(keys(3))
    engine.drop_primary()
    shutil.rmtree(tmp_path / "pool")
    assert set(engine.lookup(keys(3)).values()) == {MISS}
    engine.store(keys(3))
    engine.settle()


def test_the_folder_replaced_by_a_file(start: Any, tmp_path: Path) -> None:
    engine: Engine = start()
    engine.store(keys(3))
    engine.drop_primary()
    shutil.rmtree(tmp_path / "pool")
    (tmp_path / "pool").write_text("not a folder")
    assert set(engine.lookup(keys(3)).values()) == {MISS}
    engine.store(keys(3, text=1))
    engine.settle()


def test_no_room_left(start: Any) -> None:
    engine: Engine = start({"reserve_bytes": 1 << 60})
    engine.store(keys(3))
    assert engine.counters()["unstored_blocks", ("file", "no-space", "store")] == 3
    engine.drop_primary()
    assert set(engine.lookup(keys(3)).values()) == {MISS}


def test_a_folder_that_cannot_be_written_is_read(start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Engine = start()
    content = engine.store(keys(3))
    engine.drop_primary()

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("stemkv.tiers.file._disk.write_file", refuse, raising=False)
    monkeypatch.setattr(FileTier, "_write_once", refuse)
    engine.store(keys(3, text=1))
    assert engine.counters()["unstored_blocks", ("file", "read-only", "store")] == 3
    engine.drop_primary()
    assert engine.load(keys(3)) == content


def test_a_queue_without_room_drops_and_says_so(start: Any, hang: Callable[[str], None]) -> None:
    engine: Engine = start({"queue_bytes": 40000, "store_timeout_s": 0.3}, rows=64)
    hang("put")
    for text in range(4):
        engine.store(keys(2, text), settle=False)
    engine.settle()
    assert engine.counters()["store_results", ("dropped",)] >= 4


# -- a pool that hangs -------------------------------------------------------------------------------------------


def test_lookups_of_a_hanging_pool_become_misses_in_time(start: Any, hang: Callable[[str], None]) -> None:
    engine: Engine = start({"lookup_timeout_s": 0.2})
    engine.store(keys(2))
    engine.drop_primary()
    hang("contains")
    began = time.monotonic()
    assert set(engine.lookup(keys(2)).values()) == {MISS}
    assert 0.2 <= time.monotonic() - began < 2.0
    began = time.monotonic()
    assert set(engine.lookup(keys(20, text=1)).values()) == {MISS}, "the next request need not find out once more"
    assert time.monotonic() - began < 0.2
    counted = engine.counters()
    assert counted["asked_keys", ("late",)] == 2
    assert counted["asked_keys", ("refused",)] == 20


def test_a_load_that_hangs_fails_in_time_and_never_writes_its_rows(start: Any, hang: Callable[[str], Any]) -> None:
    engine: Engine = start({"load_timeout_s": 0.3})
    engine.store(keys(3))
    engine.drop_primary()
    let_go = hang("fetch")
    began = time.monotonic()
    assert set(engine.lookup(keys(3)).values()) == {MISS}
    assert 0.3 <= time.monotonic() - began < 3.0
    other = engine.store(keys(16, text=1))  # all rows are used for something else now
    let_go()
    time.sleep(0.3)
    assert engine.load(keys(16, text=1)) == other


def test_a_store_that_hangs_gives_its_rows_back_in_time(start: Any, hang: Callable[[str], Any]) -> None:
    engine: Engine = start({"store_timeout_s": 0.3}, rows=4)
    let_go = hang("put")
    began = time.monotonic()
    engine.store(keys(4))
    assert 0.3 <= time.monotonic() - began < 3.0
    engine.store(keys(4, text=1))
    let_go()


def test_no_call_of_the_scheduler_waits_for_a_hanging_pool(start: Any, hang: Callable[[str], Any]) -> None:
    engine: Engine = start({"lookup_timeout_s": 5.0, "load_timeout_s": 5.0, "store_timeout_s": 5.0}, rows=64)
    engine.store(keys(8))
    engine.drop_primary()
    context = engine.request(keys(8))
    hang("contains")
    hang("put")
    hang("fetch")
    slowest = 0.0
    for number in range(200):
        began = time.perf_counter()
        engine.manager.lookup(key(number % 8), context)
        engine.step()
        slowest = max(slowest, time.perf_counter() - began)
    assert slowest < 0.5
    began = time.perf_counter()
    engine.store(keys(8, text=1), settle=False)
    assert time.perf_counter() - began < 0.5
    engine.manager.on_request_finished(context)


def test_shutdown_does_not_wait_for_ever(
    start: Any, hang: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_tier, "_CLOSE_S", 0.2)
    engine: Engine = start()
    hang("put")
    engine.store(keys(4), settle=False)
    began = time.monotonic()
    engine.stop()
    assert time.monotonic() - began < PLENTY_S


def test_what_was_queued_is_stored_before_shutdown_returns(start: Any) -> None:
    engine: Engine = start(rows=64)
    content = engine.store(keys(40), settle=False)
    engine.stop()
    assert start(rows=64).load(keys(40)) == content


# -- faults of our own -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["contains", "put", "fetch", "quarantine", "touch", "stats", "close"])
def test_a_tier_that_breaks_its_contract_costs_blocks_only(
    start: Any, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Engine = start()
    engine.store(keys(3))
    engine.drop_primary()

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(FileTier, method, broken)
    engine.lookup(keys(3))
    engine.store(keys(3, text=1))
    engine.manager.touch(keys(3), engine.request())
    engine.settle()
    engine.stop()


@pytest.mark.parametrize("part", ["_lookups", "_jobs", "_names"])
def test_a_fault_inside_the_tier_is_a_miss_or_a_failed_job_and_counted(start: Any, part: str) -> None:
    engine: Engine = start()
    engine.store(keys(3))
    engine.drop_primary()
    kept = getattr(engine.tier, part)
    setattr(engine.tier, part, None)
    context = engine.request(keys(3))
    for one in keys(3):
        engine.manager.lookup(one, context)
    engine.step()
    setattr(engine.tier, part, kept)
    engine.manager.on_request_finished(context)
    engine.settle()


@pytest.mark.parametrize("size", [16, 31, 64])
def test_a_hash_of_another_size_is_a_miss_and_never_stored(start: Any, size: int) -> None:
    engine: Engine = start()
    odd = bytes(make_offload_key(bytes(size), 0))
    engine.store([odd])
    engine.drop_primary()
    assert engine.lookup([odd]) == {odd: MISS}


def test_a_group_that_is_not_the_engines_is_a_miss(start: Any) -> None:
    engine: Engine = start()
    engine.store([key(1, group=3)])
    engine.drop_primary()
    assert engine.lookup([key(1, group=3)]) == {key(1, group=3): MISS}
