"""What every benchmark shares: interleaved runs, medians, and one JSON shape.

A row compares a value with a reference measured in the same run. ``ratio`` is value / against, ``reach`` what it
should be, ``holds`` whether it is; every single run is listed.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
BLOCK_SHAPE = (30, 3, 64, 64)
"""SmolLM2-135M: layers, KV heads, tokens a block, head size; bf16, keys and values: 1.47 MB a block."""


class Bench:
    """Collects rows and writes ``bench/results/<name>.json``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows: list[dict[str, Any]] = []

    def row(
        self,
        name: str,
        unit: str,
        runs: Sequence[float],
        *,
        against: str = "",
        against_runs: Sequence[float] = (),
        reach: str = "",
        inverse: bool = False,
    ) -> None:
        """Add a row. ``reach`` is like ``">= 0.8"``; it is held against the ratio, or the value without ``against``.

        ``inverse`` states the ratio as reference / value, for "n times faster" in seconds.
        """
        value = statistics.median(runs)
        reference = statistics.median(against_runs) if against_runs else None
        ratio = None if reference is None else (reference / value if inverse else value / reference)
        self.rows.append(
            {
                "name": name,
                "value": value,
                "unit": unit,
                "against": against,
                "against_value": reference,
                "ratio": ratio,
                "reach": reach,
                "holds": _holds(value if ratio is None else ratio, reach),
                "runs": list(runs),
                "against_runs": list(against_runs),
            }
        )
        shown = f"{ratio:8.3f}x {against} ({reference:.4g} {unit})" if reference is not None else " " * 9
        verdict = {True: "holds", False: "NOT REACHED", None: ""}[self.rows[-1]["holds"]]
        print(f"  {name:34} {value:10.4g} {unit:5} {shown}  {reach:8} {verdict}", flush=True)

    def write(self) -> None:
        RESULTS.mkdir(exist_ok=True)
        result = {"machine": machine(), "versions": versions(), "rows": self.rows}
        (RESULTS / f"{self.name}.json").write_text(json.dumps(result, indent=1) + "\n")


def interleaved(arms: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run each arm once a round, so that drift of the machine meets all of them alike. Arms return their figure."""
    results: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(rounds):
        names = list(arms) if turn % 2 == 0 else list(arms)[::-1]
        for name in names:
            results[name].append(arms[name]())
    return results


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def machine() -> dict[str, Any]:
    model = next((x.split(":", 1)[1].strip() for x in _lines("/proc/cpuinfo") if x.startswith("model name")), "")
    flags = next((x.split(":", 1)[1].split() for x in _lines("/proc/cpuinfo") if x.startswith("flags")), [])
    known = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "vaes")
    memory = next((int(x.split()[1]) // 1024**2 for x in _lines("/proc/meminfo") if x.startswith("MemTotal")), 0)
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "features": [f for f in known if f in flags],
        "last_level_cache_mb": last_level_cache() >> 20,
        "memory_gb": memory,
        "kernel": platform.release(),
    }


def last_level_cache() -> int:
    """Bytes of the largest cache of CPU 0; 32 MiB if the kernel does not say."""
    sizes = [p.read_text().strip() for p in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return max((int(s[:-1]) * units[s[-1]] for s in sizes), default=32 << 20)


def versions() -> dict[str, str]:
    names = ("stemkv", "torch", "transformers", "safetensors", "cryptography", "msgspec", "llama-cpp-python")
    found = {"python": sys.version.split()[0]}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _holds(value: float, reach: str) -> bool | None:
    if not reach:
        return None
    sign, limit = reach.split()
    return {">=": value >= float(limit), "<=": value <= float(limit), "<": value < float(limit)}[sign]
