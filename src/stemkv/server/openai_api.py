"""The requests we accept: OpenAI's records, decoded strictly.

A field we do not know, do not support or that has the wrong type is refused by name: a server that ignores a
parameter gives answers that look right and are not.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from stemkv.engines.sampling import Sampling
from stemkv.server.errors import ApiError, invalid

MAX_CHOICES = 128
"""Choices one request may ask for: ``n`` times the number of prompts."""

Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
_LARGEST = 2**31 - 1
StopText = Annotated[str, Meta(max_length=512)]
Count = Annotated[int, Meta(ge=1, le=_LARGEST)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``stream_options``."""

    include_usage: bool = False
    include_obfuscation: bool = False
    """Accepted and without effect: the default of OpenAI's own server hides token lengths, we do not."""


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``response_format``: text alone."""

    type: Literal["text"]


class Common(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What chat and text completions share."""

    model: str | None = None
    """May be left out: there is one model."""
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=_LARGEST)] = 0
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    stop: StopText | Annotated[list[StopText], Meta(max_length=4)] = []
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] = 1.0
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=1024)] = {}
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] = ""
    """Requests with different salts share nothing; the salt works inside the caller's own tenant only."""
    # Labels that change nothing in the answer
    user: str = ""
    safety_identifier: str = ""
    prompt_cache_key: str = ""
    metadata: dict[str, str] = {}

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def limit(self) -> tuple[int | None, str]:
        """Most tokens to generate as asked for, and the name of the field that says so."""
        return self.max_tokens, "max_tokens"

    def alternatives(self) -> int | None:
        """Log probabilities asked for; see :attr:`Sampling.logprobs`."""
        raise NotImplementedError

    def sampling(self, max_tokens: int, vocab_size: int) -> Sampling:
        """The engine's view of this request."""
        return Sampling(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self._bias(vocab_size),
            logprobs=self.alternatives(),
        )

    def _bias(self, vocab_size: int) -> dict[int, float]:
        bias = {}
        for name, value in self.logit_bias.items():
            if not re.fullmatch(r"[0-9]{1,9}", name) or int(name) >= vocab_size:
                message = f"Invalid value for 'logit_bias': {_shown(name)} is not a token id of 0 to {vocab_size - 1}."
                raise invalid("logit_bias", message)
            bias[int(name)] = value
        return bias


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None


class ChatRequest(Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None

    def limit(self) -> tuple[int | None, str]:
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens, "max_completion_tokens"
        return self.max_tokens, "max_tokens"

    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/completions``."""

    prompt: str | list[str | int | list[int]]
    echo: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None

    def limit(self) -> tuple[int | None, str]:
        return (16 if self.max_tokens is None else self.max_tokens), "max_tokens"

    def alternatives(self) -> int | None:
        return self.logprobs


HARMLESS: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}
"""Parameters of OpenAI's that we do not implement, with the values that ask for nothing and so are let through."""

UNSUPPORTED = frozenset(HARMLESS) | {
    "audio",
    "function_call",
    "guided_json",
    "min_p",
    "moderation",
    "prediction",
    "prompt_cache_options",
    "prompt_cache_retention",
    "reasoning_effort",
    "thinking",
    "verbosity",
    "web_search_options",
}
"""Parameters that exist elsewhere and are refused with "not supported" rather than "unknown"."""

RequestT = TypeVar("RequestT", ChatRequest, CompletionRequest)


def decode(raw: bytes, kind: type[RequestT]) -> RequestT:
    """A request record from a JSON body; ApiError (400) naming the field for everything that is not one."""
    fields = _json_object(raw)
    known = kind.__struct_fields__
    for name in fields:
        if name not in known:
            raise _unknown(name, known)
    try:
        request = msgspec.convert(fields, kind)
    except (msgspec.ValidationError, OverflowError) as error:
        raise _wrong_type(str(error), fields) from None
    _check_together(request, fields)
    return request


def _json_object(raw: bytes) -> dict[str, Any]:
    """The body as a dict, without the fields that are null or ask for nothing."""
    try:
        body = msgspec.json.decode(raw)
        raw.decode()
        msgspec.json.encode(body)  # lone surrogates do not survive this
    except (msgspec.DecodeError, UnicodeError, RecursionError, OverflowError) as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"The body must be a JSON object, not {_named(body)}.", code="invalid_json")
    return {k: v for k, v in body.items() if v is not None and not _asks_nothing(k, v)}


def _asks_nothing(name: str, value: object) -> bool:
    return any(type(value) is type(harmless) and value == harmless for harmless in HARMLESS.get(name, ()))


def _unknown(name: str, known: tuple[str, ...]) -> ApiError:
    if name in UNSUPPORTED:
        return invalid(name, f"{_shown(name)} is not supported by stemkv; leave it out.", "unsupported_parameter")
    close = [k for k in known if k.replace("_", "") == name.replace("_", "").lower()]
    hint = f"did you mean '{close[0]}'?" if close else "leave it out."
    return invalid(name[:80], f"Unknown parameter {_shown(name)}: {hint}", "unknown_parameter")


def _wrong_type(text: str, fields: dict[str, Any]) -> ApiError:
    """One sentence from msgspec's "Expected `X`, got `Y` - at `$.a[0].b`"."""
    what, _, at = text.partition(" - at `$")
    param = at.strip("`").lstrip(".")
    missing = re.fullmatch(r"Object missing required field `(\w+)`", what)
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", what, re.DOTALL)
    if missing:
        param = f"{param}.{missing[1]}".lstrip(".")
        return invalid(param, f"Missing required parameter '{param}'.", "missing_required_parameter")
    if unknown:
        param = f"{param}.{unknown[1]}".lstrip(".")[:200]
        return invalid(param, f"Unknown parameter {_shown(param)}: leave it out.", "unknown_parameter")
    found, value = _value_at(fields, param)
    got = f" is {_shown(value)}" if found else ""
    return invalid(param, f"Invalid value: '{param}'{got}; {what[:1].lower()}{what[1:]}.", "invalid_type")


def _value_at(value: Any, path: str) -> tuple[bool, Any]:
    for step in re.findall(r"\w+|\[\d+\]|\[\.\.\.\]", path):
        try:
            value = value[int(step[1:-1])] if step[0] == "[" else value[step]
        except (LookupError, TypeError, ValueError):
            return False, None
    return True, value


def _check_together(request: ChatRequest | CompletionRequest, fields: dict[str, Any]) -> None:
    """Rules that involve two fields, or that a type cannot express."""
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "'stream_options' needs 'stream' to be true.")
    if isinstance(fields.get("stop"), list) and "" in fields["stop"]:
        raise invalid("stop", "Invalid value: 'stop' holds an empty string; every stop needs a character.")
    if fields.get("stop") == "":
        raise invalid("stop", "Invalid value: 'stop' is an empty string; give at least one character or leave it out.")
    if isinstance(request, ChatRequest):
        if request.top_logprobs is not None and not request.logprobs:
            raise invalid("top_logprobs", "'top_logprobs' needs 'logprobs' to be true.")
        if request.max_tokens and request.max_completion_tokens:
            raise invalid("max_tokens", "'max_tokens' and 'max_completion_tokens' mean the same; send one of them.")
    elif request.echo and request.logprobs is not None:
        raise invalid("logprobs", "'logprobs' together with 'echo' is not supported by stemkv; leave one out.")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _named(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")
