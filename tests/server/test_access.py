"""API keys, the Host header, health and metrics."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from stemkv.block import Record
from stemkv.errors import ConfigError
from stemkv.metrics import COUNTERS
from stemkv.misses import Cause, Miss
from stemkv.server import auth
from stemkv.server.health import Probe
from stemkv.tiers.base import TierStats
from stemkv.tiers.memory import MemoryTier

from .harness import FakeEngine, Served, served

KEY = "sk-0123456789abcdef"


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    with served(FakeEngine(lambda _: "ok"), keys=[KEY, "sk-another-key-123456"]) as handle:
        yield handle


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", f"Basic {KEY}", "Bearer wrong", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}"]
)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/v1/chat/completions", "/nowhere"])
def test_without_the_key_is_401(locked: Served, path: str, header: str | None) -> None:
    response = locked.client.get(path, headers={} if header is None else {"authorization": header})
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", [KEY, "sk-another-key-123456"])
def test_with_the_key_all_is_open(locked: Served, key: str) -> None:
    headers = {"authorization": f"Bearer {key}", "host": "example.com"}
    assert locked.client.get("/v1/models", headers=headers).status_code == 200
    assert locked.client.get("/metrics", headers=headers).status_code == 200


def test_health_is_open_but_without_details(locked: Served) -> None:
    assert locked.client.get("/health").json() == {"status": "ok"}
    shown = locked.client.get("/health", headers={"authorization": f"Bearer {KEY}"}).json()
    assert [tier["name"] for tier in shown["tiers"]] == ["memory"]


@pytest.fixture(scope="module")
def open_server() -> Iterator[Served]:
    with served(FakeEngine(lambda _: "ok")) as handle:
        yield handle


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:8000", 200), ("127.0.0.1", 200), ("[::1]:8000", 200), ("app.localhost", 200),
     ("evil.example", 403), ("127.0.0.1.evil.example:80", 403), ("10.0.0.1", 403)],
)  # fmt: skip
def test_a_foreign_host_is_refused_where_no_key_guards(open_server: Served, host: str, status: int) -> None:
    """DNS rebinding: a web page may make its own name point to the user's loopback."""
    response = open_server.client.get("/v1/models", headers={"host": host})
    assert response.status_code == status
    if status == 403:
        assert "--api-key-file" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("localhost", True), ("LOCALHOST", True), ("127.3.2.1", True), ("::1", True), ("[::1]", True),
     ("0.0.0.0", False), ("::", False), ("192.168.1.5", False), ("example.com", False), ("", False)],
)  # fmt: skip
def test_loopback_is_told_from_the_rest(host: str, loopback: bool) -> None:
    assert auth.is_loopback(host) is loopback


