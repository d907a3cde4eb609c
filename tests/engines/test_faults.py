"""A fault of the cache never reaches the caller: the answer is computed, the fault counted."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

from stemkv.misses import Cause, Miss
from stemkv.pool import Pool
from stemkv.tiers.file import FileTier
from stemkv.tiers.memory import MemoryTier

from .conftest import prompt, tiny


class Broken(MemoryTier):
    """A tier of which one method can be made to raise or to report a miss."""

    broken = ""
    miss_after: int | None = None

    def contains(self, keys):
        if self.broken == "contains":
            raise RuntimeError("injected")
        return super().contains(keys)

    def get(self, refs, sink, **settings):
        if self.broken == "get":
            raise RuntimeError("injected")
        found = super().get(refs, sink, **settings)
        if self.miss_after is None:
            return found
        return [
            Miss(Cause.IO_ERROR, "injected") if r.index >= self.miss_after else f
            for r, f in zip(refs, found, strict=True)
        ]

    def put(self, records):
        if self.broken == "put":
            raise RuntimeError("injected")
        return super().put(records)


@pytest.fixture
def broken():
    tier = Broken(max_bytes=1 << 28)
    pool = Pool([tier])
    yield pool
    tier.broken = ""
    pool.close()


def check(model, cache, ids):
    out = cache.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(out, model.generate(ids, max_new_tokens=6, do_sample=False))


@pytest.mark.parametrize("method", ["contains", "get", "put"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
def test_a_tier_that_raises(method, family, make, broken, caplog):
    caplog.set_level(logging.CRITICAL, "stemkv")
    model = tiny(family)
    cache, ids = make(model, broken), prompt(100)
    if method == "get":
        check(model, cache, ids)
        broken.flush()
    broken.tiers[0].broken = method
    for _ in range(2):
        check(model, cache, ids)
        broken.flush()
    broken.tiers[0].broken = ""
    check(model, cache, ids)
    broken.flush()
    check(model, cache, ids)
    assert cache.last_report.cached_tokens == 96


@pytest.mark.parametrize(("family", "left"), [("llama", 48), ("gemma3_text", 48), ("qwen3_next", 0)])
def test_blocks_that_fail_to_load_shorten_the_run(family, left, make, broken):
    model = tiny(family)
    cache, ids = make(model, broken), prompt(100)
    check(model, cache, ids)
    broken.flush()
    broken.tiers[0].miss_after = 3
    check(model, cache, ids)
    assert cache.last_report.cached_tokens == left
    assert cache.last_report.miss == Miss(Cause.IO_ERROR, "injected")
    assert cache.faults == 0


def test_the_first_fault_is_logged_with_its_traceback_the_others_are_not(make, llama, pool, caplog, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("injected")

    cache = make(llama)
    monkeypatch.setattr(pool, "match", fail)
    with caplog.at_level(logging.WARNING, "stemkv"):
        for _ in range(3):
            check(llama, cache, prompt(100))
    assert [r.exc_info is not None for r in caplog.records] == [True]
    assert cache.faults == 3
    assert str(cache.last_report.miss) == "io-error:RuntimeError"


def test_a_fault_while_storing_ends_nothing(make, llama, pool, monkeypatch, caplog):
    def fail(*_, **__):
        raise RuntimeError("injected")

    caplog.set_level(logging.CRITICAL, "stemkv")
    cache = make(llama)
    monkeypatch.setattr(pool, "store", fail)
    check(llama, cache, prompt(100))
    assert cache.faults == 2  # the prompt's blocks and the answer's


def test_a_flipped_bit_on_disk_is_computed_again(make, tmp_path):
    model, ids = tiny("llama"), prompt(100)
    pool = Pool([FileTier(tmp_path / "store", max_bytes=1 << 28)])
    cache = make(model, pool)
    check(model, cache, ids)
    pool.flush()
    for path in (tmp_path / "store").rglob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data)
    check(model, cache, ids)
    assert str(cache.last_report.miss) == "bad-tag"
    pool.close()


def test_errors_of_generate_itself_do_reach_the_caller(make, llama, pool):
    cache = make(llama)
    with pytest.raises(ValueError, match="num_beams"):
        cache.generate(prompt(40), max_new_tokens=2, num_beams=2, num_return_sequences=3, do_sample=False)
    check(llama, cache, prompt(40))


def test_an_interrupted_answer_keeps_the_prompt(make, llama, pool):
    class Gone:
        count = 0

        def put(self, value):
            self.count += 1
            if self.count > 3:
                raise ConnectionResetError

    cache = make(llama)
    with pytest.raises(ConnectionResetError):
        cache.generate(prompt(100), max_new_tokens=20, streamer=Gone())
    pool.flush()
    check(llama, cache, prompt(100))
    assert cache.last_report.cached_tokens == 96
    assert "prepare_inputs_for_generation" not in llama.__dict__


def test_an_interrupted_long_prompt_keeps_its_chunks(make, llama, pool):
    def cancel(done, total):
        if done >= 64:
            raise KeyboardInterrupt

    cache = make(llama, prefill_chunk=32, progress=cancel)
    with pytest.raises(KeyboardInterrupt):
        cache.generate(prompt(200), max_new_tokens=2)
    pool.flush()
    cache.progress = None
    check(llama, cache, prompt(200))
    assert cache.last_report.cached_tokens == 64


def test_a_closed_pool_only_means_computing(make, llama):
    pool = Pool([MemoryTier(max_bytes=1 << 26)])
    cache = make(llama, pool)
    pool.close()
    check(llama, cache, prompt(100))
    assert cache.last_report.cached_tokens == 0


def test_every_prompt_token_is_a_hit_or_a_miss_with_one_cause(make, pool):
    model = tiny("llama")
    cache, lookups, tokens = make(model), 0, 0
    for length in (3, 100, 100, 120, 200, 96, 97):
        cache.generate(prompt(length), max_new_tokens=2)
        pool.flush()
        lookups, tokens = lookups + 1, tokens + length
    cache.generate(prompt(50, rows=3), max_new_tokens=2)
    cache.generate(prompt(50), max_new_tokens=2, use_cache=False)
    totals = {name: pool.metrics.total(name) for name in ("lookups", "prompt_tokens", "hit_tokens", "miss_tokens")}
    assert totals["lookups"] == lookups + 4
    assert totals["prompt_tokens"] == tokens + 200
    assert totals["prompt_tokens"] == totals["hit_tokens"] + totals["miss_tokens"]
    assert pool.metrics.total("miss_tokens", cause="too-short") == 3
    assert pool.metrics.total("miss_tokens", cause="not-cacheable") == 50


def test_threads_take_turns(make, llama, pool):
    cache, failures = make(llama), []

    def work(seed):
        try:
            check(llama, cache, prompt(80, seed=seed % 3))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
