"""SmolLM2 behind a real server, scheduler and worker in processes of their own, killed and started again."""

from __future__ import annotations

import time
from pathlib import Path

from .harness import connector, files, wait_stored
from .models import smollm2
from .server import Server

TEXT = [*range(2000, 2900), *range(900, 1300)]
"""1,300 tokens; not a repetition, so that the answer hangs on all of it."""
FLAGS = ("--dtype", "float32", "--max-model-len", "2048")


def test_a_server_killed_and_started_again_answers_the_same_from_the_store(tmp_path: Path) -> None:
    model, kv = smollm2(), tmp_path / "kv"
    with Server(model, None, "--no-enable-prefix-caching", *FLAGS) as plain:
        reference = plain.complete(TEXT, 12)
    with Server(model, connector(kv), *FLAGS) as first:
        cold = first.complete(TEXT, 12)
        wait_stored(kv, 10)
    assert len(files(kv)) == 10
    with Server(model, connector(kv), *FLAGS) as second:
        warm = second.complete(TEXT, 12)
        second.complete(TEXT[:20], 1)
        time.sleep(0.5)
        metrics = second.metrics()
    assert cold == reference == {"text": cold["text"], "cached": 0}
    assert warm == {"text": cold["text"], "cached": 1280}
    assert metrics["vllm:stemkv_hit_tokens_total"] == 1280
    assert metrics["vllm:external_prefix_cache_hits_total"] == 1280
    assert metrics["vllm:stemkv_loaded_blocks_total"] == 10
    assert metrics["vllm:stemkv_engine_faults_total"] == 0 if "vllm:stemkv_engine_faults_total" in metrics else True
