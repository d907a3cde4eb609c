"""The server over a real (tiny, random) model: caching, sampling parameters and cancelling in the engine itself."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stemkv.engines.loading import Loaded
from stemkv.engines.sampling import Sampling, TextEngine, _Logits
from stemkv.engines.transformers import PrefixCache
from stemkv.pool import Pool
from stemkv.tiers.file import FileTier
from stemkv.tiers.memory import MemoryTier

from .harness import EOS, Served, byte_tokenizer, eventually, served

PROMPT = "The rules of the game are simple and never change. " * 6


def tiny_model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, bos_token_id=None, eos_token_id=EOS, pad_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    tiers = [MemoryTier(1 << 24), FileTier(tmp_path_factory.mktemp("s") / "store", max_bytes=1 << 26)]
    loaded = Loaded(tiny_model(), byte_tokenizer(), [], "tiny", 2048)
    cache: list[Any] = []

    def make_cache(progress: Any) -> Any:
        # The pool is made by the harness; the cache finds it when the first request comes.
        cache.append(PrefixCache(loaded.model, Pool(tiers), prefill_chunk=64, block_tokens=16, progress=progress))
        return cache[0]

    engine = TextEngine(loaded, make_cache)
    with served(engine, tiers=tiers, tokenizer=loaded.tokenizer, max_queue=64) as handle:
        cache[0].pool = handle.pool
        yield handle


def answer(handle: Served, **fields: Any) -> str:
    fields = {"max_tokens": 24, "temperature": 0, "logit_bias": {str(EOS): -100}, **fields}
    response = handle.complete(PROMPT, **fields)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def test_the_second_request_starts_from_the_cache_and_says_so(server: Served) -> None:
    prompt = "A sentence that is said here for the first time, and then once more. " * 4
    cold = server.complete(prompt, temperature=0, max_tokens=8)
    assert cold.headers["cache-status"].endswith('miss=unseen"')
    assert server.pool.flush(10)
    warm = server.complete(prompt, temperature=0, max_tokens=8)
    tokens = len(prompt)
    cached = (tokens - 1) // 16 * 16
    assert warm.headers["cache-status"] == f'stemkv; hit; detail="cached={cached}; prompt={tokens}; tier=memory"'
    assert warm.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    assert warm.json()["choices"] == cold.json()["choices"]
    assert server.metric("stemkv_hit_tokens_total") >= cached
    lookups = server.metric("stemkv_prompt_tokens_total")
    assert lookups == server.metric("stemkv_hit_tokens_total") + server.metric("stemkv_miss_tokens_total")


def test_a_salt_shares_nothing_with_other_salts_or_none(server: Served) -> None:
    prompt = "The same words for everybody, and everybody computes them alone. " * 3

    def cached(**fields: str) -> int:
        response = server.complete(prompt, temperature=0, max_tokens=1, **fields)
        assert server.pool.flush(10)
        return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached() == 0
    assert cached(cache_salt="a") == 0
    assert cached(cache_salt="b") == 0
    assert all(cached(**fields) > 0 for fields in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}))


def test_greedy_is_repeatable_and_equals_the_model_alone(server: Served) -> None:
    text = answer(server)
    assert answer(server) == text
    ids = torch.tensor([list(PROMPT.encode())])
    model = server.engine._model
    alone = model.generate(ids, max_new_tokens=24, do_sample=False, suppress_tokens=[EOS], pad_token_id=EOS)
    assert byte_tokenizer().decode(alone[0, ids.shape[1] :]).rstrip("\ufffd").startswith(text.rstrip("\ufffd")[:8])


def test_a_seed_makes_sampling_repeatable(server: Served) -> None:
    first = answer(server, temperature=1.5, seed=11)
    assert answer(server, temperature=1.5, seed=11) == first
    assert answer(server, temperature=1.5, seed=12) != first
    assert answer(server, temperature=1.5) != answer(server, temperature=1.5)
    choices = server.complete(PROMPT, temperature=1.5, seed=11, n=2, max_tokens=24).json()["choices"]
    assert choices[0]["text"] != choices[1]["text"]


def test_top_k_of_one_is_greedy(server: Served) -> None:
    assert answer(server, temperature=2, top_k=1) == answer(server)
    assert answer(server, temperature=2, top_p=1e-9) == answer(server)
    assert answer(server, temperature=1e-30) == answer(server)


def tokens_of(handle: Served, **fields: Any) -> list[str]:
    fields = {"max_tokens": 40, "temperature": 0, "logprobs": 1, **fields}
    return list(handle.complete(PROMPT, **fields).json()["choices"][0]["logprobs"]["tokens"])


def test_logit_bias_forces_and_forbids(server: Served) -> None:
    assert answer(server, logit_bias={str(ord("x")): 100}) == "x" * 24
    ended = server.complete(PROMPT, logit_bias={str(EOS): 100}).json()
    assert ended["choices"][0] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}
    assert ended["usage"]["completion_tokens"] == 1


def test_penalties_make_repetition_rarer(server: Served) -> None:
    favourite = {str(ord("x")): 1.9, str(EOS): -100}
    for penalty in ({"presence_penalty": 2}, {"frequency_penalty": 2}):
        plain = tokens_of(server, logit_bias=favourite)
        less = tokens_of(server, logit_bias=favourite, **penalty)
        assert len(set(less)) > len(set(plain)), penalty
    letters = tokens_of(server, frequency_penalty=2, logit_bias={**favourite, str(ord("x")): 3})
    assert letters[0] == "x"
    assert letters[1] == "x", "once said costs 2, and 3 were given"
    assert letters.count("x") <= 3


def test_each_penalty_counts_what_it_says() -> None:
    """Presence and frequency: the answer alone; repetition: prompt and answer; the prompt may be a suffix."""
    sampling = Sampling(
        max_tokens=9, presence_penalty=1, frequency_penalty=0.5, repetition_penalty=2, logit_bias={6: 4}
    )
    logits = _Logits([1, 2], sampling)
    scores = torch.tensor([[1.0, 1, -1, 1, 1, 1, 1]])
    begin = logits(torch.tensor([[2]]), scores)  # the engine shows the last token of the prompt only
    assert begin.tolist() == [[1, 0.5, -2, 1, 1, 1, 5]]
    later = logits(torch.tensor([[2, 3, 4, 4]]), scores)
    assert later.tolist() == [[1, 0.5, -2, 0.5 - 1.5, 0.5 - 2, 1, 5]]
    assert scores.tolist() == [[1, 1, -1, 1, 1, 1, 1]], "the model's own scores stay as they are"


def test_logprobs_are_of_the_model_before_temperature_and_bias(server: Served) -> None:
    plain = server.complete(PROMPT, temperature=0, max_tokens=1, logprobs=5).json()["choices"][0]["logprobs"]
    ids = torch.tensor([list(PROMPT.encode())])
    with torch.no_grad():
        expected = server.engine._model(ids).logits[0, -1].float().log_softmax(-1)
    best, _ = expected.max(-1)
    assert plain["token_logprobs"][0] == pytest.approx(float(best), abs=1e-3)
    forced = server.complete(PROMPT, temperature=2, max_tokens=1, logprobs=0, logit_bias={"120": 100}).json()
    shown = forced["choices"][0]["logprobs"]
    assert shown["tokens"] == ["x"]
    assert shown["token_logprobs"][0] == pytest.approx(float(expected[120]), abs=1e-3)


def test_a_stop_string_that_spans_tokens_ends_the_answer(server: Served) -> None:
    alphabet = {str(ord(c)): 100 for c in "ab"}
    full = answer(server, logit_bias=alphabet, temperature=1, seed=3, max_tokens=64)
    stop = full[10:14]
    cut = answer(server, logit_bias=alphabet, temperature=1, seed=3, max_tokens=64, stop=stop)
    assert cut == full[: full.index(stop)]


@pytest.mark.parametrize("chunk", [64, 4096])
def test_a_lost_client_cancels_a_long_prompt(server: Served, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between pieces, and between the layers of a prompt that is computed in one go."""
    monkeypatch.setattr(server.engine._cache, "_chunk", chunk)
    inner = server.engine._model.model.layers[0]
    calls = []

    def slow(*_: object) -> None:
        calls.append(1)
        time.sleep(0.05 if chunk == 64 else 1)

    hook = inner.register_forward_pre_hook(slow)
    prompt = chr(ord("a") + chunk % 23) * 1900
    try:
        with httpx.Client(base_url=server.address) as client, pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json={"prompt": prompt}, timeout=0.4)
        assert eventually(lambda: server.worker.running == 0)
        assert len(calls) < 25, "1900 tokens are 30 chunks"
    finally:
        hook.remove()
    again = server.complete(prompt, max_tokens=1)
    cached = again.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 64 if chunk == 64 else cached == 0, "what was computed is kept"


