"""From token ids to text a client may see: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

BROKEN = "\ufffd"
"""What a decoder shows for bytes that are not (yet) a character."""
_MOST_PENDING = 16
"""Tokens after which a broken tail is taken for what it is: no character is that long."""
_CONTEXT = 4
"""Tokens of the prompt that are decoded along, because a tokenizer may drop a leading space."""

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Incremental decoding of one answer. Holds back a character until all its tokens are there.

    Decoding token by token is wrong (characters span tokens, spaces depend on neighbours) and decoding
    everything each time is quadratic; so a short window is decoded twice, without and with the new tokens.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(prompt[-_CONTEXT:])
        self._start = 0
        """First token of the window."""
        self._read = len(self._ids)
        """First token whose text was not given out."""
        self._begun = False

    def feed(self, token: int) -> str:
        """The new text that ``token`` completes; empty while a character is unfinished."""
        self._ids.append(token)
        return self._take(final=False)

    def flush(self) -> str:
        """What is left at the end, without an unfinished character."""
        return self._take(final=True).rstrip(BROKEN)

    def _take(self, *, final: bool) -> str:
        if self._read == len(self._ids):
            return ""
        known = self._decode(self._ids[self._start : self._read])
        if not self._begun:  # a character that the prompt left unfinished is shown with the answer
            known = known.rstrip(BROKEN)
        text = self._decode(self._ids[self._start :])
        unfinished = text.endswith(BROKEN) or len(text) <= len(known)
        if unfinished and not final and len(self._ids) - self._read < _MOST_PENDING:
            return ""
        self._start, self._read, self._begun = self._read, len(self._ids), True
        return text[len(known) :]


class StopMatcher:
    """Cuts a text at the stop string that is complete first; the cut does not depend on how the text arrives.

    What might be the beginning of a stop string is held back until it is decided.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False
        """A stop string was found; what follows is ignored."""

    def feed(self, text: str) -> str:
        """The part of ``text`` (and of what was held back) that may be shown now."""
        if self.stopped:
            return ""
        self._held += text
        cut = self._first_stop()
        if cut is not None:
            self.stopped = True
            shown, self._held = self._held[:cut], ""
            return shown
        keep = self._undecided()
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(shown) :]
        return shown

    def flush(self) -> str:
        """What was held back, at the end of the answer."""
        shown, self._held = self._held, ""
        return shown

    def _first_stop(self) -> int | None:
        """Where the stop string that ends first begins (of several that end there, the longest)."""
        found = [(at + len(s), at) for s in self._stops if (at := self._held.find(s)) >= 0]
        return min(found)[1] if found else None

    def _undecided(self) -> int:
        """Length of the longest tail that is a proper beginning of a stop string."""
        longest = max((len(s) for s in self._stops), default=0) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-size:]
            if any(len(s) > size and s.startswith(tail) for s in self._stops):
                return size
        return 0
