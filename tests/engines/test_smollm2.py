"""The same properties with real weights in bfloat16, where rounding and kernels are those of production."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from stemkv.engines.transformers import PrefixCache, Report
from stemkv.pool import Pool
from stemkv.tiers.file import FileTier

pytestmark = pytest.mark.model

TEXT = "The lighthouse keeper wrote in the log that the fog had come in from the north before noon. " * 40


@pytest.fixture
def pool(tmp_path):
    made = Pool([FileTier(tmp_path / "store", max_bytes=1 << 30)])
    yield made
    made.close()


def chat(smollm2, *messages):
    turns = [{"role": role, "content": text} for role, text in messages]
    return smollm2.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt")["input_ids"]


def test_a_restored_prefix_is_bit_for_bit_the_kept_one(smollm2, pool):
    model, ids = smollm2.model, smollm2.tokenizer(TEXT, return_tensors="pt").input_ids[:, :725]
    # The first 704 tokens in one forward, in both
    PrefixCache(model, pool, weight_files=smollm2.weight_files, prefill_chunk=704).generate(
        ids[:, :705], max_new_tokens=1
    )
    pool.flush()
    kept = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :704], cache=kept, logits_to_keep=1)
    settings: dict[str, Any] = {
        "max_new_tokens": 8,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    expected = model.generate(ids, cache=kept, **settings)
    cache = PrefixCache(model, pool, weight_files=smollm2.weight_files)
    got = cache.generate(ids, **settings)
    assert cache.last_report.cached_tokens == 704
    assert cache.last_report.rows[0].tiers == ("file",)
    assert torch.equal(torch.stack(got.logits), torch.stack(expected.logits))


def test_restored_logits_are_within_tolerance_of_a_full_prefill(smollm2, pool):
    model, ids = smollm2.model, smollm2.tokenizer(TEXT, return_tensors="pt").input_ids[:, :725]
    cache = PrefixCache(model, pool, weight_files=smollm2.weight_files)
    settings: dict[str, Any] = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}
    full = cache.generate(ids, **settings).logits[0]
    pool.flush()
    warm = cache.generate(ids, **settings).logits[0]
    assert cache.last_report.cached_tokens == 704
    assert (full - warm).abs().max() < 0.5  # of logits around 20; chunked prefill differs by as much
    assert full.argmax() == warm.argmax()


def test_a_chat_goes_on_from_its_own_answer(smollm2, pool):
    cache = PrefixCache(smollm2.model, pool, weight_files=smollm2.weight_files)
    assert cache.identity.weights_source == "files"
    first = chat(smollm2, ("system", TEXT[:1500]), ("user", "What did the keeper write?"))
    out = cache.generate(first, max_new_tokens=80, do_sample=False)
    pool.flush()
    answer = smollm2.tokenizer.decode(out[0, first.shape[1] :], skip_special_tokens=True)
    second = chat(
        smollm2,
        ("system", TEXT[:1500]),
        ("user", "What did the keeper write?"),
        ("assistant", answer),
        ("user", "When?"),
    )
    assert torch.equal(second[:, : first.shape[1]], first)
    reports: list[Report] = []
    cache.generate(second, max_new_tokens=4, do_sample=False, on_report=reports.append)
    assert reports == [cache.last_report]
    assert cache.last_report.cached_tokens > first.shape[1]


def test_stop_strings_stop_at_the_same_place(smollm2, pool):
    cache = PrefixCache(smollm2.model, pool, weight_files=smollm2.weight_files)
    ids = chat(smollm2, ("system", TEXT[:600]), ("user", "Say hello."))
    settings: dict[str, Any] = {
        "max_new_tokens": 30,
        "do_sample": False,
        "stop_strings": ["."],
        "tokenizer": smollm2.tokenizer,
    }
    plain = smollm2.model.generate(ids, **settings)
    for _ in range(2):
        assert torch.equal(cache.generate(ids, **settings), plain)
        pool.flush()
    assert cache.last_report.cached_tokens > 0


def test_the_chat_template_and_end_token_of_the_gguf_work(smollm2):
    ids = chat(smollm2, ("user", "Hi"))
    assert "<|im_start|>user\nHi<|im_end|>" in smollm2.tokenizer.decode(ids[0])
    assert smollm2.model.generation_config.eos_token_id == smollm2.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert smollm2.context_length == 8192
