"""Whatever happens to the store while the engine serves, answers are right, and no request waits beyond a deadline."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .harness import BLOCK, EngineProcess, connector, files, prompt, wait_stored

LOOKUP_S, LOAD_S = 1.0, 1.5


@pytest.fixture(scope="module")
def flag(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flag") / "hang"


@pytest.fixture(scope="module")
def kv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults") / "kv"


@pytest.fixture(scope="module")
def frail(model: Path, kv: Path, flag: Path) -> Iterator[EngineProcess]:
    """An engine whose file tier can be made to hang, with short deadlines."""
    config = connector(kv, lookup_timeout_s=LOOKUP_S, load_timeout_s=LOAD_S)
    config |= {"kv_connector": "HangingConnector", "kv_connector_module_path": "hanging"}
    with EngineProcess(model, config, env={"HANG_FLAG": str(flag)}) as engine:
        yield engine


def stored(engine: EngineProcess, kv: Path, ids: list[int]) -> list[Path]:
    """Have ``ids`` stored and return its files in order."""
    before = set(files(kv))
    engine.one(ids, max_tokens=1)
    wait_stored(kv, len(before) + len(ids) // BLOCK)
    assert engine.ask("forget")
    return [f for f in files(kv) if f not in before]


def total(engine: EngineProcess, name: str, *labels: str) -> float:
    found = engine.ask("metrics")
    return sum(
        v for k, v in found.items() if k.split("|")[0] == f"vllm:stemkv_{name}" and set(labels) <= set(k.split("|"))
    )


@pytest.mark.parametrize("damage", ["bit", "short", "foreign"])
def test_a_damaged_block_shortens_the_hit_to_the_blocks_before_it(
    plain: EngineProcess, frail: EngineProcess, kv: Path, damage: str
) -> None:
    """Only what comes after it is computed again, and it is stored anew."""
    ids = prompt(len(damage), 400)
    paths = stored(frail, kv, ids)
    bad = paths[3]
    data = bytearray(bad.read_bytes())
    if damage == "bit":
        data[-5000] ^= 1
    bad.write_bytes(data[:-100] if damage == "short" else paths[0].read_bytes() if damage == "foreign" else data)
    answer = frail.one(ids)
    assert answer["tokens"] == plain.one(ids)["tokens"]
    assert total(frail, "hit_tokens") > 0
    deadline = time.monotonic() + 20
    while bad not in files(kv):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.2)
    assert frail.ask("forget")
    assert frail.one(ids) == {"tokens": answer["tokens"], "cached": 384, "reason": "length"}


@pytest.mark.parametrize("call", ["contains", "fetch", "put"])
def test_a_hung_tier_delays_no_request_beyond_its_deadline_and_is_used_again_later(
    plain: EngineProcess, frail: EngineProcess, kv: Path, flag: Path, call: str
) -> None:
    ids = prompt(20 + len(call), 400)
    stored(frail, kv, ids)
    started = time.monotonic()
    usual = plain.one(ids)
    usual_s = time.monotonic() - started
    flag.write_text(call)
    try:
        started = time.monotonic()
        answer = frail.one(ids)
        took = time.monotonic() - started
        again = frail.one(prompt(21, 300))
    finally:
        flag.unlink()
    assert answer["tokens"] == usual["tokens"]
    assert again["tokens"] == plain.one(prompt(21, 300))["tokens"]
    assert took < usual_s + LOOKUP_S + LOAD_S + 2.0
    assert frail.ask("forget")
    time.sleep(5.5)
    assert frail.one(ids) == {"tokens": usual["tokens"], "cached": 384, "reason": "length"}


def test_a_store_whose_blocks_cannot_be_read_is_a_miss(plain: EngineProcess, frail: EngineProcess, kv: Path) -> None:
    ids = prompt(30, 400)
    stored(frail, kv, ids)
    (kv / "blocks").rename(kv / "elsewhere")
    (kv / "blocks").write_text("")
    try:
        assert frail.one(ids)["tokens"] == plain.one(ids)["tokens"]
        assert frail.one(prompt(31, 200))["tokens"] == plain.one(prompt(31, 200))["tokens"]
    finally:
        (kv / "blocks").unlink()
        (kv / "elsewhere").rename(kv / "blocks")


def test_a_deleted_store_is_made_anew(plain: EngineProcess, frail: EngineProcess, kv: Path) -> None:
    ids = prompt(32, 400)
    stored(frail, kv, ids)
    shutil.rmtree(kv)
    assert frail.one(ids)["tokens"] == plain.one(ids)["tokens"]
    assert frail.ask("connector")["faults"] == {}
    assert total(frail, "engine_faults") == 0


def test_a_full_store_serves_and_stores_nothing(model: Path, plain: EngineProcess, tmp_path: Path) -> None:
    ids = prompt(40, 300)
    config = connector(tmp_path / "kv", reserve_bytes=10**15)
    with EngineProcess(model, config) as engine:
        assert engine.one(ids)["tokens"] == plain.one(ids)["tokens"]
        time.sleep(0.5)
        engine.one(prompt(41, 40))
        assert engine.ask("forget")
        assert engine.one(ids) == {**plain.one(ids), "cached": 0}
        assert files(tmp_path / "kv") == []
        assert total(engine, "unstored_blocks", "cause=no-space") > 0


def test_an_engine_outlives_a_connector_in_which_everything_fails(
    model: Path, plain: EngineProcess, tmp_path: Path
) -> None:
    config = connector(tmp_path / "kv")
    config |= {"kv_connector": "BrokenConnector", "kv_connector_module_path": "hanging"}
    with EngineProcess(model, config, env={"HANG_FLAG": str(tmp_path / "flag")}) as engine:
        for seed in range(3):
            assert engine.one(prompt(seed, 200))["tokens"] == plain.one(prompt(seed, 200))["tokens"]
        assert engine.ask("connector")["faults"]["on_new_request"] == 3
        assert "ArithmeticError" in engine.log()
