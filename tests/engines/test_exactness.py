"""What comes back is what was there, bit for bit, and what attention makes of it too."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from stemkv.engines import _call
from stemkv.engines._layers import FullLayer, GrowingLayer, WindowLayer
from stemkv.pool import Pool
from stemkv.tiers.file import FileTier
from stemkv.tiers.memory import MemoryTier

from .conftest import BLOCK, FAMILIES, prompt, tiny

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def kept(model, ids):
    """A normal cache that computed ``ids`` and stayed in the process."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, cache=cache, use_cache=True)
    return cache


def suffix_logits(model, cache, ids):
    """All logits of the rest of ``ids`` behind ``cache``, and of five more tokens, one by one."""
    with torch.no_grad():
        out = [model(ids[:, 96:], cache=cache).logits]
        out += [model(torch.tensor([[token]]), cache=cache).logits for token in range(1, 6)]
    return torch.cat(out, dim=1)


def restored(make_cache, model, ids, monkeypatch):
    """The cache that a hit on ``ids`` starts from, before anything is computed."""
    taken = []
    cache = make_cache(model)
    monkeypatch.setattr(_call.Call, "compute_ahead", lambda self, *_: taken.append(self.cache))
    monkeypatch.setattr(type(model), "generate", lambda *_, **__: ids)
    cache.generate(ids, max_new_tokens=1)
    monkeypatch.undo()
    assert cache.last_report.cached_tokens == 96
    return taken[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_restored_prefix_is_bit_for_bit_the_kept_one(family, dtype, make, pool, monkeypatch):
    model, ids = tiny(family).to(dtype), prompt(103)
    # In chunks of 96, so that both compute exactly the first 96 tokens in one forward.
    make(model, prefill_chunk=96).generate(ids[:, :97], max_new_tokens=1)
    pool.flush()
    mine = restored(make, model, ids, monkeypatch)
    assert torch.equal(suffix_logits(model, mine, ids), suffix_logits(model, kept(model, ids[:, :96]), ids))


@pytest.mark.parametrize("tier", ["memory", "file"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_and_values_come_back_byte_for_byte(tier, dtype, make, tmp_path, monkeypatch):
    tiers = {"memory": lambda: MemoryTier(max_bytes=1 << 26), "file": lambda: FileTier(tmp_path, max_bytes=1 << 26)}
    pool = Pool([tiers[tier]()])
    model, ids = tiny("llama").to(dtype), prompt(97)
    out = make(model, pool).generate(ids, max_new_tokens=1, return_dict_in_generate=True)
    pool.flush()
    mine = restored(lambda m: make(m, pool), model, ids, monkeypatch)
    for stored, loaded in zip(out.cache.layers, mine.layers, strict=True):
        assert torch.equal(stored.keys[:, :, :96], loaded.keys)
        assert torch.equal(stored.values[:, :, :96], loaded.values)
    pool.close()


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "falcon_h1"])
def test_a_store_serves_after_a_restart(family, make, tmp_path):
    ids, outs = prompt(97), []
    for _ in range(2):  # another pool and another copy of the model, as in another process
        pool = Pool([FileTier(tmp_path, max_bytes=1 << 26)])
        cache = make(tiny(family), pool)
        outs.append(cache.generate(ids, max_new_tokens=9, do_sample=False))
        pool.close()
    assert cache.last_report.cached_tokens == 96
    assert cache.last_report.rows[0].tiers == ("file",)
    assert torch.equal(*outs)


def test_restored_logits_are_within_tolerance_of_a_full_prefill(make, pool):
    model, ids = tiny("llama").to(torch.bfloat16), prompt(103)
    cache = make(model)
    settings = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True}
    full = cache.generate(ids, **settings).logits[0]
    pool.flush()
    again = cache.generate(ids, **settings).logits[0]
    assert cache.last_report.cached_tokens == 96
    assert (full - again).abs().max() <= 0.02 * full.abs().max()


def test_only_the_trailing_blocks_of_a_window_are_loaded(make, pool):
    model = tiny("gemma3_text")  # a window of 24 needs the last 2 blocks of 16, full attention all 6
    cache, ids = make(model), prompt(97)
    cache.generate(ids, max_new_tokens=1)
    pool.flush()
    cache.generate(ids, max_new_tokens=1)
    assert pool.metrics.total("loaded_blocks") == 6 + 2


def test_blocks_need_every_token_to_have_its_kv(make, pool):
    model = tiny("llama")
    cache = make(model)
    # 16 + 16 tokens of text, but the KV of the last one was never computed
    cache.generate(prompt(16), max_new_tokens=16, do_sample=False)
    pool.flush()
    assert pool.metrics.total("stored_blocks") == 1
    cache.generate(prompt(16), max_new_tokens=17, do_sample=False)
    pool.flush()
    assert pool.metrics.total("stored_blocks") == 2


