"""Which layers of a model keep which state, found by asking the model's own cache and a probe of two tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from stemkv.engines._layers import FullAndStateLayer, FullLayer, WindowAndStateLayer, WindowLayer
from stemkv.errors import UnsupportedModelError
from stemkv.identity import GroupSpec, HitPolicy, TensorSpec

TO_NAME = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""The safetensors name of each dtype a block may hold."""
TO_DTYPE = {name: dtype for dtype, name in TO_NAME.items()}

_MAKERS: dict[type, Callable[[Any], Any]] = {
    DynamicLayer: lambda _: FullLayer(),
    DynamicSlidingWindowLayer: lambda old: WindowLayer(old.sliding_window),
    LinearAttentionLayer: lambda old: LinearAttentionLayer(number_of_states=old.number_of_states),
    LinearAttentionAndFullAttentionLayer: lambda old: FullAndStateLayer(old.number_of_states),
    LinearAttentionAndSlidingWindowAttentionLayer: lambda old: WindowAndStateLayer(
        old.sliding_window, old.number_of_states
    ),
    DummyLayer: lambda _: DummyLayer(),
}
"""How to make stemkv's counterpart of each layer class; a class that is not here is refused."""


class Plan(NamedTuple):
    """What a model's cache consists of."""

    groups: tuple[GroupSpec, ...]
    devices: tuple[torch.device | None, ...]
    """Device of each layer's state; None where a layer keeps nothing."""
    make_layers: Callable[[], list[Any]]
    argument: str
    """What the model calls its cache: ``cache``, or ``past_key_values`` in older releases."""

    def has(self, policy: HitPolicy) -> bool:
        return any(spec.policy is policy for spec in self.groups)


def survey(model: Any, block_tokens: int) -> Plan:
    """Classify the layers of ``model`` and group them. Raises UnsupportedModelError naming what it cannot cache."""
    config = model.config.get_text_config(decoder=True)
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder model; stemkv caches decoder-only models")
    supports = getattr(model, "_supports_default_dynamic_cache", None)
    if supports is None or not supports():
        raise UnsupportedModelError(f"{name} does not use transformers' DynamicCache, so its state cannot be stored")
    probed = DynamicCache(config=config)
    for index, layer in enumerate(probed.layers):
        if type(layer) not in _MAKERS:
            raise UnsupportedModelError(
                f"{name} keeps layer {index} in a {type(layer).__name__}, which stemkv does not know how to store"
            )
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    _probe(model, probed, argument)
    parts = [part for index, layer in enumerate(probed.layers) for part in _parts(index, layer, block_tokens)]
    if not parts:
        raise UnsupportedModelError(f"{name} filled no layer of its cache, so there is nothing to store")
    makers = [(_MAKERS[type(layer)], _settings(layer)) for layer in probed.layers]
    return Plan(
        groups=_grouped(parts),
        devices=tuple(_device(layer) for layer in probed.layers),
        make_layers=lambda: [make(settings) for make, settings in makers],
        argument=argument,
    )


class _Settings(NamedTuple):
    sliding_window: int
    number_of_states: int


def _settings(layer: Any) -> _Settings:
    return _Settings(getattr(layer, "sliding_window", 0), getattr(layer, "number_of_states", 1))


@torch.no_grad()
def _probe(model: Any, cache: DynamicCache, argument: str) -> None:
    """Run two tokens, to see the shapes, dtypes and devices that the layers really use; and that order matters.

    Where a token's KV depends on what comes after it (bidirectional attention), no prefix can be stored.
    """
    device = model.get_input_embeddings().weight.device
    other = DynamicCache(config=model.config.get_text_config(decoder=True))
    was_training = model.training
    model.eval()
    try:
        for second, into in ((0, cache), (1, other)):
            model(input_ids=torch.tensor([[0, second]], device=device), use_cache=True, **{argument: into})
    finally:
        model.train(was_training)
    for layer, changed in zip(cache.layers, other.layers, strict=True):
        if getattr(layer, "keys", None) is None:
            continue
        for first, second in ((layer.keys, changed.keys), (layer.values, changed.values)):
            before, after = first[:, :, 0].float(), second[:, :, 0].float()
            if not torch.allclose(before, after, rtol=0, atol=0.01 * float(before.abs().max())):
                raise UnsupportedModelError(
                    f"in {type(model).__name__} a token's state depends on the tokens after it: no prefix can be stored"
                )


class _Part(NamedTuple):
    """One layer's contribution to a group; layers with equal ``kind`` share a group."""

    layer: int
    kind: tuple[HitPolicy, int, tuple[tuple[str, str, tuple[int, ...]], ...]]


def _parts(index: int, layer: Any, block_tokens: int) -> Iterable[_Part]:
    if getattr(layer, "keys", None) is not None:
        window = getattr(layer, "sliding_window", 0)
        policy = HitPolicy.TRAILING if window else HitPolicy.PREFIX
        tensors = tuple(
            (name, _dtype_name(t), (t.shape[1], block_tokens, t.shape[3]))
            for name, t in (("k", layer.keys), ("v", layer.values))
        )
        yield _Part(index, (policy, window, tensors))
    states = tuple((name, _dtype_name(t), tuple(t.shape[1:])) for name, t in states_of(layer))
    if states:
        yield _Part(index, (HitPolicy.EXACT, 0, states))


def states_of(layer: Any) -> list[tuple[str, Tensor]]:
    """The recurrent state tensors of a layer by name, in a fixed order; empty if it has none (yet)."""
    if not isinstance(layer, LinearAttentionLayer):
        return []
    return [
        (f"{kind}{i}", states[i])
        for kind, states in (("conv", layer.conv_states), ("state", layer.recurrent_states))
        for i in range(layer.number_of_states)
        if states[i] is not None
    ]


def _grouped(parts: list[_Part]) -> tuple[GroupSpec, ...]:
    by_kind: dict[Any, list[int]] = {}
    for part in parts:
        by_kind.setdefault(part.kind, []).append(part.layer)
    order = [HitPolicy.PREFIX, HitPolicy.TRAILING, HitPolicy.EXACT]
    specs = [
        GroupSpec(
            policy=policy,
            layers=tuple(layers),
            tensors=tuple(TensorSpec(name, dtype, (len(layers), *shape)) for name, dtype, shape in tensors),
            window=window,
        )
        for (policy, window, tensors), layers in by_kind.items()
    ]
    return tuple(sorted(specs, key=lambda s: (order.index(s.policy), s.layers)))


def _dtype_name(tensor: Tensor) -> str:
    if tensor.dtype not in TO_NAME:
        raise UnsupportedModelError(f"the model keeps its state as {tensor.dtype}, which a block cannot hold")
    return TO_NAME[tensor.dtype]


def _device(layer: Any) -> torch.device | None:
    if getattr(layer, "keys", None) is not None:
        return layer.keys.device
    states = states_of(layer)
    return states[0][1].device if states else None
