"""How far a prompt is while the model computes it in one go, layer by layer.

Computing a prompt in pieces would tell as much, but costs up to twice the time on a CPU: attention over a piece
cannot use the causal fast path. Hooks on the layers cost about 10 microseconds a token and change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Progress = Callable[[int, int], None]
"""Called with the tokens of a prompt that are done, and all of them; may raise to give the prompt up."""


class PromptProgress:
    """Calls ``step(done, total)`` in tokens before every layer of a forward over several tokens.

    ``step`` may raise to give the prompt up. Works for models whose decoder keeps its layers in a list; for others
    it is never called.
    """

    def __init__(self, model: Any, step: Progress) -> None:
        self._step = step
        self._at = self._now = self._total = 0
        self._layers = len(layers := decoder_layers(model))
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._hook(number), with_kwargs=True)

    def begin(self, done: int, total: int) -> None:
        """A prompt of ``total`` tokens begins, of which ``done`` need not be computed."""
        self._at, self._total, self._now = done, total, 0

    def end(self) -> None:
        """The prompt is computed, or given up."""
        self._total = 0

    def _hook(self, number: int) -> Callable[..., None]:
        def before(_module: Any, args: Any, kwargs: Any) -> None:
            if self._total:
                self._before(number, args[0] if args else kwargs.get("hidden_states"))

        return before

    def _before(self, number: int, hidden: Any) -> None:
        tokens = 0 if hidden is None else int(hidden.shape[1])
        if number == 0:
            self._at, self._now = self._at + self._now, tokens
        if tokens > 1:
            self._step(min(self._at + tokens * number // self._layers, self._total - 1), self._total)


def decoder_layers(model: Any) -> list[Any]:
    """The layers that a token passes one after the other; empty if the model has no plain list of them."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    layers = getattr(decoder, "layers", None)
    return list(layers) if layers is not None and hasattr(layers, "__iter__") else []
