"""``stemkv demo`` as a person runs it, with a shorter prompt."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The finished demo: (what it printed, the steps it wrote)."""
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "stemkv.cli.main", "demo", "--tokens", "700", "--new-tokens", "8"]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((folder / "demo.json").read_text())["steps"]


@pytest.mark.model
def test_every_step_is_told_once_in_order(demo):
    _, steps = demo
    assert [s["name"] for s in steps] == ["cold", "warm", "restart", "second-process", "other-weights"]


@pytest.mark.model
def test_steps_have_exactly_the_agreed_fields(demo):
    fields = {"name", "ttft_s", "prompt_tokens", "cached_tokens", "miss", "output_token_ids"}
    assert all(set(step) == fields for step in demo[1])


@pytest.mark.model
def test_the_same_blocks_come_from_memory_disk_after_a_kill_and_in_a_second_process(demo):
    steps = {s["name"]: s for s in demo[1]}
    expected = (steps["cold"]["prompt_tokens"] - 1) // 64 * 64
    assert steps["cold"]["cached_tokens"] == 0
    assert [steps[n]["cached_tokens"] for n in ("warm", "restart", "second-process")] == [expected] * 3


@pytest.mark.model
def test_other_weights_under_the_same_name_miss_and_the_cause_is_named(demo):
    other = demo[1][-1]
    assert (other["cached_tokens"], other["miss"]) == (0, "identity:weights_digest")


@pytest.mark.model
def test_the_answer_is_the_same_with_and_without_a_hit(demo):
    answers = [s["output_token_ids"] for s in demo[1][:-1]]
    assert answers == [answers[0]] * 4
    assert "the same each time" in demo[0]
