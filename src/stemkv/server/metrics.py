"""What Prometheus sees: the pool's counters, the tiers' sizes, the queue, and times of requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from stemkv.metrics import COUNTERS, Labels
from stemkv.pool import Pool
from stemkv.server.worker import Worker

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each counter, that nobody here reads

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)


class ServerMetrics:
    """The instruments of one server, in a registry of its own."""

    def __init__(self, pool: Pool, worker: Worker) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_PoolCollector(pool))
        self._registry.register(_WorkerCollector(worker))
        self.requests = Counter(
            "stemkv_requests", "HTTP requests, by endpoint and status.", ("endpoint", "code"), registry=self._registry
        )
        self.duration = Histogram(
            "stemkv_request_seconds",
            "Seconds from the arrival of a request for a completion to the last byte of its answer.",
            ("endpoint",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.first_token = Histogram(
            "stemkv_first_token_seconds",
            "Seconds from queueing to the first token, by what the cache did: hit, partial or miss.",
            ("cache",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.generated = Counter("stemkv_generated_tokens", "Tokens generated.", registry=self._registry)

    def expose(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)


class _PoolCollector(Collector):
    """Reads the pool when asked: nothing is counted twice, and counters cannot drift apart."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def collect(self) -> Iterable[Metric]:
        yield from self._counters()
        yield from self._tiers()
        yield GaugeMetricFamily(
            "stemkv_write_queue_bytes", "Bytes of new blocks that wait to be stored.", self._pool.writer.queued_bytes
        )

    def _counters(self) -> Iterable[Metric]:
        by_name: dict[str, list[tuple[Labels, float]]] = defaultdict(list)
        for (name, labels), value in self._pool.metrics.snapshot().items():
            by_name[name].append((labels, value))
        for name, text in COUNTERS.items():
            found = by_name.get(name, [])
            keys = sorted({key for labels, _ in found for key, _ in labels})
            family = CounterMetricFamily(f"stemkv_{name}", text, labels=keys)
            for labels, value in found:
                family.add_metric([dict(labels).get(key, "") for key in keys], value)
            yield family

    def _tiers(self) -> Iterable[Metric]:
        stats = [(tier.name, tier.stats()) for tier in self._pool.tiers]
        gauges = {
            "blocks": "Blocks in the tier.",
            "bytes": "Bytes in the tier.",
            "max_bytes": "Most bytes the tier may hold.",
            "read_only": "1 if the tier cannot be written.",
        }
        for field, text in gauges.items():
            gauge = GaugeMetricFamily(f"stemkv_tier_{field}", text, labels=["tier"])
            for name, one in stats:
                gauge.add_metric([name], float(getattr(one, field)))
            yield gauge
        counters = {
            "evicted": "Blocks removed to make room since the tier was opened.",
            "quarantined": "Blocks put aside because they did not verify, since the tier was opened.",
        }
        for field, text in counters.items():
            counter = CounterMetricFamily(f"stemkv_tier_{field}_blocks", text, labels=["tier"])
            for name, one in stats:
                counter.add_metric([name], float(getattr(one, field)))
            yield counter


class _WorkerCollector(Collector):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("stemkv_queue_requests", "Requests that wait for the model.", self._worker.waiting)
        yield GaugeMetricFamily("stemkv_running_requests", "Requests being computed (0 or 1).", self._worker.running)
