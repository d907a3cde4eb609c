"""The connector's counters through vLLM's own hooks: its log line and its Prometheus endpoint."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter as PrometheusCounter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from stemkv.metrics import COUNTERS, Metrics

_LABELS = {
    "lookups": ("outcome",), "miss_tokens": ("cause",), "loaded_blocks": ("tier",), "loaded_bytes": ("tier",),
    "load_seconds": ("tier",), "failed_blocks": ("tier", "cause"), "lost_blocks": ("cause",), "known_blocks": ("tier",),
    "stored_blocks": ("tier", "by"), "stored_bytes": ("tier", "by"), "unstored_blocks": ("tier", "cause", "by"),
    "tier_faults": ("tier", "call"), "engine_faults": ("call",),
}  # fmt: skip
"""Labels of each counter; the others have none."""
_HELP = dict(COUNTERS) | {"engine_faults": "Calls of vLLM in which the connector failed; it went on without the cache."}
_Key = tuple[str, ...]
"""A counter's name and the values of its labels."""


def _encode(key: _Key) -> str:
    return "|".join(key)


@dataclass
class StemKVStats(KVConnectorStats):
    """Increments since the last report, by ``name|label|label``."""

    def reset(self) -> None:
        """Start anew."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: Any) -> StemKVStats:
        """Add another rank's or interval's increments."""
        for key, value in other.data.items():
            self.data[key] = float(self.data.get(key, 0.0)) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Totals of the interval, for the log."""
        totals: Counter[str] = Counter()
        for key, value in self.data.items():
            totals[key.partition("|")[0]] += value
        return {f"stemkv {name}": round(value, 3) for name, value in sorted(totals.items())}

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not self.data


class Since:
    """What counters gained since the last look."""

    def __init__(self) -> None:
        self._before: dict[_Key, float] = {}

    def stats(self, metrics: Metrics, faults: Counter[str]) -> StemKVStats | None:
        """The increments, or None if there are none."""
        now: dict[_Key, float] = {("engine_faults", call): count for call, count in faults.items()}
        for (name, labels), value in metrics.snapshot().items():
            given = dict(labels)
            key: _Key = (name, *(given.get(label, "") for label in _LABELS.get(name, ())))
            now[key] = value
        gained = {_encode(k): v - self._before.get(k, 0) for k, v in now.items() if v != self._before.get(k, 0)}
        self._before = now
        return StemKVStats(data=gained) if gained else None


class StemKVProm(KVConnectorPromMetrics):
    """Counters ``vllm:stemkv_<name>``, labelled like vLLM's own plus ours."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        make = metric_types[PrometheusCounter]
        self._counters = {
            name: make(name=f"vllm:stemkv_{name}", documentation=text, labelnames=[*labelnames, *_LABELS.get(name, ())])
            for name, text in _HELP.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one report."""
        engine = [str(value) for value in self.per_engine_labelvalues[engine_idx]]
        for key, value in transfer_stats_data.items():
            name, *labels = key.split("|")
            if name in self._counters and value > 0:
                self._counters[name].labels(*engine, *labels).inc(value)
