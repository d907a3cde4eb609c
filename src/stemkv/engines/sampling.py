"""One generation as a server wants it: tokens one by one, stoppable, with the lookup's result before the first.

Everything of the server that touches torch is here, and torch is imported only when a model is already loaded:
a server without a model (its tests, its ``--help``) does not pay for the import.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from stemkv.keys import framed
from stemkv.misses import Miss

_GREEDY_BELOW = 1e-4
"""Temperatures under this are greedy: dividing logits by less overflows float32."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens. None of it shapes KV, so none of it is part of a block's identity."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is no limit."""
    seed: int | None = None
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token already generated (not of the prompt's)."""
    frequency_penalty: float = 0.0
    """Subtracted once per time a token was already generated."""
    repetition_penalty: float = 1.0
    """Divides (positive) or multiplies the logits of tokens in the prompt or the answer."""
    logit_bias: Mapping[int, float] = {}
    logprobs: int | None = None
    """Alternatives to report for each token; 0 reports the chosen token alone, None nothing."""


class Lookup(msgspec.Struct, frozen=True):
    """What the cache did for one prompt."""

    prompt_tokens: int
    cached_tokens: int
    miss: Miss | None
    """Why not more was cached; None when everything that may be was."""
    tiers: tuple[str, ...] = ()
    """Where the cached tokens came from."""


class TokenLogprob(msgspec.Struct, frozen=True):
    """Log probability of a chosen token and of the likeliest ones, before temperature and penalties."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


Progress = Callable[[int, int], None]
"""Called with tokens done and in total while a long prompt is computed, and with both equal when it is done."""


class CancelledError(Exception):
    """Raised through the engine to give up a long prompt; never leaves this module."""


def _never() -> bool:
    return False


class Engine(Protocol):
    """What the server needs of an engine; called on the model thread only."""

    context_length: int
    vocab_size: int
    eos_ids: frozenset[int]

    def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        scope: str = "",
        on_lookup: Callable[[Lookup], None],
        on_token: Callable[[int, TokenLogprob | None], bool],
        cancelled: Callable[[], bool],
    ) -> None:
        """Generate until ``on_token`` returns True, ``cancelled`` does, an end token or ``sampling.max_tokens``.

        ``on_lookup`` is called once, before anything is computed. Blocks. Returns normally when cancelled, also in
        the middle of a long prompt. Prompts of different ``scope`` share nothing. Raises RequestError for what the
        caller can mend.
        """


class TextEngine:
    """:class:`Engine` over a Transformers model and its :class:`~stemkv.engines.transformers.PrefixCache`."""

    def __init__(self, loaded: Any, make_cache: Callable[[Progress], Any], progress: Progress | None = None) -> None:
        """``make_cache`` makes the PrefixCache with the callback it is given; ``progress`` is for a person."""
        self._model = loaded.model
        self._report_progress = progress
        self._cancelled: Callable[[], bool] = _never
        self._cache = make_cache(self._on_progress)
        self.context_length: int = loaded.context_length
        self.vocab_size = int(loaded.model.config.get_text_config().vocab_size)
        self.eos_ids = _eos_ids(loaded)

    def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        scope: str = "",
        on_lookup: Callable[[Lookup], None],
        on_token: Callable[[int, TokenLogprob | None], bool],
        cancelled: Callable[[], bool],
    ) -> None:
        """See :class:`Engine`."""
        import torch  # noqa: PLC0415

        if sampling.seed is None:
            torch.seed()
        else:
            torch.manual_seed(sampling.seed)
        logits = _Logits(prompt, sampling)
        tokens = _Tokens(on_token, logits)

        ids = torch.tensor([prompt], device=self._model.device)
        self._cancelled = cancelled
        try:
            self._cache.generate(
                ids,
                attention_mask=torch.ones_like(ids),  # without it, a padding id in the prompt would be masked
                generation_config=self._config(sampling),
                logits_processor=[logits],
                stopping_criteria=[_Stop(lambda: tokens.stopped or cancelled())],
                streamer=tokens,
                tenant=_scoped(self._cache.tenant, scope) if scope else None,
                on_report=lambda report: on_lookup(_lookup(report)),
            )
        except CancelledError:
            return
        finally:
            self._cancelled = _never
            self._tell(len(prompt), len(prompt))

    def _on_progress(self, done: int, total: int) -> None:
        """Called before each layer, and between the pieces of a very long prompt: the places to give it up."""
        if self._cancelled():
            raise CancelledError
        self._tell(done, total)

    def _tell(self, done: int, total: int) -> None:
        if self._report_progress is not None:
            self._report_progress(done, total)

    def _config(self, sampling: Sampling) -> Any:
        """Every choice spelled out: what is left open would come from the model's own defaults."""
        from transformers import GenerationConfig  # noqa: PLC0415

        eos = sorted(self.eos_ids)
        config = {
            "max_new_tokens": sampling.max_tokens,
            "eos_token_id": eos or None,
            "pad_token_id": eos[0] if eos else 0,
            "repetition_penalty": 1.0,
            "num_beams": 1,
            "do_sample": sampling.temperature >= _GREEDY_BELOW,
        }
        if config["do_sample"]:
            config |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        return GenerationConfig(**config)


