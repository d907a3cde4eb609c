"""A request on its way through the model thread, and what comes back from there."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from stemkv.engines.sampling import Lookup, Sampling, TokenLogprob
from stemkv.server.errors import ApiError
from stemkv.server.text import Decode, Detokenizer, StopMatcher


class TokenText(msgspec.Struct, frozen=True):
    """One token with its log probability, for ``logprobs``."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...]
    offset: int
    """Characters of the answer before this token."""


class Started(msgspec.Struct, frozen=True):
    """The lookup for a choice is done; nothing is computed yet."""

    index: int
    lookup: Lookup


class FirstToken(msgspec.Struct, frozen=True):
    """A choice has its first token."""

    index: int


class Delta(msgspec.Struct, frozen=True):
    """More text of a choice."""

    index: int
    text: str
    logprobs: tuple[TokenText, ...] = ()


class Ended(msgspec.Struct, frozen=True):
    """A choice is complete."""

    index: int
    reason: str
    """``stop`` or ``length``."""
    tokens: int


class Finished(msgspec.Struct, frozen=True):
    """The last event of a job; ``error`` if it did not complete."""

    error: ApiError | None = None


Event = Started | FirstToken | Delta | Ended | Finished


class Job:
    """One request: prompts times ``n`` choices, generated one after the other.

    Choice ``i`` belongs to prompt ``i // n``. From the second choice of a prompt on, the prompt comes from the cache.
    ``emit`` is called on the model thread and must not block.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[Sampling],
        *,
        n: int = 1,
        stops: Sequence[str] = (),
        scope: str = "",
        echo: Sequence[str] = (),
        emit: Callable[[Event], None] = lambda _event: None,
    ) -> None:
        self.prompts = prompts
        self.sampling = sampling
        """One for each prompt: room for the answer depends on the prompt's length."""
        self.n = n
        self.stops = stops
        self.scope = scope
        """The caller's ``cache_salt``: prompts with different ones share nothing."""
        self.echo = echo
        """Text put before the answer, one for each prompt; empty for none."""
        self.emit = emit
        self.submitted = time.perf_counter()
        self.cancelled = threading.Event()
        self.reason: ApiError | None = None

    def cancel(self, reason: ApiError | None = None) -> None:
        """Ask the job to stop at the next token or chunk of the prompt; from any thread, may be called twice."""
        if not self.cancelled.is_set():
            self.reason = reason
            self.cancelled.set()

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n


class Choice:
    """Turns the tokens of one choice into deltas; decides when a stop string ends it."""

    def __init__(self, job: Job, index: int, decode: Decode, eos_ids: frozenset[int]) -> None:
        prompt = job.prompts[index // job.n]
        self._emit, self._index, self._decode, self._eos = job.emit, index, decode, eos_ids
        self._text = Detokenizer(decode, prompt)
        self._stop = StopMatcher(job.stops)
        self._waiting: deque[TokenText] = deque()
        self._seen = self._shown = 0
        """Characters decoded, and characters given out."""
        self._ended_by_token = False
        self.tokens = 0
        if job.echo:
            self._emit(Delta(index, job.echo[index // job.n]))

    def feed(self, token: int, logprob: TokenLogprob | None) -> bool:
        """Take the next token; True when the choice is complete and further tokens are ignored."""
        if self._ended_by_token or self._stop.stopped:
            return True
        if self.tokens == 0:
            self._emit(FirstToken(self._index))
        self.tokens += 1
        if token in self._eos:
            self._ended_by_token = True
            return True
        if logprob is not None:
            self._waiting.append(self._token_text(token, logprob))
        new = self._text.feed(token)
        self._seen += len(new)
        self._show(self._stop.feed(new), last=False)
        return self._stop.stopped

    def end(self) -> None:
        """Give out what was held back and close the choice."""
        rest = "" if self._stop.stopped else self._stop.feed(self._text.flush())
        self._show(rest + self._stop.flush(), last=True)
        reason = "stop" if self._ended_by_token or self._stop.stopped else "length"
        self._emit(Ended(self._index, reason, self.tokens))

    def _show(self, text: str, *, last: bool) -> None:
        self._shown += len(text)
        ready = []
        while self._waiting and (self._waiting[0].offset < self._shown or (last and not self._stop.stopped)):
            ready.append(self._waiting.popleft())
        if text or ready:
            self._emit(Delta(self._index, text, tuple(ready)))

    def _token_text(self, token: int, logprob: TokenLogprob) -> TokenText:
        top = tuple((self._decode([other]), value) for other, value in logprob.top)
        return TokenText(self._decode([token]), logprob.logprob, top, self._seen)
