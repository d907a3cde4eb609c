"""The connector under what engines do besides: chunks, preemption, guessing tokens, windows, adapters, replicas."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from .harness import BLOCK, EngineProcess, connector, files, prompt, wait_stored
from .models import tiny


def tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [a["tokens"] for a in answers]


def test_chunks_that_fit_no_block_and_preemption(model: Path, plain: EngineProcess, tmp_path: Path) -> None:
    """Prompts are computed 96 tokens at a time, and 6 requests share memory for about 3 of them."""
    prompts = [prompt(n, 130 + 10 * n) for n in range(6)]
    reference = tokens(plain.generate(*prompts, max_tokens=200))
    crowded: dict[str, Any] = {"max_num_batched_tokens": 96, "num_gpu_blocks_override": 40, "max_num_seqs": 6}
    with EngineProcess(model, connector(tmp_path / "kv"), max_model_len=512, **crowded) as engine:
        assert tokens(engine.generate(*prompts, max_tokens=200)) == reference
        assert engine.ask("metrics")["vllm:num_preemptions"] > 0
        wait_stored(tmp_path / "kv", sum(len(p) // BLOCK for p in prompts))
        assert engine.ask("forget")
        warm = engine.generate(*prompts, max_tokens=200)
        assert tokens(warm) == reference
        assert all(a["cached"] > 0 for a in warm)
        assert engine.ask("connector") == {"off": "", "faults": {}}


def test_guessed_tokens_change_nothing_and_share_the_store(
    model: Path, plain: EngineProcess, engine: EngineProcess, store: Path
) -> None:
    """N-gram speculation has no KV of its own: an engine with it uses what one without it has stored."""
    ids = prompt(50, 130) * 3
    before = len(files(store))
    reference = engine.one(ids, max_tokens=40)
    wait_stored(store, before + len(ids) // BLOCK)
    assert reference["tokens"] == plain.one(ids, max_tokens=40)["tokens"]
    guessing = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    with EngineProcess(model, connector(store), speculative_config=guessing) as other:
        assert other.one(ids, max_tokens=40) == reference | {"cached": 384}
        new = prompt(51, 130) * 2
        assert other.one(new, max_tokens=40)["tokens"] == plain.one(new, max_tokens=40)["tokens"]
        wait_stored(store, before + len(ids) // BLOCK + len(new) // BLOCK)
    assert engine.ask("forget")
    assert engine.one(new, max_tokens=40) == plain.one(new, max_tokens=40) | {"cached": 256}


def test_a_sliding_window_loads_its_window_and_gives_the_same_answers(tmp_path: Path) -> None:
    model = tiny(tmp_path / "gemma3", "gemma3_text")
    ids, longer = prompt(60, 500), [*prompt(60, 500), *prompt(61, 200)]
    with EngineProcess(model, None, enable_prefix_caching=False) as without:
        reference = tokens(without.generate(ids, longer))
    with EngineProcess(model, connector(tmp_path / "kv"), max_num_batched_tokens=512) as engine:
        assert engine.one(ids)["tokens"] == reference[0]
        wait_stored(tmp_path / "kv", 15)
        time.sleep(0.5)
        assert engine.ask("forget")
        warm = engine.one(ids)
        assert warm["tokens"] == reference[0]
        assert warm["cached"] >= 448
        partly = engine.one(longer)
        assert partly["tokens"] == reference[1]
        assert engine.ask("connector") == {"off": "", "faults": {}}


def adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter for the tiny Llama."""
    folder.mkdir(parents=True, exist_ok=True)
    make = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(4):
        for name, size in (("q_proj", 128), ("v_proj", 64)):
            base = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{base}.lora_A.weight"] = torch.randn(8, 64, generator=make)
            weights[f"{base}.lora_B.weight"] = torch.randn(size, 8, generator=make)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_two_adapters_under_one_name_do_not_share(model: Path, tmp_path: Path) -> None:
    """Nor does one whose files change after it was loaded: what is in memory cannot be told any more."""
    ids, kv = prompt(70, 200), tmp_path / "kv"
    first, second = adapter(tmp_path / "one", 1), adapter(tmp_path / "two", 2)
    lora: dict[str, Any] = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
    with EngineProcess(model, connector(kv), **lora) as engine:
        base = engine.one(ids)
        one = engine.one(ids, lora=["mine", 1, str(first)])
        wait_stored(kv, 6)
        two = engine.one(ids, lora=["mine", 2, str(second)])
        wait_stored(kv, 9)
        assert base["cached"] == one["cached"] == two["cached"] == 0
        assert len({tuple(a["tokens"]) for a in (base, one, two)}) == 3
        assert engine.ask("forget")
        assert engine.one(ids, lora=["mine", 1, str(first)]) == one | {"cached": 192}
        assert engine.ask("forget")
        shutil.copy(second / "adapter_model.safetensors", first / "adapter_model.safetensors")
        changed = engine.one(ids, lora=["mine", 1, str(first)])
        assert changed["cached"] == 0
    with EngineProcess(model, connector(kv), **lora) as engine:
        assert engine.one(ids, lora=["mine", 1, str(first)]) == two | {"cached": 192}
        assert engine.one(ids) == base | {"cached": 192}


