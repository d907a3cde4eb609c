"""From a request to token ids that fit the model."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from stemkv.engines.sampling import Sampling
from stemkv.server.errors import invalid
from stemkv.server.jobs import Job
from stemkv.server.openai_api import MAX_CHOICES, ChatRequest, CompletionRequest, Message

_LONGEST_TOKEN = 128
"""Characters. A text with more for each token of the context is refused before the work of tokenizing it."""


class Prompts:
    """Tokenizes requests. Blocks for about a second a megabyte: call it off the event loop; thread-safe.

    ``tokenizer`` is used by this object alone: tokenizers are not safe to encode and decode with at once.
    """

    def __init__(self, tokenizer: Any, *, context_length: int, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._context = context_length
        self._vocab = vocab_size
        self._lock = threading.Lock()

    def job(self, request: ChatRequest | CompletionRequest) -> Job:
        """The job for ``request``. Raises ApiError (400) for a prompt that the model cannot take."""
        with self._lock:
            if isinstance(request, ChatRequest):
                prompts, param = [self._chat(request.messages)], "messages"
            else:
                prompts, param = self._texts(request.prompt), "prompt"
            echo = [self._decode(p) for p in prompts] if isinstance(request, CompletionRequest) and request.echo else ()
        if len(prompts) * request.n > MAX_CHOICES:
            raise invalid("n", f"{len(prompts)} prompts with n={request.n} make more than {MAX_CHOICES} choices.")
        sampling = [self._sampling(request, len(prompt), param) for prompt in prompts]
        return Job(prompts, sampling, n=request.n, stops=request.stops, scope=request.cache_salt, echo=echo)

    def _sampling(self, request: ChatRequest | CompletionRequest, length: int, param: str) -> Sampling:
        wanted, name = request.limit()
        room = self._context - length
        if room < 1:
            message = (
                f"The prompt has {length} tokens and the model's context holds {self._context}, "
                "the answer included; shorten the prompt."
            )
            raise invalid(param, message, "context_length_exceeded")
        if wanted is not None and wanted > room:
            message = (
                f"The prompt has {length} tokens and '{name}' asks for {wanted} more, but the model's context "
                f"holds {self._context}; shorten the prompt or ask for at most {room}."
            )
            raise invalid(name if name in request.__struct_fields__ else param, message, "context_length_exceeded")
        return request.sampling(room if wanted is None else wanted, self._vocab)

    # -- chat ------------------------------------------------------------------------------------------------

    def _chat(self, messages: Sequence[Message]) -> list[int]:
        template = getattr(self._tokenizer, "chat_template", None)
        if not template:
            raise invalid("messages", "This model has no chat template; use /v1/completions.", "no_chat_template")
        plain = [_plain(message, f"messages[{i}]", str(template)) for i, message in enumerate(messages)]
        try:
            text = self._tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # noqa: BLE001 - a template is a program of the model's author and raises what it likes
            message = f"The model's chat template refused these messages: {_one_line(error)}."
            raise invalid("messages", message, "chat_template_error") from None
        return self._tokens(text, "messages", add_special_tokens=False)

    # -- text ------------------------------------------------------------------------------------------------

    def _texts(self, prompt: str | Sequence[str | int | list[int]]) -> list[list[int]]:
        items: Sequence[Any] = [prompt] if isinstance(prompt, str) else prompt
        kinds = {type(item) for item in items}
        if len(kinds) > 1:
            raise invalid("prompt", "'prompt' mixes strings and token ids; send one kind.", "invalid_type")
        if kinds == {int}:
            items = [items]
        if not items:
            raise invalid("prompt", "'prompt' is empty; send a string or token ids.")
        return [self._encoded(item, f"prompt[{i}]" if len(items) > 1 else "prompt") for i, item in enumerate(items)]

    def _encoded(self, item: str | list[int], param: str) -> list[int]:
        if isinstance(item, str):
            ids = self._tokens(item, param)
            if not ids and self._tokenizer.bos_token_id is not None:
                ids = [int(self._tokenizer.bos_token_id)]
        else:
            ids = item
            outside = next((i for i in ids if not 0 <= i < self._vocab), None)
            if outside is not None:
                raise invalid(param, f"'{param}' has {outside}, which is not a token id of 0 to {self._vocab - 1}.")
        if not ids:
            raise invalid(param, f"'{param}' is empty; send at least one token.")
        return ids

    def _tokens(self, text: str, param: str, **options: bool) -> list[int]:
        if len(text) > self._context * _LONGEST_TOKEN:
            message = (
                f"The prompt has {len(text)} characters, far more than the {self._context} tokens of the model's "
                "context can hold; shorten the prompt."
            )
            raise invalid(param, message, "context_length_exceeded")
        return list(self._tokenizer(text, **options)["input_ids"])

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def _plain(message: Message, param: str, template: str) -> dict[str, Any]:
    """A message as chat templates want it: content is one string, absent fields are absent."""
    for name in ("tool_calls", "tool_call_id"):
        # A template that does not mention a field would drop it without a word.
        if getattr(message, name) is not None and name not in template:
            raise invalid(f"{param}.{name}", f"The model's chat template has no '{name}'; leave it out.",
                          "unsupported_parameter")  # fmt: skip
    content = message.content if isinstance(message.content, str) else _joined(message.content, param)
    if message.content is None and not message.tool_calls:
        raise invalid(f"{param}.content", f"Missing '{param}.content': send a string or text parts.",
                      "missing_required_parameter")  # fmt: skip
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": content}
    for name in ("name", "tool_calls", "tool_call_id"):
        if getattr(message, name) is not None:
            plain[name] = getattr(message, name)
    return plain


def _joined(parts: Sequence[dict[str, Any]] | None, param: str) -> str:
    texts = []
    for i, part in enumerate(parts or ()):
        kind, text = part.get("type"), part.get("text")
        if kind != "text":
            raise invalid(f"{param}.content[{i}].type", f"Content of type {str(kind)[:40]!r} is not supported; "
                          "send parts of type 'text'.", "unsupported_content")  # fmt: skip
        if not isinstance(text, str):
            raise invalid(f"{param}.content[{i}].text", f"'{param}.content[{i}].text' must be a string.",
                          "invalid_type")  # fmt: skip
        texts.append(text)
    return "\n".join(texts)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
