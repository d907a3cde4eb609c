"""The installed vLLM's interface, its metrics and events, and what start-up says to a wrong configuration."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.config import KVEventsConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadPromMetrics
from vllm.v1.kv_offload.base import LookupResult, Medium
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from stemkv.engines.vllm_tier import StemKVTier
from stemkv.errors import ConfigError, StoreError

from .harness import Engine, key, keys

METHODS = [
    name
    for name, value in vars(SecondaryTierManager).items()
    if callable(value) and not name.startswith("_") and inspect.isfunction(value)
]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_takes_what_vllm_gives_it(name: str) -> None:
    theirs = list(inspect.signature(getattr(SecondaryTierManager, name)).parameters)
    ours = list(inspect.signature(getattr(StemKVTier, name)).parameters)
    assert ours == theirs


def test_nothing_abstract_is_left() -> None:
    assert not StemKVTier.__abstractmethods__
    assert list(inspect.signature(StemKVTier.build_metric_definitions).parameters) == list(
        inspect.signature(SecondaryTierManager.build_metric_definitions).parameters
    )


def test_the_constructor_takes_what_vllms_factory_gives_it() -> None:
    factory = inspect.getsource(SecondaryTierFactory.create_secondary_tier)
    for name in ("offloading_spec", "primary_kv_view", "tier_type", "backpressure_detector"):
        assert f"{name}=" in factory
        assert name in inspect.signature(StemKVTier.__init__).parameters


def test_vllms_backpressure_is_vllms(start: Any) -> None:
    engine: Engine = start(entry={"backpressure": {"backpressure_cls": "EMABackpressureDetector"}})
    assert engine.tier.bp_detector is not None
    engine.store(keys(3))
    engine.connector.reset_cache()


def test_hits_are_told_as_disk_hits(start: Any) -> None:
    engine: Engine = start()
    engine.store(keys(1))
    engine.drop_primary()
    context = engine.request(keys(1))
    while engine.manager.lookup(key(0), context) is not LookupResult.HIT:
        engine.step()
    assert engine.manager.get_load_source(key(0), context).value == "disk"
    engine.manager.on_request_finished(context)


# -- metrics -----------------------------------------------------------------------------------------------------


def prometheus(engine: Engine) -> tuple[Any, CollectorRegistry]:
    """VLLM's own exporter of the offloading connector's numbers."""
    registry = CollectorRegistry()
    kinds: dict[Any, Any] = {
        base: type(base.__name__, (base,), {"__init__": _registering(base, registry)})
        for base in (Counter, Gauge, Histogram)
    }
    return OffloadPromMetrics(engine.config, kinds, ["engine"], {0: ["0"]}), registry


def _registering(base: Any, registry: CollectorRegistry) -> Any:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        # A metric with labels makes children of its own class, which are not registered.
        base.__init__(self, *args, **{"registry": registry} | kwargs)

    return init


def test_every_counter_reaches_prometheus_and_none_is_counted_twice(start: Any) -> None:
    engine: Engine = start()
    exporter, registry = prometheus(engine)
    engine.store(keys(3))
    engine.drop_primary()
    engine.load(keys(4))
    for _ in range(2):
        stats = engine.manager.get_stats()
        if stats is not None:
            exporter.observe(stats.data, 0)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"vllm:stemkv_tier_{name}_total", {"engine": "0", **labels})

    assert value("asked_keys", result="hit") == 3
    assert value("asked_keys", result="miss") == 1
    assert value("load_results", result="loaded") == 3
    assert value("store_results", result="stored") == 3
    assert value("stored_blocks", tier="file", by="store") == 3
    assert value("loaded_blocks", tier="file") == 3


def test_counters_add_up(start: Any) -> None:
    engine: Engine = start()
    engine.store(keys(3))
    engine.store(keys(2, text=1))
    engine.drop_primary()
    engine.load(keys(5))
    total: dict[str, float] = {}
    for (name, _), value in engine.counters().items():
        total[name] = total.get(name, 0) + value
    assert total["offered_blocks"] == total["stored_blocks"] + total.get("known_blocks", 0)
    assert total["wanted_blocks"] == total["loaded_blocks"] + total.get("lost_blocks", 0)
    assert engine.counters() == {}


# -- events ------------------------------------------------------------------------------------------------------


def with_events(start: Any) -> Engine:
    engine: Engine = start(
        entry={"enable_kv_events": True, "locality": "LOCAL"},
        arguments={"kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null")},
    )
    return engine


def own_events(engine: Engine) -> list[tuple[frozenset[bytes], bool]]:
    events = [e for e in engine.manager.take_events() if e.medium is Medium.STORAGE]
    assert all(e.locality is not None and e.locality.value == "LOCAL" for e in events)
    return [(frozenset(e.keys), e.removed) for e in events]


def test_stored_and_lost_blocks_are_told_once(start: Any, tmp_path: Path) -> None:
    engine = with_events(start)
    engine.store(keys(3))
    assert own_events(engine) == [(frozenset(keys(3)), False)]
    engine.drop_primary()
    (path,) = (tmp_path / "pool" / "blocks").rglob(f"{engine.tier._names.ref(key(1)).key.hex()}.safetensors")
    path.write_bytes(bytes(path.stat().st_size))
    engine.load(keys(3))
    assert own_events(engine) == [(frozenset([key(1)]), True)]
    assert own_events(engine) == []


def test_events_reach_vllms_publisher(start: Any) -> None:
    engine = with_events(start)
    engine.store(keys(2))
    media = {getattr(event, "medium", None) for event in engine.connector.take_events()}
    assert "STORAGE" in media


def test_no_events_unless_asked_for(start: Any) -> None:
    engine: Engine = start()
    engine.store(keys(2))
    assert list(engine.tier.take_events()) == []


# -- configuration -----------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "unknown setting": ({"stoer": "/x"}, {}, "unknown setting 'stoer'"),
    "unknown key": ({}, {"stoer": "/x"}, "unknown key 'stoer' in the StemKVTier entry"),
    "block_tokens": ({"block_tokens": 64}, {}, "block_tokens is set by vLLM here"),
    "the connector's": ({"share_wait_s": 1}, {}, "share_wait_s is a setting of the connector"),
    "no store": ({"store": ""}, {}, "store is empty"),
    "timeout": ({"store_timeout_s": 0}, {}, "store_timeout_s = 0: it is a number of seconds"),
    "lookup timeout": ({"lookup_timeout_s": "soon"}, {}, "lookup_timeout_s = 'soon' is not a number"),
    "threads": ({"load_threads": 2.5}, {}, "load_threads = 2.5: it is a number from 1 to 64"),
    "tenant": ({"tenant": 7}, {}, "tenant = 7: it is text"),
    "weights": ({"weights": [1]}, {}, "weights = .*: it is a list of paths"),
    "after_reset": ({"after_reset": "forget"}, {}, "after_reset = 'forget': choose apart or keep"),
    "events": ({}, {"enable_kv_events": "yes"}, "enable_kv_events = 'yes': it is true or false"),
    "locality": ({}, {"locality": "NEAR"}, "locality = 'NEAR': choose LOCAL or REMOTE"),
    "server": ({"port": 1}, {}, "port is a setting of 'stemkv serve'"),
    "seal": ({"seal": True}, {}, "seal needs secret_file"),
}


@pytest.mark.parametrize(("stemkv", "entry", "sentence"), list(WRONG.values()), ids=list(WRONG))
def test_a_wrong_configuration_is_refused_with_one_sentence(
    start: Any, stemkv: dict[str, Any], entry: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence) as refused:
        start(stemkv, entry=entry)
    assert "\n" not in str(refused.value)


def test_settings_that_are_no_table_are_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="must be a table of settings"):
        Engine(model, ["store"])


@pytest.mark.parametrize("wrong", [{"stoer": 1}, {"store": "/proc/nowhere"}, {"secret_file": "/nowhere"}])
def test_off_means_vllm_starts_and_everything_is_a_miss(
    start: Any, wrong: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    engine: Engine = start({**wrong, "on_error": "off"})
    assert "stemkv's vLLM tier is off: " in caplog.text
    engine.store(keys(3))
    engine.drop_primary()
    assert set(engine.lookup(keys(3)).values()) == {LookupResult.MISS}
    engine.connector.reset_cache()
    assert engine.counters() == {}


@pytest.mark.parametrize("off", [False, True])
def test_a_vllm_that_is_not_what_it_was_is_one_sentence_or_no_cache(
    start: Any, off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(*_: Any) -> Any:
        raise AttributeError("no such\nthing")

    monkeypatch.setattr("stemkv.engines.vllm_tier.check_supported", changed)
    if off:
        assert start({"on_error": "off"}).lookup(keys(1)) == {key(0): LookupResult.MISS}
        return
    with pytest.raises(ConfigError, match='AttributeError: no such thing; "on_error": "off" starts vLLM without'):
        start()


def test_a_store_that_cannot_be_opened_is_refused_and_leaves_no_shared_memory(start: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError):
        start({"store": str(tmp_path / "file")})
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("vllm_offload_stemkv-test-")]


def test_shutdown_leaves_no_shared_memory_and_may_come_twice(start: Any) -> None:
    engine: Engine = start()
    engine.store(keys(2))
    engine.stop()
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("vllm_offload_stemkv-test-")]
    engine.tier.shutdown()
    assert engine.tier.lookup(key(0), engine.request) is LookupResult.MISS
