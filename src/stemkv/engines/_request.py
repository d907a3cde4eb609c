"""The arguments of one ``generate`` call, read the way transformers reads them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin

from stemkv.engines._blocks import Row
from stemkv.errors import RequestError
from stemkv.misses import Cause, Miss

_CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
_PLAIN_ARGUMENTS = (
    frozenset(inspect.signature(GenerationMixin.generate).parameters)
    | frozenset(GenerationConfig().to_dict())
    | {"input_ids", "attention_mask", "tokenizer", "assistant_tokenizer", "logits_to_keep", "return_dict"}
) - {"custom_generate", "kwargs"}
"""Arguments that steer generation but do not change what the prompt's KV is."""


class Request(NamedTuple):
    """A call that stemkv may serve from blocks (``miss`` is None) or must pass on untouched."""

    ids: Tensor | None
    mask: Tensor | None
    """Attention mask with a zero for every padding column; None if there is none."""
    rows: tuple[Row, ...]
    """The prompts; empty if they cannot be told."""
    batch: int
    columns: int
    """Prompts and their padded length, also where ``rows`` is empty."""
    expand: int
    """Rows of the cache for each prompt (beams or returned sequences)."""
    follows_text: bool
    """Whether a row of the cache holds the KV of the text in the same row of the result; not so for beams."""
    new_tokens: int
    """Most tokens that this call may add."""
    miss: Miss | None


def read_request(model: Any, arguments: Mapping[str, Any], context: int | None) -> Request:
    """Understand the arguments of ``generate``. Raises RequestError for what stemkv cannot do at all."""
    _refuse_caches(model, arguments)
    ids, mask = _prompt(model, arguments)
    rows = _rows(ids, mask)
    longest = max((len(row.tokens) for row in rows), default=0)
    if context is not None and longest > context:
        raise RequestError(f"the prompt has {longest} tokens, more than the model's context of {context}; shorten it")
    shape = tuple((ids if ids is not None else _some_input(arguments)).shape)
    beams = int(setting(model, arguments, "num_beams") or 1)
    expand = max(beams, int(setting(model, arguments, "num_return_sequences") or 1))
    return Request(
        ids=ids,
        mask=mask,
        rows=rows,
        batch=shape[0] if shape else 1,
        columns=shape[1] if len(shape) > 1 else 0,
        expand=expand,
        follows_text=beams == 1,
        new_tokens=_new_tokens(model, arguments, 0 if ids is None else ids.shape[-1]),
        miss=_not_cacheable(model, arguments, ids, rows),
    )


def setting(model: Any, arguments: Mapping[str, Any], name: str) -> Any:
    """A generation setting: from the call, its generation_config, or the model's, in this order."""
    for source in (arguments.get("generation_config"), model.generation_config):
        if arguments.get(name) is not None:
            return arguments[name]
        if source is not None and getattr(source, name, None) is not None:
            return getattr(source, name)
    return None


def _refuse_caches(model: Any, arguments: Mapping[str, Any]) -> None:
    for name in _CACHE_ARGUMENTS:
        if arguments.get(name) is not None:
            raise RequestError(f"{name}= cannot be passed: PrefixCache makes the cache of every call itself")
    kind = setting(model, arguments, "cache_implementation")
    if kind not in (None, "dynamic", "hybrid"):
        raise RequestError(f"cache_implementation={kind!r} cannot be combined with PrefixCache; leave it out")


def _prompt(model: Any, arguments: Mapping[str, Any]) -> tuple[Tensor | None, Tensor | None]:
    ids = arguments.get("inputs")
    if ids is None:
        ids = arguments.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or 0 in ids.shape or ids.is_floating_point():
        return None, None
    mask = arguments.get("attention_mask")
    if mask is None:
        mask = _inferred_mask(model, arguments, ids)
    return ids, mask


def _some_input(arguments: Mapping[str, Any]) -> Tensor:
    """Whatever else the model is given as its prompt."""
    return next((v for v in arguments.values() if isinstance(v, Tensor) and v.ndim > 1), torch.empty(1, 0))


def _inferred_mask(model: Any, arguments: Mapping[str, Any], ids: Tensor) -> Tensor | None:
    """What generate assumes without a mask: padding tokens are padding unless padding is also an end token."""
    pad, end = (setting(model, arguments, name) for name in ("pad_token_id", "eos_token_id"))
    ends = end.flatten().tolist() if isinstance(end, Tensor) else end if isinstance(end, (list, tuple)) else [end]
    if pad is None or int(pad) in ends:
        return None
    mask = ids.ne(int(pad)).long()
    return None if bool(mask.all()) else mask


def _rows(ids: Tensor | None, mask: Tensor | None) -> tuple[Row, ...]:
    """Prompts without their padding; empty if the mask is not plain left padding."""
    if ids is None:
        return ()
    tokens = ids.tolist()
    if mask is None:
        return tuple(Row(0, row) for row in tokens)
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        return ()
    rows = []
    for row, marks in zip(tokens, mask.ne(0).tolist(), strict=True):
        pad = marks.index(True) if True in marks else len(marks)
        if not all(marks[pad:]) or pad == len(marks):
            return ()
        rows.append(Row(pad, row[pad:]))
    return tuple(rows)


def _not_cacheable(model: Any, arguments: Mapping[str, Any], ids: Tensor | None, rows: tuple[Row, ...]) -> Miss | None:
    """The first thing about this call that is not in the keys."""
    other = [name for name, value in arguments.items() if value is not None and name not in _PLAIN_ARGUMENTS]
    reasons = {
        other[0] if other else "": bool(other),
        "inputs": ids is None,
        "attention_mask": not rows,
        "use_cache": setting(model, arguments, "use_cache") is False,
        "token_healing": bool(setting(model, arguments, "token_healing")),
        "training": bool(model.training),
        "autocast": torch.is_autocast_enabled(model.device.type),
    }
    return next((Miss(Cause.NOT_CACHEABLE, name) for name, applies in reasons.items() if applies), None)


def _new_tokens(model: Any, arguments: Mapping[str, Any], prompt: int) -> int:
    new = setting(model, arguments, "max_new_tokens")
    if new is not None:
        return int(new)
    longest = setting(model, arguments, "max_length")
    return max(0, int(longest) - prompt) if longest is not None else 20


def context_length(config: Any) -> tuple[int | None, int | None]:
    """(longest prompt, longest text whose KV depends on nothing but the text); None where there is no limit.

    Dynamic and long rotary embeddings rescale positions once the text is longer than the original context, so KV
    from before and after do not fit together.
    """
    text = config.get_text_config(decoder=True)
    longest = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    sets = [v for v in rope.values() if isinstance(v, dict)] or [rope]
    changing = [r for r in sets if r.get("rope_type") in ("dynamic", "longrope")]
    if not changing:
        return longest, None
    own = getattr(text, "original_max_position_embeddings", None) or longest
    originals = [r.get("original_max_position_embeddings") or own for r in changing]
    return None if any(r["rope_type"] == "dynamic" for r in changing) else longest, min(
        (int(o) for o in originals if o), default=None
    )
