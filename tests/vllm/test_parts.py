"""Parts of the connector without an engine: claims, namespaces of adapters, block tables of older schedulers."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stemkv.engines._vllm_blocks import BlockTables
from stemkv.engines._vllm_claims import Claims
from stemkv.engines._vllm_lookup import scope_of
from stemkv.engines._vllm_messages import Load, Report
from stemkv.engines._vllm_metrics import Since, StemKVStats
from stemkv.engines._vllm_options import read_options
from stemkv.engines._vllm_scheduler import SchedulerSide
from stemkv.engines._vllm_threads import Threads
from stemkv.metrics import Metrics

KEYS = [bytes([n]) * 32 for n in range(4)]


def hold(store: Path, ready: Any) -> None:
    assert Claims(store).take(KEYS)
    ready.set()
    time.sleep(60)


def test_a_claim_keeps_others_from_every_block_of_it_until_it_is_released(tmp_path: Path) -> None:
    one, two = Claims(tmp_path), Claims(tmp_path)
    claim = one.take(KEYS)
    assert claim
    assert one.take(KEYS), "vLLM itself shares what one engine computes"
    assert two.take(KEYS) is None
    assert two.take(KEYS[2:]) is None
    assert two.take([b"x" * 32, *KEYS])
    one.release(claim)
    for name in list(one._mine):
        one.release(name)
    assert two.take(KEYS)


def test_a_claim_ends_with_its_process(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Event()
    owner = spawn.Process(target=hold, args=(tmp_path, ready))
    owner.start()
    assert ready.wait(60)
    assert Claims(tmp_path).take(KEYS) is None
    owner.kill()
    owner.join()
    assert Claims(tmp_path).take(KEYS)


def test_where_no_claim_can_be_made_everybody_computes(tmp_path: Path) -> None:
    (tmp_path / "claims").write_text("")
    assert Claims(tmp_path).take(KEYS) == b""
    assert Claims(tmp_path / "not" / "there").take(KEYS) == b""


def test_scopes_do_not_meet() -> None:
    assert len({scope_of(salt, epoch) for salt in (None, "", "a") for epoch in (b"", b"a")}) == 6


def test_block_tables_follow_an_older_scheduler() -> None:
    tables = BlockTables()
    cached = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set())
    new = SimpleNamespace(req_id="r", block_ids=([1, 2],))
    first = SimpleNamespace(scheduled_new_reqs=[new], scheduled_cached_reqs=cached)
    tables.step(first)
    assert tables.of(first, "r") == ([1, 2],)
    more = SimpleNamespace(req_ids=["r"], new_block_ids=[([3],)], resumed_req_ids=set())
    second = SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=more)
    tables.step(second)
    assert tables.of(second, "r") == ([1, 2, 3],)
    resumed = SimpleNamespace(req_ids=["r"], new_block_ids=[([7, 8],)], resumed_req_ids={"r"})
    third = SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=resumed)
    tables.step(third)
    assert tables.of(third, "r") == ([7, 8],)
    tables.forget("r")
    assert tables.of(third, "r") is None


def test_statistics_are_increments_that_add_up() -> None:
    metrics, since = Metrics(), Since()
    metrics.add("hit_tokens", 5)
    metrics.add("miss_tokens", 2, cause="unseen")
    first = since.stats(metrics, Counter(save=1))
    assert first is not None
    assert first.data == {"hit_tokens": 5, "miss_tokens|unseen": 2, "engine_faults|save": 1}
    assert since.stats(metrics, Counter(save=1)) is None
    metrics.add("hit_tokens", 1)
    second = since.stats(metrics, Counter(save=1))
    assert second is not None
    assert second.data == {"hit_tokens": 1}
    both = StemKVStats(data=dict(first.data)).aggregate(second)
    assert both.reduce() == {"stemkv engine_faults": 1, "stemkv hit_tokens": 6, "stemkv miss_tokens": 2}
    both.reset()
    assert both.is_empty()


def test_reports_of_several_ranks_keep_the_earliest_failure() -> None:
    both = Report(failed={"a": 3, "b": 1}).aggregate(Report(failed={"a": 2, "c": -1}))
    assert both.failed == {"a": 2, "b": 1, "c": -1}


def test_hung_work_holds_up_neither_other_threads_nor_the_caller() -> None:
    threads, done = Threads("t", 2), []
    threads.submit(lambda: time.sleep(30))
    threads.submit(lambda: done.append(1))
    deadline = time.monotonic() + 5
    while not done:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_blocks_that_are_not_what_they_should_be_fail_the_load_and_not_the_engine(tmp_path: Path) -> None:
    """The load reaches the worker without pages; its request would wait for ever otherwise."""
    options = read_options({"stemkv": {"store": str(tmp_path), "reserve_bytes": 0}}, environ={})
    side = SchedulerSide(options, SimpleNamespace(speculative_config=None), (0,), (16,))
    state = SimpleNamespace(loaded=0, start=32, lookup=SimpleNamespace(found=None), sent=False)
    side._requests["r"] = state  # type: ignore[assignment]
    side.allocated(SimpleNamespace(request_id="r"), SimpleNamespace(), 64)
    step = side.step(SimpleNamespace(total_num_scheduled_tokens=0))
    assert step.loads == [Load("r", 32, 96, ())]
    side.close()
