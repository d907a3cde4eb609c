"""What a vLLM worker's KV is, by content: the identity behind every key, or the named reason why there is none.

Computed in the worker, which has the KV memory, and sent to the scheduler (``Handshake``), so that both sides mean the
same to the byte. What is not understood is refused by name at start-up.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from stemkv.engines._vllm_options import Options
from stemkv.engines._vllm_pages import Group, memory_order, raw_pages
from stemkv.engines.weights import find_weight_files, weights_digest
from stemkv.errors import ConfigError, ModelError, UnsupportedModelError
from stemkv.identity import GroupSpec, HitPolicy, Identity, Layout, Shard
from stemkv.keys import framed

_PREFIX = frozenset({"FullAttentionSpec", "MLAAttentionSpec", "SinkFullAttentionSpec"})
_TRAILING = frozenset({"SlidingWindowSpec", "SlidingWindowMLASpec"})
_NAMES_ONLY = frozenset({"_name_or_path", "_model_name_or_path", "name_or_path", "_commit_hash", "transformers_version",
                         "architectures", "torch_dtype", "dtype", "id2label", "label2id"})  # fmt: skip
"""Configuration entries that are names, or that the identity has elsewhere. Everything else counts."""
_RESCALING = frozenset({"longrope", "su", "dynamic"})
"""Rotary embeddings that vLLM scales by the longest context it is started with."""
_LEAST_TOKENS = 64
"""Stored blocks have at least so many tokens, where the engine's blocks are smaller."""


class Plan(NamedTuple):
    """How the KV memory of one worker is stored."""

    identity: Identity
    groups: tuple[Group, ...]
    group_ids: tuple[int, ...]
    """The engine's group of each of ours."""
    page_tokens: tuple[int, ...]
    """Tokens of an engine block, for each of ours."""


def engine_groups(kv_cache_config: Any) -> tuple[int, ...]:
    """Ids of the groups that are loaded and stored: those that hold the text. Raises UnsupportedModelError."""
    ids = []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        if not getattr(group, "enable_kv_transfer", True):
            continue
        _policy(group.kv_cache_spec)
        ids.append(number)
    if not ids:
        raise UnsupportedModelError("this model keeps no KV that could be stored")
    return tuple(ids)


def _policy(spec: Any) -> tuple[HitPolicy, int]:
    inner = next(iter(spec.kv_cache_specs.values())) if hasattr(spec, "kv_cache_specs") else spec
    name = type(inner).__name__
    if getattr(inner, "prefix_replay_tokens", 0) or not getattr(inner, "prefix_cacheable", True):
        raise UnsupportedModelError(f"stemkv does not support the replayed windows of {name}")
    if name in _PREFIX:
        return HitPolicy.PREFIX, 0
    if name in _TRAILING:
        return HitPolicy.TRAILING, int(inner.sliding_window)
    raise UnsupportedModelError(
        f"stemkv does not support layers of vLLM's {name}: it stores full and sliding-window attention"
    )


def check_supported(config: Any) -> None:
    """Raises ConfigError or UnsupportedModelError for what stemkv would have to guess about."""
    transfer, parallel, model = config.kv_transfer_config, config.parallel_config, config.model_config
    if transfer.kv_role != "kv_both":
        raise ConfigError(f"kv_role is {transfer.kv_role!r}: a cache both loads and stores, so it must be kv_both")
    if getattr(transfer, "kv_load_failure_policy", "recompute") != "recompute":
        raise ConfigError('"kv_load_failure_policy" must be "recompute": otherwise a lost block fails the request')
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(f"{name} {getattr(parallel, name)} is not supported: blocks are spread over workers")
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise ConfigError("calculate_kv_scales is not supported: the scales depend on the first prompt, not on weights")
    if getattr(config.cache_config, "kv_sharing_fast_prefill", False):
        raise ConfigError("kv_sharing_fast_prefill is not supported: it leaves KV of the prompt uncomputed")
    if str(getattr(config.load_config, "load_format", "")) in ("dummy", "LoadFormats.DUMMY"):
        raise ConfigError("load_format dummy has no weights that could be identified")
    if getattr(model, "runner_type", "generate") != "generate":
        raise UnsupportedModelError(f"stemkv does not support vLLM's {model.runner_type} models")


