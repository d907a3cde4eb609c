"""What a loaded model is, by content: weights, configuration, adapters.

Files say what the weights were when they were loaded. Because a model may be changed in memory afterwards (an
adapter merged, a layer trained), a sample of every parameter goes into the digest too; and before each call
:func:`change_marker` tells cheaply whether the parameters are still the ones that were sampled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stemkv.engines._groups import Plan
from stemkv.engines.weights import find_weight_files, weights_digest
from stemkv.errors import ModelError, UnsupportedModelError
from stemkv.identity import Adapter, Identity, Layout

LAYOUT = Layout(engine="transformers", name="LHTD", version=1)
_SAMPLES = 64
"""Elements sampled of each parameter."""

NOT_SHAPING_KV = frozenset({
    "_name_or_path", "name_or_path", "_model_name_or_path", "transformers_version", "architectures",
    "auto_map", "_commit_hash",
    "dtype", "torch_dtype", "quantization_config",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "mask_token_id",
    "decoder_start_token_id",
    "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens",
    "use_cache", "return_dict", "return_dict_in_generate", "output_attentions", "output_hidden_states",
    "output_scores", "output_router_logits", "router_aux_loss_coef", "gradient_checkpointing",
    "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params",
    "initializer_range", "initializer_factor", "chunk_size_feed_forward", "tie_word_embeddings", "torchscript",
    "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "embedding_dropout",
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "temperature", "top_k", "top_p",
    "pruned_heads", "tokenizer_class", "prefix", "bad_words_ids",
})  # fmt: skip
"""Configuration entries that do not shape KV; everything else does. Dtype and quantization have their own fields."""


def base_model(model: Any) -> Any:
    """The transformers model inside a PEFT wrapper, or ``model``. Raises UnsupportedModelError for soft prompts."""
    if not hasattr(model, "peft_config") or not hasattr(model, "get_base_model"):
        return model
    config = model.active_peft_config
    if config.is_prompt_learning or getattr(config, "is_adaption_prompt", False):
        raise UnsupportedModelError(
            f"the adapter type {config.peft_type.value} prepends learned states that stemkv does not key"
        )
    return model.get_base_model()


def identify(model: Any, plan: Plan, block_tokens: int, weight_files: Iterable[str | Path] | None) -> Identity:
    """The identity of ``model`` (without PEFT's wrapper) as it is now."""
    files = list(weight_files) if weight_files is not None else _own_files(model)
    if files:
        try:
            digest, source = weights_digest(files)
        except OSError as error:
            raise ModelError(f"cannot read the weight file {error.filename!r}: {error.strerror}") from None
        digest = hashlib.sha256(b"stemkv-weights-1" + digest + _sampled_digest(model)).digest()
    else:
        digest, source = _full_digest(model), "memory"
    return Identity(
        weights_digest=digest,
        weights_source=source,
        config_digest=config_digest(model.config),
        quantization=_quantization(model.config),
        adapters=adapters(model),
        kv_dtype=",".join(sorted({t.dtype for spec in plan.groups for t in spec.tensors})),
        layout=LAYOUT,
        groups=plan.groups,
        block_tokens=block_tokens,
    )


def config_digest(config: Any) -> bytes:
    """SHA-256 of the configuration in canonical JSON, without :data:`NOT_SHAPING_KV`."""
    shaping = _shaping(config.to_dict())
    shaping["attn_implementation"] = str(getattr(config, "_attn_implementation", None))
    return hashlib.sha256(_canonical(shaping)).digest()


def _shaping(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _shaping(v) for k, v in value.items() if k not in NOT_SHAPING_KV}
    if isinstance(value, (list, tuple)):
        return [_shaping(v) for v in value]
    return value


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()


def _quantization(config: Any) -> str:
    found = getattr(config, "quantization_config", None)
    if found is None:
        return ""
    return _canonical(found if isinstance(found, dict) else found.to_dict()).decode()


def _own_files(model: Any) -> list[Path]:
    name = getattr(model.config, "_name_or_path", "")
    return find_weight_files(name, getattr(model.config, "_commit_hash", None)) if name else []


# -- parameters in memory --------------------------------------------------------------------------------------


def _weights(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and persistent buffers by name, without those of adapters and with PEFT's renaming undone."""
    own = _adapter_parameters(model)
    return [
        (name.replace(".base_layer.", "."), tensor)
        for name, tensor in sorted(model.state_dict(keep_vars=True).items())
        if name not in own and isinstance(tensor, Tensor)
    ]


def _sampled_digest(model: nn.Module) -> bytes:
    digest = hashlib.sha256()
    for name, tensor in _weights(model):
        flat = torch.empty(0) if tensor.is_meta else tensor.detach().reshape(-1)
        if flat.numel() > _SAMPLES:
            flat = flat[:: flat.numel() // _SAMPLES]
        digest.update(_described(name, tensor) + _raw(flat))
    return digest.digest()


def _full_digest(model: nn.Module) -> bytes:
    if any(tensor.is_meta for _, tensor in _weights(model)):
        raise ModelError("some weights of the model are offloaded, so they cannot be hashed: give weight_files=")

    def one(item: tuple[str, Tensor]) -> bytes:
        return hashlib.sha256(_described(*item) + b"\0" + _raw(item[1].detach())).digest()

    with ThreadPoolExecutor(2) as threads:
        return hashlib.sha256(b"stemkv-memory-1" + b"".join(threads.map(one, _weights(model)))).digest()


def _described(name: str, tensor: Tensor) -> bytes:
    return f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\n".encode()


def _raw(tensor: Tensor) -> memoryview:
    return memoryview(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())


def change_marker(model: nn.Module) -> tuple[Any, ...]:
    """Changes whenever a parameter is replaced or written to, or adapters are switched. Takes well under 1 ms."""
    weights, tuners, stack = [], [], [model]
    while stack:  # nn.Module.modules() takes ten times as long
        module = stack.pop()
        stack += [child for child in module._modules.values() if child is not None]  # noqa: SLF001
        weights += [
            (p.data_ptr(), -1 if p.is_inference() else p._version)  # noqa: SLF001
            for p in module._parameters.values()  # noqa: SLF001
            if p is not None
        ]
        if _is_tuner_layer(module):
            tuners.append(_tuner_state(module))
    return tuple(weights), tuple(tuners), getattr(model.config, "_attn_implementation", None)


# -- adapters --------------------------------------------------------------------------------------------------


def _is_tuner_layer(module: nn.Module) -> bool:
    """Whether PEFT put this module in; recognised by its interface, so that peft need not be installed."""
    return "merged_adapters" in module.__dict__ and hasattr(module, "adapter_layer_names")


def _tuner_state(module: Any) -> tuple[Any, ...]:
    scaling = getattr(module, "scaling", {})
    return tuple(module.active_adapters), tuple(module.merged_adapters), module.disable_adapters, tuple(scaling.items())


def _tuner_layers(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in model.named_modules() if _is_tuner_layer(module)]


def _adapter_parameters(model: nn.Module) -> set[str]:
    names = set()
    for prefix, module in _tuner_layers(model):
        kinds = (*module.adapter_layer_names, *getattr(module, "other_param_names", ()))
        for name, _ in (*module.named_parameters(), *module.named_buffers()):
            if name.split(".", 1)[0] in kinds:
                names.add(f"{prefix}.{name}")
    return names


def adapters(model: nn.Module) -> tuple[Adapter, ...]:
    """The adapters in effect, merged ones first, in the order in which they apply."""
    layers = _tuner_layers(model)
    order: list[str] = []
    for _, module in layers:
        active = [] if module.disable_adapters else list(module.active_adapters)
        order += [name for name in (*module.merged_adapters, *active) if name not in order]
    return tuple(_adapter(layers, name) for name in order)


def _adapter(layers: Sequence[tuple[str, Any]], adapter: str) -> Adapter:
    digest, scales = hashlib.sha256(), []
    for prefix, module in layers:
        scale = getattr(module, "scaling", {}).get(adapter)
        if scale is not None:
            scales.append(float(scale))
            digest.update(f"{prefix}\0{float(scale)!r}\n".encode())
        for name, parameter in sorted((*module.named_parameters(), *module.named_buffers())):
            parts = name.split(".")
            if parts[0] in module.adapter_layer_names and adapter in parts:
                generic = ".".join("*" if part == adapter else part for part in parts)
                digest.update(_described(f"{prefix}.{generic}", parameter) + _raw(parameter.detach()))
    return Adapter(digest=digest.digest(), scale=scales[0] if len(set(scales)) == 1 else 0.0)
