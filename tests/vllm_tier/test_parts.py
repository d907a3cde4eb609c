"""Lookups and transfers under load, chance and time."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from stemkv.engines import _vllm_tier_lookups
from stemkv.engines._vllm_tier_lookups import Lookups
from stemkv.tiers.file import FileTier

from .harness import Engine, keys


class Known:
    """Answers of a pool that has ``here``."""

    def __init__(self) -> None:
        self.here: set[bytes] = set()
        self.asked: list[bytes] = []

    def find(self, wanted: Sequence[bytes]) -> list[bool]:
        self.asked += wanted
        return [one in self.here for one in wanted]


def answer(lookups: Lookups, one: bytes, request: str) -> bool:
    end = time.monotonic() + 10
    while (found := lookups.ask(one, request)) is None:
        assert time.monotonic() < end
        lookups.step()
        time.sleep(0.001)
    return found


def test_a_key_is_asked_for_once_while_requests_hold_it() -> None:
    known = Known()
    known.here = {b"a"}
    lookups = Lookups(known.find, timeout_s=5)
    assert [answer(lookups, b"a", f"{n}") for n in range(5)] == [True] * 5
    assert known.asked == [b"a"]
    for n in range(5):
        lookups.forget(f"{n}")
    assert answer(lookups, b"a", "later")
    assert known.asked == [b"a", b"a"]
    lookups.close()


def test_absent_is_asked_again_by_others_after_a_while_and_never_by_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_vllm_tier_lookups, "ABSENT_S", 0.05)
    known = Known()
    lookups = Lookups(known.find, timeout_s=5)
    assert not answer(lookups, b"a", "one")
    known.here = {b"a"}
    time.sleep(0.06)
    assert lookups.ask(b"a", "one") is False
    assert answer(lookups, b"a", "two")
    lookups.close()


def test_what_a_transfer_shows_counts_at_once() -> None:
    known = Known()
    lookups = Lookups(known.find, timeout_s=5)
    assert not answer(lookups, b"a", "one")
    lookups.note([b"a"], here=True)
    assert answer(lookups, b"a", "one")
    lookups.note([b"a", b"never asked"], here=False)
    assert not answer(lookups, b"a", "one")
    lookups.close()


def test_more_keys_than_may_wait_are_absent_at_once() -> None:
    lookups = Lookups(Known().find, timeout_s=5, most=10)
    found = [lookups.ask(bytes([n]), "one") for n in range(20)]
    assert found == [None] * 10 + [False] * 10
    assert lookups.counts["refused"] == 10
    lookups.close()


def test_once_a_key_was_late_nothing_more_is_asked_until_an_answer_comes() -> None:
    gate = threading.Event()

    def find(wanted: Sequence[bytes]) -> list[bool]:
        gate.wait()
        return [True] * len(wanted)

    lookups = Lookups(find, timeout_s=0.2)
    assert lookups.ask(b"a", "one") is None
    time.sleep(0.1)
    lookups.step()  # the question is younger than the key
    time.sleep(0.11)
    assert lookups.ask(b"a", "one") is False
    assert lookups.ask(b"b", "one") is False
    gate.set()
    end = time.monotonic() + 10
    while lookups.stuck:
        assert time.monotonic() < end
        lookups.step()
        time.sleep(0.001)
    assert answer(lookups, b"c", "one")
    assert dict(lookups.counts) == {"late": 1, "refused": 1, "hit": 1}
    lookups.close()


@pytest.mark.parametrize("wrong", [[], [True, True]])
def test_an_answer_that_does_not_line_up_is_no_hit(wrong: list[bool], caplog: pytest.LogCaptureFixture) -> None:
    lookups = Lookups(lambda _: wrong, timeout_s=5)
    assert not answer(lookups, b"a", "one")
    assert "a lookup of 1 keys failed" in caplog.text
    lookups.close()


@pytest.mark.parametrize("seed", range(3))
def test_whatever_the_timing_every_job_ends_once_and_hits_are_right(
    start: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    engine: Engine = start(
        {"lookup_timeout_s": 0.05, "load_timeout_s": 0.03, "store_timeout_s": 0.03, "queue_bytes": 200_000}, rows=24
    )
    for method in ("contains", "fetch", "put"):
        original = getattr(FileTier, method)

        def slow(*args: Any, original: Any = original, **kwargs: Any) -> Any:
            time.sleep(chance.choice([0, 0, 0, 0.005, 0.02, 0.04]))
            return original(*args, **kwargs)

        monkeypatch.setattr(FileTier, method, slow)
    content: dict[bytes, bytes] = {}
    hits = 0
    for _ in range(60):
        text = chance.randrange(5)
        if chance.random() < 0.5:
            # vLLM's manager asserts that a job is one of its own, and not twice.
            content |= engine.store(keys(4, text), settle=chance.random() < 0.5)
        else:
            loaded = engine.load(keys(4, text))
            assert loaded == {one: content[one] for one in loaded}
            hits += len(loaded)
        if chance.random() < 0.2:
            engine.drop_primary()
        engine.step()
    engine.settle()
    assert hits
    assert engine.counters()["load_results", ("loaded",)] > 0
    assert not engine.tier._jobs._live