def test_beams_store_only_the_prompt(make, pool):
    make(tiny("llama")).generate(prompt(20), max_new_tokens=40, num_beams=3, do_sample=False)
    pool.flush()
    assert pool.metrics.total("stored_blocks") == 1


# -- the layers themselves ---------------------------------------------------------------------------------------


def filled(layer: GrowingLayer, columns: int, *, rows: int = 2, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(2, rows, 2, columns, 4, generator=generator)
    return layer.update(states[0], states[1])


@pytest.mark.parametrize("window", [0, 8])
def test_layers_do_what_transformers_layers_do(window):
    mine = WindowLayer(window) if window else FullLayer()
    theirs = DynamicSlidingWindowLayer(window) if window else DynamicLayer()
    mine.activate_past_recording() if window else None
    theirs.activate_past_recording() if window else None

    def same(first, second):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert mine.get_seq_length() == theirs.get_seq_length()
        assert mine.get_mask_sizes(3) == theirs.get_mask_sizes(3)

    for step, columns in enumerate([5, 1, 1, 30, 1, 1, 2]):
        same(filled(mine, columns, seed=step), filled(theirs, columns, seed=step))
        mine.crop(-1)
        theirs.crop(-1)
    changes = [
        (lambda layer: layer.reorder_cache(torch.tensor([1, 0])), 2),
        (lambda layer: layer.batch_repeat_interleave(2), 4),
        (lambda layer: layer.batch_select_indices(torch.tensor([0, 3])), 2),
    ]
    for change, rows in changes:
        change(mine)
        change(theirs)
        same(filled(mine, 1, rows=rows, seed=50), filled(theirs, 1, rows=rows, seed=50))
    mine.reset()
    assert mine.get_seq_length() == 0
    filled(mine, 3)
    assert mine.get_seq_length() == 3


def test_frozen_columns_are_never_written_in_place():
    layer = FullLayer()
    filled(layer, 20)
    buffer = layer.key_buffer
    assert buffer is not None
    before = buffer[:, :, :20].clone()
    layer.frozen = 20
    layer.crop(-10)
    filled(layer, 10, seed=1)
    layer.reorder_cache(torch.tensor([1, 0]))
    assert layer.key_buffer is not buffer
    assert torch.equal(buffer[:, :, :20], before)


def test_a_window_grows_no_further_than_it_has_to():
    layer = WindowLayer(8)
    for step in range(2000):
        filled(layer, 1, seed=step % 7)
    assert layer.key_buffer is not None
    assert layer.key_buffer.shape[2] < 200
    assert layer.get_seq_length() == 2000
    layer.trim(1990)
    assert layer.filled == 10
    layer.trim(2000)
    assert layer.filled == 7


def test_appending_copies_nothing_while_there_is_room():
    layer = FullLayer()
    filled(layer, 100)
    buffer = layer.key_buffer
    for _ in range(BLOCK):
        filled(layer, 1)
    assert layer.key_buffer is buffer


def test_states_of_another_shape_are_refused_rather_than_broadcast():
    layer = FullLayer()
    filled(layer, 3, rows=2)
    with pytest.raises(RuntimeError, match="rows"):
        filled(layer, 1, rows=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_repeatable_gives_the_same_bits_with_and_without_a_hit(make, dtype):
    model = tiny("llama").to(dtype)
    cache = make(model, repeatable=True)
    cold, warm = (
        cache.generate(prompt(101), max_new_tokens=4, return_dict_in_generate=True, output_logits=True)
        for _ in range(2)
        if cache.pool.flush()
    )
    assert cache.last_report.cached_tokens == 96
    assert torch.equal(cold.sequences, warm.sequences)
    assert all(torch.equal(a, b) for a, b in zip(cold.logits, warm.logits, strict=True))


def test_repeatable_holds_for_batches_with_padding(make):
    ids, mask = prompt(101, rows=2), torch.ones(2, 101, dtype=torch.long)
    mask[1, :13] = 0
    cache = make(tiny("llama").to(torch.bfloat16), repeatable=True)
    given = {"attention_mask": mask, "max_new_tokens": 4, "return_dict_in_generate": True, "output_logits": True}
    cold, warm = (cache.generate(ids, **given) for _ in range(2) if cache.pool.flush())
    assert cache.last_report.cached_tokens > 0
    assert all(torch.equal(a, b) for a, b in zip(cold.logits, warm.logits, strict=True))
