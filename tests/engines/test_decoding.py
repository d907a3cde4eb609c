"""Every way of decoding gives with the cache what it gives without, and costs only the rest of the prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList, TextStreamer

from stemkv.errors import RequestError
from stemkv.misses import Cause, Miss

from .conftest import BLOCK, VOCAB, prompt, tiny


class Words:
    """A tokenizer for streamers: token n is the word " wn"."""

    def decode(self, ids, **_):
        ids = ids.tolist() if isinstance(ids, torch.Tensor) else ids
        return "".join(f" w{i}" for i in (ids if isinstance(ids, list) else [ids]))


class Recorder(TextStreamer):
    def __init__(self):
        super().__init__(Words())
        self.seen = []

    def put(self, value):
        self.seen.append(value.tolist())


class StopAt(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **_):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "qwen3_next", "mamba2"])
def model(request):
    made = tiny(request.param)
    made.family = request.param
    return made


@pytest.fixture(scope="module", params=["llama", "mistral", "gemma3_text", "lfm2"])
def croppable(request):
    """A model whose cache can be rolled back, as drafting needs; transformers refuses the others."""
    made = tiny(request.param)
    made.family = request.param
    return made


@pytest.fixture(scope="module")
def assistant():
    return tiny("llama", num_hidden_layers=1, seed=5)


MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "beams": {"num_beams": 3, "do_sample": False},
    "beam sampling": {"num_beams": 2, "do_sample": True},
    "several beams returned": {"num_beams": 4, "num_return_sequences": 2, "do_sample": False},
    "several samples": {"num_return_sequences": 3, "do_sample": True},
    "repetition penalty": {"repetition_penalty": 1.5, "do_sample": False},
    "no repeated n-gram": {"no_repeat_ngram_size": 2, "do_sample": False},
    "bad words": {"bad_words_ids": [[5], [6, 7]], "do_sample": False},
    "max_length": {"max_length": 130, "max_new_tokens": None, "do_sample": False},
    "min_length": {"min_new_tokens": 10, "eos_token_id": 3, "do_sample": False},
    "end token": {"eos_token_id": list(range(1, VOCAB, 7)), "do_sample": False},
    "scores": {"return_dict_in_generate": True, "output_scores": True, "do_sample": False},
    "user's prefill chunks": {"prefill_chunk_size": 40, "do_sample": False},
    "generation config": {
        "generation_config": GenerationConfig(max_new_tokens=20, do_sample=False),
        "max_new_tokens": None,
    },
}


def both(model, cache, ids, **settings):
    """Results of model.generate and of the cache, from the same random state."""
    settings = {k: v for k, v in ({"max_new_tokens": 20} | settings).items() if v is not None}
    results = []
    for generator in (model, cache):
        torch.manual_seed(7)
        out = generator.generate(ids, **settings)
        results.append(out if isinstance(out, torch.Tensor) else out.sequences)
    return results


@pytest.mark.parametrize("mode", MODES)
def test_results_are_those_of_generate(mode, model, make, pool):
    if (mode, model.family) == ("user's prefill chunks", "mamba2"):
        pytest.skip("transformers cannot do this")
    cache, ids = make(model), prompt(100)
    for cached in (0, 96):
        plain, out = both(model, cache, ids, **MODES[mode])
        assert torch.equal(out, plain)
        assert (cache.last_report.cached_tokens, cache.faults) == (cached, 0)
        pool.flush()


@pytest.mark.parametrize("mode", ["greedy", "beams", "several samples"])
def test_batches_of_equal_rows_length(mode, model, make, pool):
    cache = make(model)
    ids = torch.cat([prompt(64).repeat(3, 1), prompt(40, seed=4, rows=3)], dim=1)
    for cached in (0, 96):
        plain, out = both(model, cache, ids, **MODES[mode])
        assert torch.equal(out, plain)
        assert [row.cached_tokens for row in cache.last_report.rows] == [cached] * 3
        pool.flush()


@pytest.mark.parametrize("how", ["assistant", "prompt lookup"])
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_drafting_computes_on_the_right_positions(how, penalty, croppable, assistant, make, pool):
    model, cache = croppable, make(croppable)
    ids = prompt(30).repeat(1, 4)[:, :110]  # repeats itself, so that prompt lookup finds something
    draft = {"assistant_model": assistant} if how == "assistant" else {"prompt_lookup_num_tokens": 4}
    settings = {"do_sample": False, "repetition_penalty": penalty, "max_new_tokens": 45, **draft}
    for cached in (0, 96, 96):
        plain, out = both(model, cache, ids, **settings)
        assert torch.equal(out, plain)
        assert cache.last_report.cached_tokens == cached
        pool.flush()
    turn = torch.cat([out, prompt(5, seed=9)], dim=1)
    plain, out = both(model, cache, turn, do_sample=False)
    assert torch.equal(out, plain)
    # A recurrent state is kept where a draft happened to end on a block boundary.
    expected = [96, 112, 128, 144] if model.family == "lfm2" else [144]
    assert cache.last_report.cached_tokens in expected
    assert "prepare_inputs_for_generation" not in model.__dict__


def test_streamers_get_the_whole_prompt_and_every_token(llama, make, pool):
    cache, ids = make(llama), prompt(100)
    plain = Recorder()
    llama.generate(ids, max_new_tokens=8, do_sample=False, streamer=plain)
    for _ in range(2):
        mine = Recorder()
        cache.generate(ids, max_new_tokens=8, do_sample=False, streamer=mine)
        assert mine.seen == plain.seen
        pool.flush()


def test_stopping_criteria_still_stop(llama, make, pool):
    cache, ids = make(llama), prompt(100)
    for _ in range(2):
        out = cache.generate(
            ids, max_new_tokens=30, do_sample=False, stopping_criteria=StoppingCriteriaList([StopAt(109)])
        )
        assert out.shape[1] == 109
        pool.flush()


def test_padding_is_inferred_as_generate_infers_it(llama, make, pool):
    cache = make(llama)
    ids = torch.cat([prompt(64).repeat(2, 1), prompt(20, seed=4, rows=2)], dim=1)
    ids[1] = torch.cat([torch.zeros(9, dtype=torch.long), ids[1, :75]])
    for _ in range(2):
        plain, out = both(llama, cache, ids, do_sample=False)
        assert torch.equal(out, plain)
        pool.flush()
    assert [row.prompt_tokens for row in cache.last_report.rows] == [84, 75]
    assert [row.cached_tokens for row in cache.last_report.rows] == [73, 64]
    assert cache.last_report.rows[0].miss == Miss(Cause.NO_STATE, "batch")


def test_a_full_prompt_hit_leaves_one_token_to_compute(llama, make, pool):
    cache, ids = make(llama), prompt(6 * BLOCK)
    for cached in (0, 5 * BLOCK):
        plain, out = both(llama, cache, ids, do_sample=False)
        assert torch.equal(out, plain)
        assert cache.last_report.cached_tokens == cached
        pool.flush()
    longer = torch.cat([ids, prompt(1, seed=3)], dim=1)
    cache.generate(longer, max_new_tokens=1)
    assert cache.last_report.cached_tokens == 6 * BLOCK


def test_every_call_gets_a_cache_of_its_own(llama, make, pool):
    cache, ids = make(llama), prompt(100)
    first = cache.generate(ids, max_new_tokens=10, do_sample=False, return_dict_in_generate=True)
    pool.flush()
    kept = first.cache.layers[0].keys.clone()
    second = cache.generate(ids, max_new_tokens=10, do_sample=False, return_dict_in_generate=True)
    assert second.cache is not first.cache
    assert torch.equal(first.cache.layers[0].keys, kept)


def test_a_returned_cache_can_be_cropped_and_used_without_harming_stored_blocks(llama, make, pool):
    cache, ids = make(llama), prompt(100)
    out = cache.generate(ids, max_new_tokens=30, do_sample=False, return_dict_in_generate=True)
    out.cache.crop(-80)  # before the writer is done
    other = torch.cat([ids[:, :49], prompt(30, seed=8)], dim=1)
    with torch.no_grad():
        logits = llama(other[:, 49:], cache=out.cache).logits
        torch.testing.assert_close(logits, llama(other).logits[:, 49:], rtol=1e-4, atol=1e-4)
    pool.flush()
    plain, again = both(llama, cache, ids, do_sample=False)
    assert cache.last_report.cached_tokens == 96
    assert torch.equal(again, plain)


@pytest.mark.parametrize(
    "settings",
    [
        {"cache": object()},
        {"past_key_values": object()},
        {"cache_implementation": "static"},
        {"cache_implementation": "quantized"},
    ],
)
def test_caches_of_the_callers_own_are_refused(settings, llama, make):
    with pytest.raises(RequestError, match=next(iter(settings))):
        make(llama).generate(prompt(40), max_new_tokens=2, **settings)


def test_a_prompt_longer_than_the_context_is_refused(llama, make):
    with pytest.raises(RequestError, match=r"1025 tokens.*context of 1024"):
        make(llama).generate(prompt(1025), max_new_tokens=2)


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"position_ids": torch.arange(100)[None]}, "position_ids"),
        ({"use_cache": False}, "use_cache"),
    ],
)
def test_what_is_not_in_the_keys_is_computed_and_says_so(settings, cause, llama, make, pool):
    cache = make(llama)
    for _ in range(2):
        plain, out = both(llama, cache, prompt(100), do_sample=False, **settings)
        assert torch.equal(out, plain)
        assert str(cache.last_report.miss) == f"not-cacheable:{cause}"
        pool.flush()
    assert pool.metrics.total("stored_blocks") == 0


def test_embeddings_as_input_are_computed_and_say_so(llama, make, pool):
    cache, ids = make(llama), prompt(100)
    embeds = llama.get_input_embeddings()(ids)
    out = cache.generate(inputs_embeds=embeds, max_new_tokens=5, do_sample=False)
    assert torch.equal(out, llama.generate(inputs_embeds=embeds, max_new_tokens=5, do_sample=False))
    assert str(cache.last_report.miss) == "not-cacheable:inputs_embeds"


def test_a_mask_with_holes_is_not_cacheable(llama, make):
    cache, mask = make(llama), torch.ones(1, 100, dtype=torch.long)
    mask[0, 50] = 0
    plain, out = both(llama, cache, prompt(100), attention_mask=mask, do_sample=False)
    assert torch.equal(out, plain)
    assert str(cache.last_report.miss) == "not-cacheable:attention_mask"


def test_autocast_and_training_mode_are_not_cacheable(llama, make):
    cache = make(llama)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cache.generate(prompt(40), max_new_tokens=2)
    assert str(cache.last_report.miss) == "not-cacheable:autocast"
    llama.train()
    try:
        cache.generate(prompt(40), max_new_tokens=2)
    finally:
        llama.eval()
    assert str(cache.last_report.miss) == "not-cacheable:training"


def test_rows_that_ended_early_store_only_their_text(llama, make, pool):
    cache = make(llama)
    ids = prompt(40, rows=2)
    plain = llama.generate(ids, max_new_tokens=60, do_sample=False)
    end = int(plain[0, 60])
    settings = {"eos_token_id": end, "do_sample": False, "max_new_tokens": 60}
    out = cache.generate(ids, **settings)
    pool.flush()
    first = out[0].tolist()
    stop = first.index(end, 40) + 1
    turn = torch.cat([out[:1, :stop], prompt(40, seed=6)], dim=1)
    result = cache.generate(turn, max_new_tokens=4, do_sample=False)
    assert cache.last_report.cached_tokens == (stop if out.shape[1] > stop else stop - 1) // BLOCK * BLOCK
    assert torch.equal(result, llama.generate(turn, max_new_tokens=4, do_sample=False))


def test_inference_mode_and_no_grad_mix(llama, make, pool):
    cache, ids = make(llama), prompt(100)
    plain = llama.generate(ids, max_new_tokens=40, do_sample=False)
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            assert torch.equal(cache.generate(ids, max_new_tokens=40, do_sample=False), plain)
        pool.flush()
    assert (cache.last_report.cached_tokens, cache.faults) == (96, 0)
    assert pool.metrics.total("unstored_blocks") == 0


def test_prompts_that_grow_by_one_token_are_served_at_every_length(llama, make, pool):
    cache, ids = make(llama), prompt(70)
    for length in range(1, 70):
        plain, out = both(llama, cache, ids[:, :length], do_sample=False, max_new_tokens=3)
        assert torch.equal(out, plain)
        pool.flush()
        assert cache.last_report.cached_tokens == (length - 1) // BLOCK * BLOCK
