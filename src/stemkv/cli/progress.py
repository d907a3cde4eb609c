"""A calm progress bar on standard error: drawn in place on a terminal, a rare plain line elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

_WIDTH = 28
_QUIET_S = 0.4
"""Nothing is drawn for work that is done within this time."""
_PLAIN_EVERY_S = 15.0


class Progress:
    """Use as a context manager; the bar disappears when the work is done. Not thread-safe."""

    def __init__(self, title: str, stream: TextIO | None = None) -> None:
        self._title = title
        self._stream = stream or sys.stderr
        self._tty = self._stream.isatty()
        self._started = time.monotonic()
        self._drawn_at = self._started
        self._drawn = False

    def update(self, done: int, total: int) -> None:
        """Show ``done`` of ``total``; ``total`` 0 means unknown."""
        now = time.monotonic()
        if now - self._started < _QUIET_S:
            return
        share = min(1.0, done / total) if total else 0.0
        if self._tty:
            bar = "━" * round(share * _WIDTH) + "·" * (_WIDTH - round(share * _WIDTH))
            self._stream.write(f"\r  {bar} {share:4.0%}  {self._title} \x1b[K")
            self._stream.flush()
            self._drawn = True
        elif now - self._drawn_at >= _PLAIN_EVERY_S and share < 1:
            self._stream.write(f"{self._title}: {share:.0%}\n")
            self._stream.flush()
            self._drawn_at = now

    def __enter__(self) -> Progress:  # noqa: PYI034 - typing.Self is 3.11
        if self._tty:
            self._stream.write(f"\r  {self._title} ... \x1b[K")
            self._stream.flush()
            self._drawn = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._drawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


class Steps:
    """Tells ``update(done, total)`` how far loading a model is, from the names of the steps it announces."""

    _TOTAL = 4
    """The library, the tokenizer, the weights, and the end."""

    def __init__(self, update: Callable[[int, int], None]) -> None:
        self._update, self._begun = update, 0

    def __call__(self, name: str) -> None:
        """Step ``name`` begins."""
        self._begun += 1
        self._update(min(self._begun, self._TOTAL) - 1, self._TOTAL)