def plan(config: Any, kv_cache_config: Any, caches: Mapping[str, Any], options: Options) -> Plan:
    """The identity of this worker, and its KV memory in pages. Blocks while weight files are read."""
    ids = engine_groups(kv_cache_config)
    specs = [kv_cache_config.kv_cache_groups[i].kv_cache_spec for i in ids]
    page_tokens = tuple(int(spec.block_size) for spec in specs)
    block_tokens = _block_tokens(page_tokens, [_policy(s)[0] for s in specs], options.own_block_tokens)
    names = [_own_layers(kv_cache_config.kv_cache_groups[i].layer_names, caches) for i in ids]
    groups, described = [], []
    for layers, tokens in zip(names, page_tokens, strict=True):
        tensors = [_tensor(caches[name], name) for name in layers]
        described += [f"{name} {memory_order(t)} {t.dtype}" for name, t in zip(layers, tensors, strict=True)]
        groups.append(Group([raw_pages(t, kv_cache_config.num_blocks) for t in tensors], block_tokens // tokens))
    identity = Identity(
        **_model(config, names, specs),
        layout=_layout(config, kv_cache_config, names, described, specs),
        shard=_shard(config),
        groups=tuple(
            GroupSpec(policy=_policy(spec)[0], layers=_numbers(layers), tensors=group.tensors, window=_policy(spec)[1])
            for spec, layers, group in zip(specs, names, groups, strict=True)
        ),
        block_tokens=block_tokens,
    )
    return Plan(identity, tuple(groups), ids, page_tokens)


def _block_tokens(page_tokens: Sequence[int], policies: Sequence[HitPolicy], wanted: int) -> int:
    unit = math.lcm(*page_tokens)
    if wanted and wanted % unit:
        raise ConfigError(f"block_tokens {wanted} is not a multiple of vLLM's block of {unit} tokens")
    if wanted:
        return wanted
    # A window may drop its first pages before a larger block is complete.
    whole = all(policy is HitPolicy.PREFIX for policy in policies)
    return unit * max(1, -(-_LEAST_TOKENS // unit)) if whole else unit


def _own_layers(layer_names: Sequence[str], caches: Mapping[str, Any]) -> list[str]:
    """Layers in order, without those that share another's memory."""
    seen: set[tuple[int, int]] = set()
    own = []
    for name in sorted((n for n in layer_names if n in caches), key=_order):
        tensor = caches[name]
        where = (tensor.data_ptr(), tensor.storage_offset()) if isinstance(tensor, Tensor) else (id(tensor), 0)
        if where not in seen:
            seen.add(where)
            own.append(name)
    if not own:
        raise UnsupportedModelError("a KV group has no layer on this worker: stemkv does not support that split")
    return own


def _order(name: str) -> tuple[list[int], str]:
    return [int(n) for n in re.findall(r"\d+", name)], name


def _numbers(names: Sequence[str]) -> tuple[int, ...]:
    found = [re.findall(r"\d+", name) for name in names]
    return tuple(int(numbers[0]) if numbers else at for at, numbers in enumerate(found))


def _tensor(value: Any, name: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise UnsupportedModelError(
            f"layer {name} keeps its state in {type(value).__name__}, which stemkv cannot store"
        )
    return value


# -- fields --------------------------------------------------------------------------------------------------------


def _model(config: Any, names: Sequence[Sequence[str]], specs: Sequence[Any]) -> dict[str, Any]:
    model, cache = config.model_config, config.cache_config
    weights, source = _weights(model, config.speculative_config)
    kv_dtype = f"{cache.cache_dtype}/{str(model.dtype).removeprefix('torch.')}"
    return {
        "weights_digest": weights,
        "weights_source": source,
        "config_digest": _config_digest(config, names, specs),
        "quantization": str(model.quantization or ""),
        "kv_dtype": kv_dtype,
        # Static scales come with the weights; a page holds the others.
        "kv_scale_digest": b"" if cache.cache_dtype == "auto" else hashlib.sha256(framed("scales", weights)).digest(),
    }


def _weights(model: Any, speculative: Any) -> tuple[bytes, str]:
    digest, source = _files_digest(model.model, model.revision)
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None and draft is not model and draft.model != model.model:
        other, how = _files_digest(draft.model, draft.revision)
        digest = hashlib.sha256(framed("stemkv-draft-1", digest, how, other)).digest()
    return digest, source


def _files_digest(name: str, revision: str | None) -> tuple[bytes, str]:
    files = find_weight_files(name, revision)
    if not files:
        raise ModelError(
            f"the weight files of {name} are not on this machine, and without them a hit could be another model's"
        )
    try:
        return weights_digest(files)
    except OSError as error:
        raise ModelError(f"cannot read the weight file {error.filename!r}: {error.strerror}") from None


def _config_digest(config: Any, names: Sequence[Sequence[str]], specs: Sequence[Any]) -> bytes:
    model = config.model_config
    shaping = _shaping(model.hf_config.to_dict())
    facts = {
        "config": shaping,
        "longest": model.max_model_len if _rescales(shaping) else 0,
        "layers": [list(n) for n in names],
        "specs": [repr(spec) for spec in specs],
        "speculative": _speculative(config.speculative_config),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).digest()


def _speculative(speculative: Any) -> dict[str, Any]:
    """Only what has layers of its own shapes KV: n-gram and suffix decoding only guess tokens."""
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None or speculative.method in ("ngram", "ngram_gpu", "suffix"):
        return {}
    return {"method": str(speculative.method), "config": _shaping(draft.hf_config.to_dict())}


def _shaping(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _shaping(v) for k, v in value.items() if k not in _NAMES_ONLY}
    if isinstance(value, (list, tuple)):
        return [_shaping(v) for v in value]
    return value


def _rescales(value: Any) -> bool:
    if isinstance(value, Mapping):
        kind = value.get("rope_type", value.get("type"))
        return (isinstance(kind, str) and kind in _RESCALING) or any(_rescales(v) for v in value.values())
    return isinstance(value, list) and any(_rescales(v) for v in value)


def _layout(config: Any, kv_cache_config: Any, names: Any, described: list[str], specs: Sequence[Any]) -> Layout:
    import vllm  # noqa: PLC0415

    major, minor = (int(n) for n in vllm.__version_tuple__[:2])
    layers = [name for group in names for name in group]
    arrangement = hashlib.sha256("\n".join(described).encode()).hexdigest()[:16]
    resolved = getattr(kv_cache_config, "kv_cache_layout", None) or "unnamed"
    return Layout(
        engine="vllm",
        name=f"{resolved}/{'+'.join(_backends(config, layers))}/{arrangement}",
        # Pages of another minor version may be arranged otherwise under the same name: 0.20 and 0.26 were.
        version=major * 1000 + minor,
        isa=_isa(config, specs),
    )


def _backends(config: Any, layers: list[str]) -> list[str]:
    found: set[str] = set()
    forward = config.compilation_config.static_forward_context
    for name in layers:
        backend = getattr(forward.get(name), "get_attn_backend", None)
        found.add(backend().get_name() if backend is not None else "unknown")
    return sorted(found)


def _isa(config: Any, specs: Sequence[Any]) -> str:
    """The processor that pages are packed for."""
    from vllm.platforms import current_platform  # noqa: PLC0415

    if not current_platform.is_cpu():
        return str(current_platform.get_device_name())
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415

    cache = config.cache_config
    spec = next(iter(getattr(specs[0], "kv_cache_specs", {"": specs[0]}).values()))
    return str(_get_attn_isa(config.model_config.dtype, spec.block_size, spec.head_size, cache.cache_dtype))


def _shard(config: Any) -> Shard:
    parallel = config.parallel_config
    tensor, pipeline = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    rank = parallel.rank % (tensor * pipeline)
    return Shard(tp_rank=rank % tensor, tp_size=tensor, pp_rank=rank // tensor, pp_size=pipeline)


def adapter_digest(path: str) -> bytes:
    """The content of a LoRA folder. Raises ValueError where it is not a folder of files, OSError if unreadable."""
    folder = Path(path).expanduser()
    files = sorted(p for p in folder.glob("*") if p.suffix in (".safetensors", ".bin", ".pt") and p.is_file())
    if not files:
        raise ValueError(f"no adapter files in {path!r}")
    settings = folder / "adapter_config.json"
    content = hashlib.sha256(settings.read_bytes()).digest() if settings.is_file() else b""
    return hashlib.sha256(framed("stemkv-lora-1", weights_digest(files)[0], content)).digest()


def adapter_stamp(path: str) -> tuple[Any, ...]:
    """Changes when a file of a LoRA folder does."""
    files = sorted(p for p in Path(path).expanduser().glob("*") if p.is_file())
    return tuple((p.name, s.st_size, s.st_mtime_ns, s.st_ino) for p in files for s in [p.stat()])