def _scoped(tenant: str, scope: str) -> str:
    """A tenant of its own for each scope inside ``tenant``; no scope reaches another tenant's or an unscoped one's."""
    return hashlib.sha256(framed("stemkv-scope-1", tenant, scope)).hexdigest()


def _lookup(report: Any) -> Lookup:
    row = report.rows[0]
    return Lookup(row.prompt_tokens, row.cached_tokens, row.miss, tuple(row.tiers))


def _eos_ids(loaded: Any) -> frozenset[int]:
    """The tokens that end an answer: what the model says, and what the tokenizer says."""
    found = [getattr(loaded.model.generation_config, "eos_token_id", None), loaded.tokenizer.eos_token_id]
    ids: set[int] = set()
    for value in found:
        ids.update(value if isinstance(value, list | tuple) else () if value is None else (value,))
    return frozenset(ids)


class _Logits:
    """A logits processor: reports log probabilities, then applies bias and penalties.

    It keeps its own idea of what prompt and answer are: with a restored cache the engine may see a suffix only.
    """

    def __init__(self, prompt: Sequence[int], sampling: Sampling) -> None:
        self._prompt = prompt
        self._sampling = sampling
        self._begin: int | None = None
        self._reported: deque[Any] = deque()
        s = sampling
        self._idle = not (s.logit_bias or s.presence_penalty or s.frequency_penalty or s.repetition_penalty != 1.0)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if self._begin is None:
            self._begin = input_ids.shape[1]
        if self._sampling.logprobs is not None:
            self._reported.append(scores[0].float().log_softmax(-1))
        return scores if self._idle else self._adjusted(input_ids[0, self._begin :], scores.clone())

    def take(self, token: int) -> TokenLogprob | None:
        """The report for the next token in order; None if none was asked for."""
        if self._sampling.logprobs is None or not self._reported:
            return None
        row = self._reported.popleft()
        values, ids = row.topk(min(self._sampling.logprobs, row.shape[0]))
        # JSON has no infinity; this is what others send for "impossible".
        top = tuple((i, max(v, -9999.0)) for i, v in zip(ids.tolist(), values.tolist(), strict=True))
        return TokenLogprob(max(float(row[token]), -9999.0), top)

    def _adjusted(self, answer: Any, scores: Any) -> Any:
        import torch  # noqa: PLC0415

        s = self._sampling
        if s.repetition_penalty != 1.0:
            prompt = torch.tensor(self._prompt, dtype=answer.dtype, device=answer.device)
            seen = torch.cat([prompt, answer]).unique()
            had = scores[0, seen]
            scores[0, seen] = torch.where(had < 0, had * s.repetition_penalty, had / s.repetition_penalty)
        if s.presence_penalty or s.frequency_penalty:
            tokens, counts = answer.unique(return_counts=True)
            scores[0, tokens] -= s.presence_penalty + s.frequency_penalty * counts
        for token, bias in s.logit_bias.items():
            scores[0, token] += bias
        return scores


class _Stop:
    """A stopping criterion for a batch of one."""

    def __init__(self, done: Callable[[], bool]) -> None:
        self._done = done

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        import torch  # noqa: PLC0415

        return torch.full((input_ids.shape[0],), self._done(), device=input_ids.device, dtype=torch.bool)


class _Tokens:
    """A streamer: hands tokens on one by one. The first thing that generate puts is the prompt."""

    def __init__(
        self,
        on_token: Callable[[int, TokenLogprob | None], bool],
        logits: _Logits,
    ) -> None:
        self._on_token, self._logits = on_token, logits
        self._prompt_seen = False
        self.stopped = False

    def put(self, value: Any) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        for token in value.flatten().tolist():
            logprob = self._logits.take(token)
            if not self.stopped:
                self.stopped = self._on_token(token, logprob)

    def end(self) -> None:
        """Nothing is held back here."""
