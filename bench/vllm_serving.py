"""stemkv behind a real vLLM server on the CPU: SmolLM2-135M in bf16, real HTTP, arms side by side.

Run by ``make bench-vllm`` with the Python of ``.venv-vllm``. Servers of both arms of a comparison are up at the same
time and take turns, so that drift of the machine meets both.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from harness import Bench, interleaved

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.vllm.models import smollm2
from tests.vllm.server import Server

LONG, POLICY, QUESTION, ANSWER = 7_800, 2_000, 24, 16
REQUESTS, GAP_S = 60, 0.1
ROUNDS = 5
LENGTH = ("--max-model-len", "8192")
SMALL = ("--max-model-len", "4096", "--num-gpu-blocks-override", "40")
"""40 blocks of 128 tokens: about two policies."""


def ids(seed: int, count: int) -> list[int]:
    """Random token ids."""
    chooser = random.Random(seed)
    return [chooser.randrange(100, 40_000) for _ in range(count)]


def transfer(store: Path) -> dict[str, Any]:
    """Stemkv with its defaults on ``store``."""
    return {
        "kv_connector": "StemKVConnector", "kv_connector_module_path": "stemkv.engines.vllm_connector",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"stemkv": {"store": str(store), "store_bytes": 4 << 30}},
    }  # fmt: skip


@contextmanager
def serving(store: Path | None, *flags: str) -> Iterator[Server]:
    """A server that has answered two short prompts."""
    with Server(smollm2(), transfer(store) if store else None, *flags) as server:
        for seed in (1, 2):
            server.complete(ids(seed, 300), 2)
        yield server


def first_token(server: Server, prompt: list[int]) -> float:
    """Seconds to the first token."""
    return server.times(prompt, 1)[0]


def from_pool(server: Server, prompt: list[int]) -> float:
    """The same with vLLM's own cache emptied first."""
    server.forget()
    before = server.metrics().get("vllm:external_prefix_cache_hits_total", 0.0)
    took = first_token(server, prompt)
    hits = server.metrics().get("vllm:external_prefix_cache_hits_total", 0.0) - before
    if hits < (len(prompt) - 1) // 128 * 128:
        print(f"  (only {hits:.0f} of {len(prompt)} tokens came from the pool)")
    return took


