"""Real vLLM requests, hashed by vLLM, through the real scheduler side of its offloading connector."""

from __future__ import annotations

import time
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.request import Request

from .harness import Engine

BLOCK = 32


def request(engine: Engine, tokens: list[int], salt: str | None = None) -> Request:
    """A request as vLLM's engine core makes it."""
    hash_function = get_hash_fn_by_name(engine.config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_function)
    engine._requests += 1
    return Request(
        request_id=f"real-{engine._requests}",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        cache_salt=salt,
        block_hasher=get_request_block_hasher(BLOCK, hash_function),
    )


def store(engine: Engine, one: Request) -> None:
    engine.store([bytes(make_offload_key(h, 0)) for h in one.block_hashes])
    engine.drop_primary()


def offered(engine: Engine, one: Request, computed: int = 0) -> int:
    """Tokens that the scheduler is offered for a request."""
    engine.connector.on_new_request(one)
    end = time.monotonic() + 20
    while True:
        tokens, _ = engine.connector.get_num_new_matched_tokens(one, computed)
        if tokens is not None:
            return tokens
        assert time.monotonic() < end, "a request would wait for ever"
        engine.step()
        time.sleep(0.002)


TEXT = [7 * n % 61 for n in range(4 * BLOCK)]


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_a_request_is_offered_what_is_stored_of_its_text(start: Any, algorithm: str) -> None:
    engine: Engine = start(arguments={"prefix_caching_hash_algo": algorithm})
    store(engine, request(engine, TEXT))
    assert offered(engine, request(engine, TEXT)) == 4 * BLOCK
    assert offered(engine, request(engine, [*TEXT, 1, 2, 3])) == 4 * BLOCK
    assert offered(engine, request(engine, TEXT[: 2 * BLOCK + 5])) == 2 * BLOCK
    assert offered(engine, request(engine, [*TEXT[:BLOCK], *TEXT[:BLOCK]])) == BLOCK
    assert offered(engine, request(engine, [9, *TEXT])) == 0
    assert offered(engine, request(engine, TEXT), computed=BLOCK) == 3 * BLOCK


def test_requests_with_another_salt_share_nothing(start: Any) -> None:
    engine: Engine = start()
    store(engine, request(engine, TEXT, salt="a"))
    assert offered(engine, request(engine, TEXT, salt="b")) == 0
    assert offered(engine, request(engine, TEXT)) == 0
    assert offered(engine, request(engine, TEXT, salt="a")) == 4 * BLOCK


def test_a_request_is_offered_the_text_in_front_of_a_damaged_block(start: Any, tmp_path: Any) -> None:
    engine: Engine = start()
    one = request(engine, TEXT)
    store(engine, one)
    name = engine.tier._names.ref(bytes(make_offload_key(one.block_hashes[2], 0))).key.hex()
    (path,) = (tmp_path / "pool" / "blocks").rglob(f"{name}.safetensors")
    path.write_bytes(bytes(path.stat().st_size))
    assert offered(engine, request(engine, TEXT)) == 2 * BLOCK


def test_a_restarted_engine_offers_the_same(start: Any) -> None:
    engine: Engine = start()
    store(engine, request(engine, TEXT))
    engine.stop()
    again: Engine = start()
    assert offered(again, request(again, TEXT)) == 4 * BLOCK
