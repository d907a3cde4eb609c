"""Routers hear, in vLLM's own form, which blocks are in the store and which of them are gone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from .harness import BLOCK, EngineProcess, connector, files, prompt, wait_stored


def received(subscriber: Any, seconds: float) -> list[dict[str, Any]]:
    """Events about the store that arrive within ``seconds``."""
    events, deadline = [], time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if subscriber.poll(int(1000 * left)):
            batch = msgspec.msgpack.decode(subscriber.recv_multipart()[2])
            events += [e for e in batch[1] if e.get("medium") == "STORAGE"]
    return events


def test_stored_and_vanished_blocks_are_announced(model: Path, tmp_path: Path) -> None:
    kv, ids = tmp_path / "kv", prompt(1, 200)
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        endpoint = f"ipc://{tmp_path}/events"
        subscriber.connect(endpoint)
        subscriber.subscribe("")
        config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
        with EngineProcess(model, connector(kv), kv_events_config=config) as engine:
            check(engine, subscriber, kv, ids)


def check(engine: EngineProcess, subscriber: Any, kv: Path, ids: list[int]) -> None:
    time.sleep(0.5)  # the subscription arrives
    engine.one(ids)
    wait_stored(kv, 3)
    engine.one(prompt(2, 40))
    stored = [e for e in received(subscriber, 2.0) if e["type"] == "BlockStored"]
    assert [e["token_ids"] for e in stored] == [ids[i : i + BLOCK] for i in range(0, 192, BLOCK)]
    assert [e.get("parent_block_hash") for e in stored] == [None, *(e["block_hashes"][0] for e in stored[:2])]
    assert {e["block_size"] for e in stored} == {BLOCK}
    files(kv)[1].unlink()
    assert engine.ask("forget")
    engine.one(ids)
    engine.one(prompt(3, 40))
    removed = [e for e in received(subscriber, 2.0) if e["type"] == "BlockRemoved"]
    gone = {h for e in removed for h in e["block_hashes"]}
    assert len(gone) == 1
    assert gone <= {h for e in stored for h in e["block_hashes"]}