class Workload(NamedTuple):
    """What the customer-service workload showed."""

    first: list[float]
    whole: list[float]
    seconds: float
    compute: float

    def at(self, share: float, values: Sequence[float]) -> float:
        """A percentile."""
        return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def customer_service(server: Server, policy: list[int]) -> Workload:
    """60 short questions about one policy, arriving at the same times whatever the arm."""
    gaps = random.Random(5)
    arrivals, at = [], 0.0
    for _ in range(REQUESTS):
        arrivals.append(at)
        at += gaps.expovariate(1 / GAP_S)
    results: list[tuple[float, float]] = [(0.0, 0.0)] * REQUESTS
    cpu, started = server.cpu_seconds(), time.perf_counter()

    def one(number: int) -> None:
        time.sleep(max(0.0, arrivals[number] - (time.perf_counter() - started)))
        results[number] = server.times([*policy, *ids(10_000 + number, QUESTION)], ANSWER)

    threads = [threading.Thread(target=one, args=(n,)) for n in range(REQUESTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - started
    return Workload([r[0] for r in results], [r[1] for r in results], took, server.cpu_seconds() - cpu)


def cold(bench: Bench, plain: Server, ours: Server) -> list[float]:
    """Cold prompts without and with the connector; returns the seconds of the long one without."""
    seeds = iter(range(100, 200))
    runs = interleaved(
        {
            "with": lambda: first_token(ours, ids(next(seeds), POLICY)),
            "without": lambda: first_token(plain, ids(next(seeds), POLICY)),
        },
        ROUNDS,
    )
    bench.row("vllm-cold-2000-with-connector", "s", runs["with"], against="vLLM without it",
              against_runs=runs["without"], reach="<= 1.02")  # fmt: skip
    return [first_token(plain, ids(seed, LONG)) for seed in (8, 9)]


def warm(bench: Bench, own: Server, restarted: Server, cold_s: list[float]) -> None:
    """The long prompt from the pool after a restart, beside vLLM's own cache."""
    prompt = ids(7, LONG)
    first_token(own, prompt)
    runs = interleaved({"pool": lambda: from_pool(restarted, prompt), "own": lambda: first_token(own, prompt)}, ROUNDS)
    bench.row("vllm-ttft-7800-after-restart", "s", runs["pool"], against="cold, prefix caching off",
              against_runs=cold_s, reach=">= 30", inverse=True)  # fmt: skip
    bench.row("vllm-ttft-7800-own-cache", "s", runs["own"], against="cold, prefix caching off", against_runs=cold_s,
              inverse=True)  # fmt: skip
    bench.row("vllm-ttft-7800-over-own-cache", "s", runs["pool"], against="vLLM's own cache in one process",
              against_runs=runs["own"], reach="<= 1.15")  # fmt: skip


def compare_workloads(bench: Bench, off: Workload, own: Workload, ours: Workload) -> None:
    """Rows of the customer-service workload."""
    rate = {name: [REQUESTS / w.seconds] for name, w in (("off", off), ("own", own), ("ours", ours))}
    bench.row("vllm-service-requests-per-s", "1/s", rate["ours"], against="prefix caching off",
              against_runs=rate["off"], reach=">= 8")  # fmt: skip
    bench.row("vllm-service-requests-per-s-own", "1/s", rate["own"], against="prefix caching off",
              against_runs=rate["off"])  # fmt: skip
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        for what in ("first", "whole"):
            value = {k: [w.at(share, getattr(w, what))] for k, w in (("off", off), ("own", own), ("ours", ours))}
            shown = {"first": "ttft", "whole": "end-to-end"}[what]
            reach = "<= 0.4" if name == "p99" else ""
            bench.row(f"vllm-service-{shown}-{name}", "s", value["ours"], against="prefix caching off",
                      against_runs=value["off"], reach=reach)  # fmt: skip
            bench.row(f"vllm-service-{shown}-{name}-own", "s", value["own"], against="prefix caching off",
                      against_runs=value["off"])  # fmt: skip
    compute = {k: [w.compute / REQUESTS] for k, w in (("off", off), ("own", own), ("ours", ours))}
    bench.row("vllm-service-cpu-s-per-request", "s", compute["ours"], against="prefix caching off",
              against_runs=compute["off"])  # fmt: skip
    bench.row("vllm-service-cpu-s-per-request-own", "s", compute["own"], against="prefix caching off",
              against_runs=compute["off"])  # fmt: skip


def replicas(bench: Bench, one: Server, two: Server, cold_s: list[float]) -> None:
    """A second replica on the same pool, and both starting cold with one prompt."""
    runs = [from_pool(two, ids(7, LONG)) for _ in range(3)]
    bench.row("vllm-ttft-7800-second-replica", "s", runs, against="cold, prefix caching off", against_runs=cold_s,
              inverse=True)  # fmt: skip
    policy, computed = ids(300, POLICY), [0, 0]

    def ask(number: int, server: Server) -> None:
        prompt = [*policy, *ids(400 + number, QUESTION)]
        computed[number] = len(prompt) - server.complete(prompt, 1)["cached"]

    threads = [threading.Thread(target=ask, args=(n, s)) for n, s in enumerate((one, two))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bench.row("vllm-two-replicas-at-once-computed", "tokens", [float(sum(computed))], against="one replica",
              against_runs=[float(POLICY + QUESTION)], reach="<= 1.15")  # fmt: skip


def working_set(bench: Bench, folder: Path) -> None:
    """Four policies in turn, where vLLM's memory holds two."""
    policies = [ids(500 + n, POLICY) for n in range(4)]
    with serving(None, *SMALL) as own, serving(folder / "small", *SMALL) as ours:
        for policy in policies:
            first_token(own, policy)
            first_token(ours, policy)
        time.sleep(1.0)
        own_s, ours_s = [], []
        for policy in policies * 2:
            own_s.append(first_token(own, policy))
            ours_s.append(first_token(ours, policy))
    bench.row("vllm-ttft-2000-larger-than-memory", "s", ours_s, against="vLLM's own cache", against_runs=own_s,
              inverse=True)  # fmt: skip


def main() -> None:
    bench = Bench("vllm")
    print(f"bench/vllm_serving.py: load average {os.getloadavg()[0]:.1f} at the start")
    bench.row("vllm-load-average-before", "", [os.getloadavg()[0]])
    policy = ids(6, POLICY)
    with tempfile.TemporaryDirectory(prefix="stemkv-bench-", dir=os.environ.get("STEMKV_BENCH_DIR")) as name:
        store = Path(name) / "kv"
        with serving(None, "--no-enable-prefix-caching", *LENGTH) as plain:
            with serving(store, *LENGTH) as ours:
                cold_s = cold(bench, plain, ours)
                first_token(ours, ids(7, LONG))
                first_token(ours, policy)
                time.sleep(2.0)
            off = customer_service(plain, policy)
        with serving(None, *LENGTH) as own, serving(store, *LENGTH) as restarted:
            warm(bench, own, restarted, cold_s)
            restarted.forget()
            ours_w = customer_service(restarted, policy)
            own_w = customer_service(own, policy)
            compare_workloads(bench, off, own_w, ours_w)
        with serving(store, *LENGTH) as one, serving(store, *LENGTH) as two:
            replicas(bench, one, two, cold_s)
        working_set(bench, Path(name))
    bench.row("vllm-load-average-after", "", [os.getloadavg()[0]])
    print(f"  median cold: {statistics.median(cold_s):.1f} s; load average {os.getloadavg()[0]:.1f} at the end")
    bench.write()


if __name__ == "__main__":
    main()