def test_two_replicas_write_the_same_prompts_at_once(model: Path, plain: EngineProcess, tmp_path: Path) -> None:
    prompts = [prompt(80 + n, 260, shared=130) for n in range(4)]
    reference = tokens(plain.generate(*prompts))
    kv = tmp_path / "kv"
    with EngineProcess(model, connector(kv)) as one, EngineProcess(model, connector(kv)) as two:
        for replica in (one, two):
            replica.tell("generate", prompts=[{"ids": p} for p in prompts], max_tokens=8)
        assert tokens(one.hear()) == tokens(two.hear()) == reference
        wait_stored(kv, 2 + 4 * 2)
        assert len(files(kv)) == 2 + 4 * 2
        for replica in (one, two):
            assert replica.ask("forget")
            warm = replica.generate(*prompts)
            assert tokens(warm) == reference
            assert [a["cached"] for a in warm] == [256] * 4


def test_other_weights_under_the_same_name_miss(model: Path, plain: EngineProcess, tmp_path: Path) -> None:
    folder, kv, ids = tmp_path / "model", tmp_path / "kv", prompt(90, 300)
    shutil.copytree(model, folder)
    with EngineProcess(folder, connector(kv)) as engine:
        before = engine.one(ids)
        assert before["tokens"] == plain.one(ids)["tokens"]
        wait_stored(kv, 4)
    tiny(folder, seed=1)
    with EngineProcess(folder, connector(kv)) as engine:
        after = engine.one(ids)
        assert after["cached"] == 0
        assert after["tokens"] != before["tokens"]
        assert any("cause=identity" in name for name in engine.ask("metrics"))


def test_a_prompt_that_two_replicas_get_at_once_is_computed_once(
    model: Path, plain: EngineProcess, tmp_path: Path
) -> None:
    """One claims it, the other waits; if the one dies, the other computes."""
    policy, kv = prompt(95, 1800), tmp_path / "kv"
    questions = [[*policy, *prompt(96 + n, 60)] for n in range(2)]
    reference = [plain.one(q)["tokens"] for q in questions]
    slow: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 8}
    with (
        EngineProcess(model, connector(kv, share_wait_s=30), **slow) as one,
        EngineProcess(model, connector(kv, share_wait_s=30), **slow) as two,
    ):
        one.tell("generate", prompts=[{"ids": questions[0]}], max_tokens=8)
        time.sleep(0.1)
        two.tell("generate", prompts=[{"ids": questions[1]}], max_tokens=8)
        first, second = one.hear()[0], two.hear()[0]
        assert [first["tokens"], second["tokens"]] == reference
        # Whichever was first computes; the other computes what is its own.
        computed, loaded = sorted(a["cached"] for a in (first, second))
        assert computed == 0
        assert loaded >= 1664
        other = prompt(99, 1900)
        one.tell("generate", prompts=[{"ids": other}], max_tokens=8)
        time.sleep(0.05)
        two.tell("generate", prompts=[{"ids": other}], max_tokens=8)
        one.kill()
        started = time.monotonic()
        assert two.hear()[0]["tokens"] == plain.one(other)["tokens"]
        assert time.monotonic() - started < 25
