"""One process of ``ttft.py``. Arguments: mode, store folder, rounds. Prints one JSON line."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from harness import interleaved, seconds
from stemkv import FileTier, MemoryTier, Pool
from stemkv.engines.loading import Loaded, load_model
from stemkv.engines.transformers import PrefixCache

OTHER = 2
TOKENS, NEW, REUSED = 4096, 16, 4032
"""The prompt, its new tail, and the full blocks of 64 before it."""


def prompt(seed: int, tail: int = 0) -> list[int]:
    """TOKENS random ids; ``tail`` chooses the last NEW of them."""
    head = random.Random(seed)
    end = random.Random(1_000_003 * seed + tail)
    return [head.randrange(100, 40_000) for _ in range(TOKENS - NEW)] + [end.randrange(100, 40_000) for _ in range(NEW)]


def tensor(ids: list[int]) -> Any:
    return torch.tensor([ids])


def plain(loaded: Loaded, ids: list[int], cache: Any = None) -> float:
    """Seconds of model.generate to the first token, with KV handed over if ``cache`` is given."""
    given = {} if cache is None else {"cache": cache}
    return seconds(lambda: loaded.model.generate(tensor(ids), max_new_tokens=1, do_sample=False, **given))


def kept(loaded: Loaded, ids: list[int]) -> list[tuple[Any, Any]]:
    """KV of the reusable part of ``ids``, as a process that kept its cache has it."""
    with torch.inference_mode():
        cache = loaded.model(
            tensor(ids[:REUSED]), cache=DynamicCache(config=loaded.model.config), logits_to_keep=1
        ).cache
    return [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]


def direct(loaded: Loaded, data: list[tuple[Any, Any]], ids: list[int]) -> float:
    return plain(loaded, ids, DynamicCache(ddp_cache_data=data, config=loaded.model.config))


def ours(cache: PrefixCache, ids: list[int], expect: int) -> float:
    took = seconds(lambda: cache.generate(tensor(ids), max_new_tokens=1, do_sample=False))
    found = cache.last_report.rows[0].cached_tokens
    if found != expect:
        raise SystemExit(f"bench: {found} tokens cached, {expect} expected: {cache.last_report}")
    return took


def warm_up(loaded: Loaded) -> None:
    plain(loaded, prompt(99)[:256])
    plain(loaded, prompt(99)[:64])


def fill(loaded: Loaded, store: Path) -> dict[str, Any]:
    pool = Pool([FileTier(store, max_bytes=4 << 30)])
    cache = PrefixCache(loaded.model, pool, weight_files=loaded.weight_files)
    for seed in (0, OTHER):
        ours(cache, prompt(seed), 0)
        pool.flush()
    pool.close()
    return {}


def restore(loaded: Loaded, store: Path) -> dict[str, Any]:
    pool = Pool([FileTier(store, max_bytes=4 << 30)])
    cache = PrefixCache(loaded.model, pool, weight_files=loaded.weight_files)
    # A process that has served other prompts: torch's first-call costs of these shapes are in neither arm.
    plain(loaded, prompt(3))
    ours(cache, prompt(OTHER, tail=1), REUSED)
    warm = ours(cache, prompt(0, tail=1), REUSED)
    report = cache.last_report
    figures = {"warm_s": warm, "cold_s": plain(loaded, prompt(1)), "load_s": report.load_s}
    data = kept(loaded, prompt(0))
    figures["direct_s"] = min(direct(loaded, data, prompt(0, tail=t)) for t in (2, 3))
    pool.close()
    return figures | {"cached_tokens": report.cached_tokens}


def compare(loaded: Loaded, store: Path, rounds: int) -> dict[str, Any]:
    memory = Pool([MemoryTier(4 << 30)])
    from_memory = PrefixCache(loaded.model, memory, weight_files=loaded.weight_files)
    disk = Pool([FileTier(store, max_bytes=8 << 30)])
    storing = PrefixCache(loaded.model, disk, weight_files=loaded.weight_files)
    seeds = iter(range(10, 10_000))
    warm_up(loaded)
    ours(from_memory, prompt(0), 0)
    memory.flush()
    data = kept(loaded, prompt(0))

    def cold_storing() -> float:
        took = ours(storing, prompt(next(seeds)), 0)
        disk.flush()
        return took

    runs = interleaved(
        {
            "memory": lambda: ours(from_memory, prompt(0, tail=next(seeds)), REUSED),
            "direct": lambda: direct(loaded, data, prompt(0, tail=next(seeds))),
        },
        2 * rounds,
    )
    runs |= interleaved(
        {"cold_storing": cold_storing, "cold_plain": lambda: plain(loaded, prompt(next(seeds)))}, rounds
    )
    memory.close()
    disk.close()
    return runs


def main() -> None:
    mode, store, rounds = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    loaded = load_model("smollm2", dtype="bfloat16")
    if mode == "model-path":
        print(loaded.weight_files[0])
        return
    result = {
        "fill": lambda: fill(loaded, store),
        "restore": lambda: restore(loaded, store),
        "compare": lambda: compare(loaded, store, rounds),
    }[mode]()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
