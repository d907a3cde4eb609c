"""Many threads on one pool: right bytes, sums that add up, no lease left, no deadlock."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

from stemkv.misses import Cause
from stemkv.pool import Pool
from stemkv.tiers.base import Tier
from stemkv.tiers.file import FileTier

from . import make
from .test_pool_faults import check_sums

SECONDS = 2.0


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_four_threads_match_load_and_store_at_once(kind: str, tmp_path: Path) -> None:
    near = make.Named("near", 12)
    far: Tier = make.Named("far", 60) if kind == "memory" else FileTier(tmp_path, max_bytes=60 * 8192, reserve_bytes=0)
    pool = Pool([near, far], queue_bytes=64 * 8192, pending_wait_s=0.005)
    prompts = [make.chain(6, first=first) for first in range(0, 400, 20)]
    end, errors, hits = time.monotonic() + SECONDS, list[BaseException](), list[int]()

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            while time.monotonic() < end:
                prompt = rng.choice(prompts)
                match, sink = pool.match(prompt), make.Collected()
                failed = pool.load(match, sink)
                for i, ref in enumerate(match.refs):
                    assert ref.key in failed or sink.payloads[i] == make.content(ref)
                assert {m.cause for m in failed.values()} <= {Cause.EVICTED}
                pool.release(match)
                hits.append(len(sink.payloads))
                blocks = [(0, i) for i in range(match.blocks, 6)]
                pool.store(prompt, blocks, make.Source(), cost_s=rng.random())
                if rng.random() < 0.05:
                    near.delete([rng.choice(prompt.keys)])
                    pool.flush(0.01)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "deadlock"
    assert not errors
    assert pool.flush(30)
    check_sums(pool)
    assert sum(hits) > 100
    assert pool.metrics.total("tier_faults") == 0
    for tier in (near, far):
        assert not tier._leases
    assert pool.writer.queued_bytes == 0
    assert not pool.writer._pending
    assert pool.close(10)


def test_counters_lose_nothing_under_contention() -> None:
    from stemkv.metrics import Metrics  # noqa: PLC0415

    metrics = Metrics()

    def add() -> None:
        for _ in range(5000):
            metrics.add("lookups")
            metrics.add("stored_blocks", 2, tier="a", by="store")

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.total("lookups") == 20_000
    assert metrics.total("stored_blocks", tier="a") == 40_000
    assert metrics.total("stored_blocks", tier="b") == 0
    with pytest.raises(KeyError):
        metrics.add("lookup")
