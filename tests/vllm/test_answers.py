"""The same greedy answers with and without the connector, whatever of a prompt is stored."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from .harness import BLOCK, PAGE, EngineProcess, connector, files, prompt, wait_stored


def stored_and_forgotten(engine: EngineProcess, store: Path, ids: list[int]) -> None:
    """Have ``ids`` computed and stored, and vLLM's own cache emptied."""
    before = len(files(store))
    engine.one(ids, max_tokens=1)
    wait_stored(store, before + len(ids) // BLOCK)
    assert engine.ask("forget")


@pytest.mark.parametrize("tokens", [30, 63, 64, 65, 127, 128, 129, 448, 500])
def test_a_prompt_has_the_same_answer_cold_and_warm(
    plain: EngineProcess, engine: EngineProcess, store: Path, tokens: int
) -> None:
    """Among them exact multiples of a block, where one block is left to compute."""
    ids = prompt(tokens, tokens)
    before = len(files(store))
    reference, cold = plain.one(ids), engine.one(ids)
    assert cold == reference | {"cached": 0}
    wait_stored(store, before + tokens // BLOCK)
    assert engine.ask("forget")
    warm = engine.one(ids)
    assert warm["tokens"] == reference["tokens"]
    assert warm["cached"] == (tokens - 1) // BLOCK * BLOCK


def test_a_partly_stored_prompt_starts_where_the_stored_part_ends(
    plain: EngineProcess, engine: EngineProcess, store: Path
) -> None:
    stored_and_forgotten(engine, store, prompt(1, 400, shared=200))
    other = prompt(2, 400, shared=200)
    answer = engine.one(other)
    assert answer["tokens"] == plain.one(other)["tokens"]
    assert answer["cached"] == 192


def test_blocks_behind_what_vllm_has_itself_are_loaded_into_the_rest_only(
    plain: EngineProcess, engine: EngineProcess, store: Path
) -> None:
    """VLLM keeps 3 pages, which end within a stored block: that block is loaded, its first page is not touched."""
    ids = prompt(3, 400)
    stored_and_forgotten(engine, store, ids)
    assert engine.one([*ids[: 3 * PAGE], 7])["cached"] == BLOCK
    answer = engine.one(ids)
    assert answer["tokens"] == plain.one(ids)["tokens"]
    assert answer["cached"] == 384


def test_an_answer_depends_on_the_whole_text(engine: EngineProcess) -> None:
    """So that wrong KV anywhere would show in the other tests."""
    ids = prompt(9, 300)
    changed = [[*ids[:at], ids[at] ^ 1, *ids[at + 1 :]] for at in (0, 70, 150, 290)]
    answers = [tuple(a["tokens"]) for a in engine.generate(ids, *changed, salt="x")]
    assert len(set(answers)) == 5


def test_eight_at_once_have_the_answers_they_have_alone(
    plain: EngineProcess, engine: EngineProcess, store: Path
) -> None:
    prompts = [prompt(100 + n, 300 + n, shared=130) for n in range(8)]
    alone = [plain.one(ids)["tokens"] for ids in prompts]
    cold = engine.generate(*prompts)
    assert [a["tokens"] for a in cold] == alone
    time.sleep(1.0)
    assert engine.ask("forget")
    warm = engine.generate(*prompts)
    assert [a["tokens"] for a in warm] == alone
    assert all(a["cached"] >= 256 for a in warm)


def test_a_salt_keeps_callers_apart(engine: EngineProcess, store: Path) -> None:
    ids = prompt(4, 200)
    before = len(files(store))
    first = engine.one(ids, salt="a")
    wait_stored(store, before + 3)
    assert engine.ask("forget")
    other, same = engine.one(ids, salt="b"), engine.one(ids, salt="a")
    assert first["cached"] == other["cached"] == 0
    assert same["cached"] == 192
    assert first["tokens"] == other["tokens"] == same["tokens"]


def test_counters_reach_prometheus_and_add_up(engine: EngineProcess, store: Path) -> None:
    stored_and_forgotten(engine, store, prompt(5, 200))
    engine.one(prompt(5, 200))
    engine.one(prompt(5, 20))
    found = engine.ask("metrics")

    def total(name: str) -> float:
        return sum(v for k, v in found.items() if k.split("|")[0] == f"vllm:stemkv_{name}")

    assert total("hit_tokens") > 0
    assert total("prompt_tokens") == total("hit_tokens") + total("miss_tokens")
    assert total("wanted_blocks") == total("loaded_blocks") + total("lost_blocks")
    assert total("loaded_blocks") * BLOCK >= total("hit_tokens")
    assert total("engine_faults") == total("tier_faults") == 0
    assert any("cause=unseen" in k for k in found)


def test_after_kill_nine_a_new_process_starts_from_the_store(model: Path, plain: EngineProcess, tmp_path: Path) -> None:
    ids = prompt(7, 500)
    reference = plain.one(ids)["tokens"]
    with EngineProcess(model, connector(tmp_path / "kv")) as first:
        assert first.one(ids)["tokens"] == reference
        wait_stored(tmp_path / "kv", 7)
    with EngineProcess(model, connector(tmp_path / "kv")) as second:
        assert second.one(ids) == {"tokens": reference, "cached": 448, "reason": "length"}
        check_reset(second, tmp_path / "kv", ids, reference)


def check_reset(engine: EngineProcess, kv: Path, ids: list[int], reference: list[int]) -> None:
    """After a reset, weights may have changed in memory: the old is not found, and the new not by others."""
    assert engine.ask("reset")
    assert engine.one(ids) == {"tokens": reference, "cached": 0, "reason": "length"}
    wait_stored(kv, 14)
    assert engine.ask("forget")
    assert engine.one(ids)["cached"] == 448