def test_progress_is_told_by_layers_and_ends_with_the_prompt() -> None:
    told: list[tuple[int, int]] = []
    loaded = Loaded(tiny_model(), byte_tokenizer(), [], "tiny", 2048)
    pool = Pool([MemoryTier(1 << 20)])
    engine = TextEngine(
        loaded,
        lambda progress: PrefixCache(loaded.model, pool, block_tokens=16, progress=progress),
        lambda done, total: told.append((done, total)),
    )
    engine.generate(
        list(b"x" * 100),
        Sampling(max_tokens=3),
        on_lookup=lambda _: None,
        on_token=lambda *_: False,
        cancelled=lambda: False,
    )
    assert told == [(0, 100), (50, 100), (100, 100), (100, 100)]
    pool.close()


def test_parallel_requests_do_not_mix(server: Served) -> None:
    prompts = [f"{i} " * 40 for i in range(6)]
    alone = [server.complete(p, temperature=0, max_tokens=12).json()["choices"][0]["text"] for p in prompts]
    got: dict[int, str] = {}

    def ask(number: int) -> None:
        fields = {"prompt": prompts[number], "temperature": 0, "max_tokens": 12, "stream": True}
        with httpx.Client(base_url=server.address, timeout=30) as client:
            lines = client.post("/v1/completions", json=fields).text.splitlines()
        parts = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        got[number] = "".join(p["choices"][0]["text"] for p in parts)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[i] for i in range(6)] == alone


def test_the_store_outlives_the_server(tmp_path: Path) -> None:
    loaded = Loaded(tiny_model(), byte_tokenizer(), [], "tiny", 2048)

    def once() -> httpx.Response:
        tiers = [FileTier(tmp_path / "store", max_bytes=1 << 26)]
        cache: list[Any] = []

        def make_cache(progress: Any) -> Any:
            cache.append(PrefixCache(loaded.model, Pool(tiers), block_tokens=16, progress=progress))
            return cache[0]

        with served(TextEngine(loaded, make_cache), tiers=tiers, tokenizer=loaded.tokenizer) as handle:
            cache[0].pool = handle.pool
            response = handle.complete(PROMPT, temperature=0, max_tokens=8)
        assert handle.stored, "stopping finishes the writes"
        return response

    cold, warm = once(), once()
    assert "miss=unseen" in cold.headers["cache-status"]
    assert "tier=file" in warm.headers["cache-status"]
    assert warm.json()["choices"] == cold.json()["choices"]
