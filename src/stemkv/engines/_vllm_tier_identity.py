"""What the KV in vLLM's host memory is: identity and hash scheme, or a refusal.

A tier is handed very little of the engine's configuration: no revision, no overrides, no hash algorithm. They are on
the stack, because vLLM makes its tiers inside the constructor of a connector that got all of it.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import vllm
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from stemkv.engines._vllm_identity import _rescales, _shaping, _speculative, _weights
from stemkv.engines.weights import weights_digest
from stemkv.errors import ConfigError, ModelError, UnsupportedModelError
from stemkv.identity import GroupSpec, HitPolicy, Identity, Layout, Shard, TensorSpec


def engine_config() -> Any:
    """The ``VllmConfig`` of the engine that is being built. Raises ConfigError if there is none."""
    frame = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get("vllm_config")
        if isinstance(found, VllmConfig):
            return found
        frame = frame.f_back
    raise ConfigError(
        f"vLLM {vllm.__version__} does not show its configuration to the tier, so that its KV cannot be identified: "
        "use stemkv.engines.vllm_connector instead"
    )


def hash_scheme(config: Any) -> str:
    """How vLLM makes block hashes, for ``foreign_ref``. Raises ConfigError for hashes that may not name blocks."""
    algorithm = str(config.cache_config.prefix_caching_hash_algo)
    if algorithm not in ("sha256", "sha256_cbor"):
        raise ConfigError(
            f"prefix_caching_hash_algo is {algorithm!r}, whose hashes two texts may share: start vLLM with "
            "--prefix-caching-hash-algo sha256 or sha256_cbor"
        )
    from vllm.v1.core import kv_cache_utils  # noqa: PLC0415 - only where a tier is made

    seed = os.environ.get("PYTHONHASHSEED", getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", None))
    if seed is None:
        raise ConfigError(
            f"vLLM {vllm.__version__} starts its hashes from random bytes: set PYTHONHASHSEED to the same number in "
            "every replica"
        )
    return f"vllm/{algorithm}/{seed}"


def check_supported(config: Any) -> None:
    """Refuse what vLLM's hashes and rows do not tell apart. Raises ConfigError, UnsupportedModelError naming it."""
    if config.lora_config is not None:
        raise UnsupportedModelError(
            "LoRA is enabled, and vLLM's block hashes know adapters by name and path, not by content: use "
            "stemkv.engines.vllm_connector, or start without --enable-lora"
        )
    if config.model_config.is_multimodal_model and config.model_config.supports_multimodal_inputs:
        raise UnsupportedModelError(
            "the model takes images, audio or video, and vLLM's block hashes may know them by names that callers "
            "chose: use stemkv.engines.vllm_connector, or start with --language-model-only"
        )
    for name, why in (
        ("calculate_kv_scales", "the scales depend on the first prompt, not on the weights"),
        ("kv_sharing_fast_prefill", "it leaves KV of the prompt uncomputed"),
    ):
        if getattr(config.cache_config, name, False):
            raise ConfigError(f"{name} is not supported: {why}")


def identities(config: Any, offloading: Any, row_bytes: int, weights: Sequence[str]) -> dict[int, Identity]:
    """For each KV group of the engine, the identity of its rows. Reads weight files once (see ``weights_digest``).

    ``offloading`` is vLLM's ``OffloadingConfig``; ``weights`` names weight files where they cannot be found by the
    model's name. A row holds the KV of all ranks, so the shard says how many there are and names none.
    """
    digest, source = _weights_of(config, weights)
    parallel = offloading.parallel
    shard = Shard(tp_size=parallel.tp_size, pp_size=parallel.pp_size, cp_size=parallel.pcp_size * parallel.dcp_size)
    return {
        group.group_id: Identity(
            weights_digest=digest,
            weights_source=source,
            config_digest=_digest(_facts(config, offloading, group)),
            quantization=str(config.model_config.quantization or ""),
            kv_dtype=offloading.model.dtype,
            layout=_layout(config, offloading),
            shard=shard,
            groups=(
                GroupSpec(
                    HitPolicy.PREFIX,
                    tuple(range(len(group.layer_names))),
                    (TensorSpec("rows", "U8", (row_bytes,)),),
                ),
            ),
            block_tokens=group.tokens_per_block * offloading.cache.blocks_per_chunk,
        )
        for group in offloading.groups
    }


def _layout(config: Any, offloading: Any) -> Layout:
    """Rows are opaque; what they mean has changed between minor versions before, and with the attention library."""
    backend = getattr(config.attention_config.backend, "name", None) or "auto"
    runner = "v2" if config.use_v2_model_runner else "v1"
    form = "canonical" if offloading.canonical_layout else "direct"
    major, minor = (int(n) for n in vllm.__version_tuple__[:2])
    return Layout(
        engine="vllm-rows",
        name=f"{offloading.kv_cache_layout or 'unnamed'}/{form}/{backend}/{runner}",
        version=major * 1000 + minor,
        isa=str(current_platform.get_device_name()),
    )


def _facts(config: Any, offloading: Any, group: Any) -> dict[str, Any]:
    """What shapes the KV of a group's rows besides weights, dtype and layout."""
    model = config.model_config
    shaping = _shaping(model.hf_config.to_dict())
    return {
        "config": shaping,
        "longest": model.max_model_len if _rescales(shaping) else 0,
        "dtype": str(model.dtype),
        "layers": list(group.layer_names),
        "group": group.group_id,
        "block": group.tokens_per_block,
        "replicated": offloading.replicated_layout,
        "speculative": _speculative(config.speculative_config),
        "backends": {str(k): str(v) for k, v in getattr(config.attention_config, "backend_per_kind", {}).items()},
    }


def _weights_of(config: Any, explicit: Sequence[str]) -> tuple[bytes, str]:
    if not explicit:
        if str(config.load_config.load_format) == "dummy":
            raise ConfigError("load_format dummy has no weights that could be identified")
        return _weights(config.model_config, config.speculative_config)
    try:
        return weights_digest([Path(path).expanduser() for path in explicit])
    except OSError as error:
        raise ModelError(f"cannot read the weight file {error.filename!r}: {error.strerror}") from None


def _digest(facts: Mapping[str, Any]) -> bytes:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).digest()