def key_file(folder: Path, content: str, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_text(content)
    path.chmod(mode)
    return path


def test_keys_are_read_one_a_line(tmp_path: Path) -> None:
    path = key_file(tmp_path, f"# ours\n{KEY}\n\n  sk-another-key-123456  \n")
    assert auth.read_keys(path) == (KEY, "sk-another-key-123456")


@pytest.mark.parametrize(
    ("content", "mode", "says"),
    [(KEY, 0o644, "chmod 600"), (KEY, 0o602, "chmod 600"), ("", 0o600, "no key"), ("# x\n", 0o600, "no key"),
     ("short", 0o600, "key 1"), (f"{KEY}\nhas a space in it", 0o600, "key 2"), ("schlüssel-schlüssel", 0o600, "key 1")],
)  # fmt: skip
def test_a_bad_key_file_is_refused_by_name(tmp_path: Path, content: str, mode: int, says: str) -> None:
    path = key_file(tmp_path, content, mode)
    with pytest.raises(ConfigError, match=says) as caught:
        auth.read_keys(path)
    assert str(path) in str(caught.value)
    assert KEY not in str(caught.value), "keys are not shown"


def test_a_missing_or_binary_key_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        auth.read_keys(tmp_path / "none")
    path = key_file(tmp_path, "")
    path.write_bytes(os.urandom(8) + b"\xff\xfe")
    with pytest.raises(ConfigError, match="not text"):
        auth.read_keys(path)


# -- health ----------------------------------------------------------------------------------------------------


class Sick(MemoryTier):
    """A memory tier with a fault of choice."""

    def __init__(self, fault: str) -> None:
        super().__init__(1 << 20)
        self.fault = fault
        self.name = "sick"

    def put(self, records: Sequence[Record]) -> list[Miss | None]:
        if self.fault == "raises":
            raise OSError(5, "Input/output error")
        if self.fault in Cause._value2member_map_:
            return [Miss(Cause(self.fault))] * len(records)
        if self.fault == "hangs":
            time.sleep(3)
        return [None] * len(records) if self.fault == "forgets" else super().put(records)

    def stats(self) -> TierStats:
        return TierStats(0, 0, 0, read_only=self.fault == "readonly")


def test_health_uses_every_tier_and_leaves_nothing(tmp_path: Path) -> None:
    with served(FakeEngine(lambda _: "ok"), tmp_path / "store") as handle:
        body = handle.client.get("/health").json()
        assert body["status"] == "ok"
        assert [(t["name"], t["status"]) for t in body["tiers"]] == [("memory", "ok"), ("file", "ok")]
        assert [tier.stats().blocks for tier in handle.pool.tiers] == [0, 0]
        assert not list((tmp_path / "store").rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("fault", "status", "word", "cause"),
    [("readonly", 200, "degraded", "read-only"), ("no-space", 200, "degraded", "no-space"),
     ("io-error", 503, "failed", "io-error"), ("closed", 503, "failed", "closed"),
     ("raises", 503, "failed", "OSError"), ("forgets", 503, "failed", "")],
)  # fmt: skip
def test_health_names_the_tier_that_does_not_work(fault: str, status: int, word: str, cause: str) -> None:
    with served(FakeEngine(lambda _: "ok"), tiers=[MemoryTier(1 << 20), Sick(fault)]) as handle:
        response = handle.client.get("/health")
        assert response.status_code == status
        body = response.json()
        assert body["status"] == word
        assert body["message"].startswith("Tier 'sick': ")
        assert cause in body["message"]
        assert handle.chat().status_code == 200, "requests are served all the same"


def test_health_answers_in_time_when_a_tier_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Probe.__init__

    def quick(self: Probe, pool: Any) -> None:
        original(self, pool, deadline_s=0.2)

    monkeypatch.setattr(Probe, "__init__", quick)
    with served(FakeEngine(lambda _: "ok"), tiers=[Sick("hangs")]) as handle:
        for _ in range(2):
            response = handle.client.get("/health")
            assert response.status_code == 503
            assert "did not answer within 0.2 s" in response.json()["message"]


def test_health_says_503_while_stopping() -> None:
    with served(FakeEngine(lambda _: "ok")) as handle:
        assert handle.client.get("/health").status_code == 200
        handle.worker.stop()
        response = handle.client.get("/health")
        assert response.status_code == 503
        assert "stopping" in response.json()["message"]
        assert handle.chat().status_code == 503


# -- metrics ---------------------------------------------------------------------------------------------------


def test_metrics_have_every_counter_and_every_tier(tmp_path: Path) -> None:
    with served(FakeEngine(lambda _: "ok"), tmp_path / "store") as handle:
        handle.pool.metrics.add("miss_tokens", 7, cause="unseen")
        handle.pool.metrics.add("miss_tokens", 5, cause="evicted")
        handle.chat("a" * 40)
        handle.chat("a" * 40)
        text = handle.client.get("/metrics").text
        for name in COUNTERS:
            assert f"# TYPE stemkv_{name}_total counter" in text
        assert handle.metric("stemkv_miss_tokens_total", cause="unseen") == 7
        assert handle.metric("stemkv_tier_max_bytes", tier="file") == 1 << 24
        assert handle.metric("stemkv_requests_total", endpoint="/v1/chat/completions", code="200") == 2
        assert handle.metric("stemkv_first_token_seconds_count", cache="miss") == 1
        assert handle.metric("stemkv_first_token_seconds_count", cache="hit") == 1
        assert handle.metric("stemkv_generated_tokens_total") == 6
        assert handle.metric("stemkv_request_seconds_count") == 2


def test_paths_that_do_not_exist_share_one_label(open_server: Served) -> None:
    for number in range(5):
        open_server.client.get(f"/scan/{number}")
    assert open_server.metric("stemkv_requests_total", endpoint="other", code="404") == 5
    assert "scan" not in open_server.client.get("/metrics").text
