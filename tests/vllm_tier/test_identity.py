"""A hash alone is no identity: other weights, settings, tenants never meet; what cannot be told apart is refused."""

from __future__ import annotations

import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult

from stemkv.engines import _vllm_tier_identity as identity
from stemkv.engines.vllm_tier import StemKVTier
from stemkv.errors import ConfigError, ModelError, UnsupportedModelError

from .harness import Engine, keys, make_model


def stored(start: Any, **how: Any) -> None:
    engine: Engine = start(**how)
    engine.store(keys(2))
    engine.stop()


def finds(start: Any, **how: Any) -> bool:
    engine: Engine = start(**how)
    found = set(engine.lookup(keys(2)).values())
    engine.stop()
    assert len(found) == 1
    return found == {LookupResult.HIT}


def test_other_weights_under_the_same_name_miss_and_the_first_ones_hit_again(start: Any, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", weights=b"first")
    stored(start, model=model)
    make_model(model, weights=b"other")
    assert not finds(start, model=model)
    make_model(model, weights=b"first")
    assert finds(start, model=model)


def test_the_same_weights_elsewhere_hit(start: Any, tmp_path: Path) -> None:
    stored(start, model=make_model(tmp_path / "one"))
    assert finds(start, model=make_model(tmp_path / "two"))


CHANGES: dict[str, dict[str, Any]] = {
    "generation": {"stemkv": {"generation": 1}},
    "tenant": {"stemkv": {"tenant": "b"}},
    "dtype": {"arguments": {"dtype": "float32"}},
    "rope": {"arguments": {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}}},
    "hash algorithm": {"arguments": {"prefix_caching_hash_algo": "sha256_cbor"}},
    "chunk": {"extra": {"blocks_per_chunk": 2}},
}


@pytest.mark.parametrize("change", list(CHANGES.values()), ids=list(CHANGES))
def test_whatever_shapes_kv_or_keeps_tenants_apart_is_part_of_the_name(start: Any, change: dict[str, Any]) -> None:
    stored(start)
    assert not finds(start, **change)
    assert finds(start)


def test_another_secret_misses(start: Any, tmp_path: Path) -> None:
    names = []
    for name in ("a", "b"):
        path = tmp_path / name
        path.write_bytes(os.urandom(32))
        path.chmod(0o600)
        names.append({"secret_file": str(path)})
    stored(start, stemkv=names[0])
    assert not finds(start, stemkv=names[1])
    assert finds(start, stemkv=names[0])


def test_another_hash_seed_misses(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    stored(start)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert not finds(start)
    monkeypatch.delenv("PYTHONHASHSEED")
    assert finds(start)


def test_the_cause_of_a_miss_is_counted_and_what_differs_is_logged_once(
    start: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model(tmp_path / "model", weights=b"first")
    stored(start, model=model)
    make_model(model, weights=b"other")
    engine: Engine = start(model=model)
    for _ in range(2):
        engine.lookup(keys(2))
    assert engine.counters()["first_misses", ("identity",)] == 2
    engine.store(keys(1, text=1))
    engine.lookup(keys(1, text=2))
    assert engine.counters()["first_misses", ("unseen",)] == 1
    said = [r.getMessage() for r in caplog.records if "computed with another" in r.getMessage()]
    assert said == ["KV in the store was computed with another weights_digest: it is not used"]


# -- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_hashes_that_two_texts_may_share_are_refused_by_name(start: Any, algorithm: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"prefix_caching_hash_algo is '{algorithm}', whose hashes two texts may share"
    ):
        start(arguments={"prefix_caching_hash_algo": algorithm})


def test_lora_is_refused_by_name(start: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=r"LoRA is enabled, .* know adapters by name and path"):
        start(arguments={"enable_lora": True})


def pretend(**changes: Any) -> Any:
    model = types.SimpleNamespace(is_multimodal_model=False, supports_multimodal_inputs=False)
    config = types.SimpleNamespace(lora_config=None, model_config=model, cache_config=types.SimpleNamespace())
    for name, value in changes.items():
        setattr(model if hasattr(model, name) else config.cache_config, name, value)
    return config


def test_media_are_refused_unless_switched_off() -> None:
    with pytest.raises(UnsupportedModelError, match="takes images, audio or video"):
        identity.check_supported(pretend(is_multimodal_model=True, supports_multimodal_inputs=True))
    identity.check_supported(pretend(is_multimodal_model=True, supports_multimodal_inputs=False))


@pytest.mark.parametrize("name", ["calculate_kv_scales", "kv_sharing_fast_prefill"])
def test_kv_that_weights_do_not_determine_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is not supported"):
        identity.check_supported(pretend(**{name: True}))


def test_a_vllm_that_starts_hashes_from_random_bytes_needs_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("vllm.v1.core.kv_cache_utils.DEFAULT_NONE_HASH_SEED")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    config = types.SimpleNamespace(cache_config=types.SimpleNamespace(prefix_caching_hash_algo="sha256"))
    with pytest.raises(ConfigError, match="starts its hashes from random bytes: set PYTHONHASHSEED"):
        identity.hash_scheme(config)
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert identity.hash_scheme(config) == "vllm/sha256/7"


def test_a_tier_that_cannot_see_the_engine_is_refused() -> None:
    view = memoryview(bytearray(8192)).cast("B", (1, 8192))
    with pytest.raises(ConfigError, match="does not show its configuration to the tier"):
        StemKVTier(types.SimpleNamespace(), view, "StemKVTier", stemkv={})


def test_weights_that_are_not_files_need_naming(start: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="load_format dummy"):
        start(arguments={"load_format": "dummy"})
    model = make_model(tmp_path / "model")
    elsewhere = tmp_path / "elsewhere.safetensors"
    elsewhere.write_bytes((model / "model.safetensors").read_bytes())
    stored(start, model=model, stemkv={"weights": [str(elsewhere)]}, arguments={"load_format": "dummy"})
    assert finds(start, model=model)
    with pytest.raises(ModelError, match="cannot read the weight file"):
        start(stemkv={"weights": str(tmp_path / "nothing")})


# -- reset -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [False, True])
def test_after_a_reset_nothing_older_is_used_unless_told_to_keep_it(start: Any, keep: bool) -> None:
    engine: Engine = start({"after_reset": "keep"} if keep else {})
    content = engine.store(keys(4))
    engine.connector.reset_cache()
    assert (engine.load(keys(4)) == content) is keep
    newer = engine.store(keys(4, text=1), fill=1)
    engine.drop_primary()
    assert engine.load(keys(4, text=1)) == newer
    engine.stop()
    again: Engine = start()
    assert (set(again.lookup(keys(4, text=1)).values()) == {LookupResult.HIT}) is keep
    assert again.load(keys(4)) == content


def test_a_request_that_lives_through_a_reset_finds_nothing_older(start: Any) -> None:
    engine: Engine = start()
    engine.store(keys(1))
    context = engine.request(keys(1))
    while engine.tier.lookup(keys(1)[0], context) is not LookupResult.HIT:
        engine.step()
    engine.connector.reset_cache()
    while (found := engine.tier.lookup(keys(1)[0], context)) is LookupResult.RETRY:
        engine.step()
    assert found is LookupResult.MISS
    engine.manager.on_request_finished(context)


def test_a_reset_ends_what_is_under_way(start: Any, hang: Callable[[str], None]) -> None:
    engine: Engine = start({"store_timeout_s": 0.3})
    hang("put")
    engine.store(keys(4), settle=False)
    engine.connector.reset_cache()
    assert not engine.manager.has_pending_work()
