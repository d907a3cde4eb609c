"""What must hold for every family of models that is not refused."""

from __future__ import annotations

import pytest
import torch

from stemkv.engines import _call
from stemkv.identity import HitPolicy

from .conftest import BLOCK, FAMILIES, prompt, tiny

P, T, E = HitPolicy.PREFIX, HitPolicy.TRAILING, HitPolicy.EXACT
POLICIES = {
    "llama": [P], "qwen3": [P], "mistral": [T], "gemma3_text": [P, T], "gpt_oss": [P, T], "mamba2": [E],
    "qwen3_next": [P, E], "falcon_h1": [P, E], "lfm2": [P, E], "llama4_text": [P, T],
}  # fmt: skip


@pytest.fixture(scope="module", params=list(FAMILIES))
def model(request):
    made = tiny(request.param)
    made.family = request.param
    return made


def greedy(generator, ids, **settings):
    out = generator.generate(
        ids,
        **(
            {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
            | settings
        ),
    )
    return out.sequences, torch.stack(out.logits)


def test_groups_have_the_policies_of_the_layers(model, make):
    assert [spec.policy for spec in make(model).identity.groups] == POLICIES[model.family]


def test_a_hit_gives_the_same_tokens_and_logits(model, make, pool):
    cache, ids = make(model), prompt(100)
    plain, plain_logits = greedy(model, ids)
    for cached in (0, 96, 96):
        out, logits = greedy(cache, ids)
        assert torch.equal(out, plain)
        torch.testing.assert_close(logits, plain_logits, rtol=1e-4, atol=1e-4)
        assert (cache.last_report.cached_tokens, cache.faults) == (cached, 0)
        pool.flush()


def test_the_next_turn_starts_from_generated_blocks(model, make, pool):
    cache = make(model)
    first = cache.generate(prompt(70), max_new_tokens=60, do_sample=False)
    pool.flush()
    turn = torch.cat([first, prompt(21, seed=2)], dim=1)
    plain, plain_logits = greedy(model, turn)
    out, logits = greedy(cache, turn)
    assert cache.last_report.cached_tokens == (70 + 60 - 1) // BLOCK * BLOCK
    assert torch.equal(out, plain)
    torch.testing.assert_close(logits, plain_logits, rtol=1e-4, atol=1e-4)


def test_texts_that_part_share_what_they_have_in_common(model, make, pool):
    cache, start = make(model), prompt(80)
    for seed in (2, 3, 4):
        ids = torch.cat([start, prompt(40, seed=seed)], dim=1)
        out, _ = greedy(cache, ids)
        assert torch.equal(out, greedy(model, ids)[0])
        pool.flush()
    # Recurrent states exist only where they were kept: the second text shows where texts part, the third uses it.
    assert cache.last_report.cached_tokens == 80


def test_long_prompts_are_computed_and_stored_in_chunks(model, make, pool):
    seen = []
    cache = make(model, prefill_chunk=48, progress=lambda done, total: seen.append((done, total)))
    ids = prompt(200)
    out, _ = greedy(cache, ids)
    assert torch.equal(out, greedy(model, ids)[0])
    assert {(48, 200), (96, 200), (144, 200), (192, 200)} <= set(seen)
    pool.flush()
    out, _ = greedy(cache, ids)
    assert torch.equal(out, greedy(model, ids)[0])
    assert cache.last_report.cached_tokens == 192


def test_batches_with_padding(model, make, pool):
    cache, pads = make(model), [0, 0, 7, 30]
    ids = torch.cat([prompt(50).repeat(4, 1), prompt(35, seed=3, rows=4)], dim=1)
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        ids[row] = torch.cat([torch.zeros(pad, dtype=torch.long), ids[row][: 85 - pad]])
        mask[row, :pad] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 40}
    plain, _ = greedy(model, ids, **settings)
    for _ in range(2):
        assert torch.equal(greedy(cache, ids, **settings)[0], plain)
        pool.flush()
    # what a padded row stored serves the same text alone, wherever a row without padding would have stored it
    alone = ids[2:3, 7:]
    assert torch.equal(greedy(cache, alone)[0], greedy(model, alone)[0])
    assert cache.faults == 0


def test_long_answers_let_go_of_what_the_window_passed(model, make, pool, monkeypatch):
    monkeypatch.setattr(_call, "_STORE_EVERY", 32)
    cache, ids = make(model), prompt(40)
    out, _ = greedy(cache, ids, max_new_tokens=110)
    assert torch.equal(out, greedy(model, ids, max_new_tokens=110)[0])
    pool.flush()
    turn = torch.cat([out, prompt(9, seed=5)], dim=1)
    settings = {"attention_mask": torch.ones_like(turn)}  # a model may have said 0, which is the padding token
    again, _ = greedy(cache, turn, **settings)
    assert torch.equal(again, greedy(model, turn, **settings)[0])
    assert cache.last_report.cached_tokens == (40 + 110 - 1) // BLOCK * BLOCK


def test_padded_batches_in_chunks(model, make, pool):
    cache = make(model, prefill_chunk=32)
    ids = prompt(150, rows=3)
    mask = torch.ones_like(ids)
    for row, pad in enumerate([0, 40, 120]):
        ids[row, :pad], mask[row, :pad] = 0, 0
    settings = {"attention_mask": mask, "max_new_tokens": 6}
    plain, logits = greedy(model, ids, **settings)
    for _ in range(3):
        out, mine = greedy(cache, ids, **settings)
        assert torch.equal(out, plain)
        torch.testing.assert_close(mine, logits, rtol=1e-4, atol=1e-4)
        pool.flush()
    assert cache.faults == 0
