"""Several processes on one folder, some of them killed: never a wrong read, a lost byte count or a leftover."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(params=["/tmp", "/dev/shm"])
def folder(request: pytest.FixtureRequest) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="stemkv-test-", dir=request.param) as name:
        yield Path(name) / "store"


def run(scenario: str, folder: Path, count: int) -> dict[str, Any]:
    tests = Path(__file__).parent.parent
    command = [sys.executable, "-m", "tiers.processes", scenario, str(folder), "11", str(count)]
    done = subprocess.run(command, cwd=tests, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert not result["complaints"], result["complaints"]
    return result


def test_killed_at_random_moments_the_store_stays_right(folder: Path) -> None:
    result = run("kill", folder, 200)
    assert result["kills"] == 200
    assert result["inspections"] == 10
    assert result["hits"] > 20, "the load stored something"


def test_processes_that_store_the_same_keys_at_once_all_succeed(folder: Path) -> None:
    assert run("same", folder, 3)["stores"] > 400


def test_processes_that_store_and_evict_at_once_keep_the_cap(folder: Path) -> None:
    result = run("crowd", folder, 3)
    assert result["evicted"] > 20
    assert result["hits"] > 0


def test_a_folder_damaged_while_in_use_heals_and_never_gives_wrong_bytes(folder: Path) -> None:
    assert run("vandal", folder, 70)["acts"] > 20
