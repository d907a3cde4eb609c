"""The answers we give: OpenAI's objects for chat and text completions, whole or as chunks of a stream."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec

from stemkv.server.jobs import TokenText


class Usage(msgspec.Struct):
    """Tokens of one request. Prompts count once, however many choices they got."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Answer(msgspec.Struct):
    """One choice while it is collected."""

    text: str = ""
    reason: str | None = None
    logprobs: list[TokenText] = []


class Format(ABC):
    """How one endpoint writes its answer."""

    prefix: str
    whole: str
    part: str

    def __init__(self, model: str, *, logprobs: bool) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._model = model
        self._logprobs = logprobs

    def body(self, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        """The answer in one piece."""
        choices = [self._whole_choice(i, answer) for i, answer in enumerate(answers)]
        return self._object(self.whole, choices, usage.body())

    def opening(self, index: int) -> dict[str, Any] | None:
        """The first chunk of a choice, if the endpoint has one."""
        return None

    def delta(self, index: int, text: str, logprobs: Sequence[TokenText]) -> dict[str, Any]:
        """A chunk with more text."""
        return self._chunk(index, text, None, logprobs)

    def closing(self, index: int, reason: str) -> dict[str, Any]:
        """The last chunk of a choice."""
        return self._chunk(index, None, reason, ())

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The chunk after all choices, for ``stream_options.include_usage``."""
        return self._object(self.part, [], usage.body())

    def _object(self, kind: str, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        body = {"id": self.id, "object": kind, "created": self._created, "model": self._model, "choices": choices}
        return body if usage is None else {**body, "usage": usage}

    @abstractmethod
    def _whole_choice(self, index: int, answer: Answer) -> dict[str, Any]: ...

    @abstractmethod
    def _chunk(
        self, index: int, text: str | None, reason: str | None, logprobs: Sequence[TokenText]
    ) -> dict[str, Any]: ...


class ChatFormat(Format):
    """``chat.completion`` and ``chat.completion.chunk``."""

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return self._object(self.part, [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def _whole_choice(self, index: int, answer: Answer) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": self._logprob_object(answer.logprobs),
            "finish_reason": answer.reason,
        }

    def _chunk(self, index: int, text: str | None, reason: str | None, logprobs: Sequence[TokenText]) -> dict[str, Any]:
        delta = {} if text is None else {"content": text}
        shown = self._logprob_object(logprobs) if logprobs else None
        choice = {"index": index, "delta": delta, "logprobs": shown, "finish_reason": reason}
        return self._object(self.part, [choice])

    def _logprob_object(self, tokens: Sequence[TokenText]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        content = [
            {**_token(t.text, t.logprob), "top_logprobs": [_token(text, value) for text, value in t.top]}
            for t in tokens
        ]
        return {"content": content, "refusal": None}


class TextFormat(Format):
    """``text_completion``, the same object whole and in chunks."""

    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def _whole_choice(self, index: int, answer: Answer) -> dict[str, Any]:
        return self._choice(index, answer.text, answer.reason, self._logprob_object(answer.logprobs))

    def _chunk(self, index: int, text: str | None, reason: str | None, logprobs: Sequence[TokenText]) -> dict[str, Any]:
        shown = self._logprob_object(logprobs) if logprobs else None
        return self._object(self.part, [self._choice(index, text or "", reason, shown)])

    @staticmethod
    def _choice(index: int, text: str, reason: str | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprob_object(self, tokens: Sequence[TokenText]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        return {
            "tokens": [t.text for t in tokens],
            "token_logprobs": [t.logprob for t in tokens],
            "top_logprobs": [dict(t.top) for t in tokens],
            "text_offset": [t.offset for t in tokens],
        }


def _token(text: str, logprob: float) -> dict[str, Any]:
    # A token that is only part of a character has no text of its own, and its bytes are not known here.
    whole = "\ufffd" not in text
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}
