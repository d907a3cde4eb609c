"""vLLM's real offloading connector (scheduler side) and its real ``TieringOffloadingManager``, without a GPU.

The GPU's part, copying KV between device and host memory, is done by the test: it writes rows of the host memory where
the manager says so, and reads them where the manager says so. Everything else is vLLM's own code.
"""

from __future__ import annotations

import json
import struct
import time
import uuid
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

from stemkv.engines.vllm_tier import StemKVTier

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
    "hidden_act": "silu", "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LAYERS = ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]


def make_model(folder: Path, *, weights: bytes = b"weights", **changes: Any) -> Path:
    """A model's folder; the scheduler's process reads its weights only to hash them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    header = json.dumps({"w": {"dtype": "U8", "shape": [len(weights)], "data_offsets": [0, len(weights)]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + weights)
    return folder


def vllm_config(model: Path, extra: dict[str, Any], **arguments: Any) -> Any:
    """The configuration that ``vllm serve`` would make of these arguments."""
    transfer = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        engine_id=f"stemkv-test-{uuid.uuid4().hex}",
        kv_connector_extra_config=extra,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return EngineArgs(
            model=str(model), skip_tokenizer_init=True, kv_transfer_config=transfer, block_size=32, **arguments
        ).create_engine_config()


def kv_cache_config(groups: int = 1) -> KVCacheConfig:
    """64 blocks of 32 tokens: rows of 8 KiB."""
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=16, dtype=torch.bfloat16)
    names = [[f"{name}.{group}" if group else name for name in LAYERS] for group in range(groups)]
    return KVCacheConfig(
        num_blocks=64, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(own, spec) for own in names]
    )


def key(number: int, group: int = 0, text: int = 0) -> bytes:
    """VLLM's name of a block."""
    return bytes(make_offload_key(number.to_bytes(16, "big") + text.to_bytes(16, "big"), group))


def keys(count: int, text: int = 0) -> list[bytes]:
    return [key(number, text=text) for number in range(count)]


class Engine:
    """One engine's scheduler side, with ``rows`` rows of host memory."""

    def __init__(
        self,
        model: Path,
        stemkv: Any,
        *,
        rows: int = 16,
        groups: int = 1,
        entry: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        tier = {"type": "StemKVTier", "module_path": "stemkv.engines.vllm_tier", "stemkv": stemkv, **(entry or {})}
        settings = {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": rows * groups * 8192,
            "secondary_tiers": [tier],
            **(extra or {}),
        }
        self.config = vllm_config(model, settings, **(arguments or {}))
        self.connector = OffloadingConnector(self.config, KVConnectorRole.SCHEDULER, kv_cache_config(groups))
        manager = self.connector.scheduler.manager
        assert isinstance(manager, TieringOffloadingManager)
        self.manager = manager
        tier_ = manager.secondary_tiers[0]
        assert isinstance(tier_, StemKVTier)
        self.tier = tier_
        self.view = manager.primary_tier.get_kv_memoryview()
        self.row_bytes = self.view.strides[0]
        self._requests = 0
        self._stopped = False

    # -- what the scheduler does ---------------------------------------------------------------------------------

    def request(self, ends: Sequence[bytes] = ()) -> ReqContext:
        """A new request; ``ends`` are its keys in order, as the scheduler records them."""
        self._requests += 1
        context = ReqContext(req_id=f"request-{self._requests}")
        for number, one in enumerate(ends, 1):
            context.set_offload_key_position(one, 32 * number)
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))

    def settle(self, seconds: float = 20.0) -> None:
        """Steps until no transfer is under way."""
        end = time.monotonic() + seconds
        self.step()
        while self.manager.has_pending_work():
            assert time.monotonic() < end, "the engine would never come to rest"
            time.sleep(0.002)
            self.step()

    def store(self, wanted: Iterable[bytes], fill: int = 0, *, settle: bool = True) -> dict[bytes, bytes]:
        """Offload blocks, as after a prefill; returns what is in them."""
        wanted = list(wanted)
        context = self.request(wanted)
        output = self.manager.prepare_store(wanted, context)
        assert output is not None, "no room in host memory"
        content = {one: content_of(one, fill, self.row_bytes) for one in output.keys_to_store}
        rows = np.frombuffer(self.view.cast("B"), np.uint8).reshape(-1, self.row_bytes)
        for one, row in zip(output.keys_to_store, output.store_spec.chunk_ids, strict=True):
            rows[row] = np.frombuffer(content[one], np.uint8)
        del rows
        if output.keys_to_store:
            self.manager.complete_store(output.keys_to_store, context)
        self.manager.on_request_finished(context)
        if settle:
            self.settle()
        return content

    def lookup(self, wanted: Sequence[bytes], seconds: float = 20.0) -> dict[bytes, LookupResult]:
        """What the scheduler would learn of these keys, over as many steps as it takes."""
        context = self.request(wanted)
        end = time.monotonic() + seconds
        while True:
            found = {one: self.manager.lookup(one, context) for one in wanted}
            if not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(found.values()):
                break
            assert time.monotonic() < end, "a request would wait for ever"
            self.step()
            time.sleep(0.002)
        self.manager.on_request_finished(context)
        self.step()
        return found

    def load(self, wanted: Sequence[bytes]) -> dict[bytes, bytes]:
        """The content of those of ``wanted`` that are hits, as the GPU would get it."""
        found = self.lookup(wanted)
        hits = [one for one in wanted if found[one] is LookupResult.HIT]
        context = self.request(hits)
        spec = self.manager.prepare_load(hits, context)
        flat = np.frombuffer(self.view.cast("B"), np.uint8).reshape(-1, self.row_bytes)
        content = {one: flat[row].tobytes() for one, row in zip(hits, spec.chunk_ids, strict=True)}
        del flat
        self.manager.complete_load(hits, context)
        self.manager.on_request_finished(context)
        return content

    def drop_primary(self) -> None:
        """Lose all of host memory's blocks, as after many other requests; the rows are overwritten."""
        self.settle()
        self.manager.primary_tier.reset_cache()
        np.frombuffer(self.view.cast("B"), np.uint8)[:] = 0xEE

    def counters(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """The tier's counters since the last call, without the prefix that all of them have."""
        stats = self.tier.get_stats()
        assert stats is not None
        return {
            (name.removeprefix("vllm:stemkv_tier_"), labels): value
            for name, by_label in stats.data["data"].items()
            for labels, value in by_label.items()
        }

    def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self.view = memoryview(b"")
            self.connector.shutdown()


def content_of(one: bytes, fill: int, nbytes: int) -> bytes:
    """Bytes that no other block has."""
    return np.random.default_rng([*one, fill]).bytes(nbytes)
