"""Cache layers whose keys and values live in buffers with room to grow.

transformers' own layers copy the whole prefix with ``torch.cat`` for every new token. These write in place and
hand out views, so that a stored block is scattered straight to where attention reads it, and so that a block can
be copied out later without a snapshot: what lies below :attr:`GrowingLayer.frozen` is never written again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

_MIN_ROOM = 64
"""Columns added at least when a buffer has to grow."""


class GrowingLayer:
    """Mixin: keys and values as ``[rows, heads, capacity, dim]`` buffers, of which a run of columns is in use.

    A *column* is a position in the padded batch. The buffer holds columns ``dropped .. dropped + filled``; a
    sliding window may drop columns in front, full attention never does.
    """

    keys: Tensor | None
    values: Tensor | None
    is_initialized: bool
    window = 0
    """Columns a token attends to, itself included; 0 for all."""
    record_past = False

    def start_empty(self) -> None:
        """Forget everything, buffers included."""
        self.key_buffer: Tensor | None = None
        self.value_buffer: Tensor | None = None
        self.dropped = 0
        self.filled = 0
        self.frozen = 0
        """Columns below this may be being read by another thread; they are never written in place."""
        self.hold = False
        """Keep columns that the window has passed, because they are not stored yet."""
        self.keys = self.values = None
        self.is_initialized = False

    def adopt(self, keys: Tensor, values: Tensor, *, filled: int, dropped: int = 0) -> None:
        """Take over buffers whose first ``filled`` columns are valid and stand for columns from ``dropped`` on."""
        self.key_buffer, self.value_buffer = keys, values
        self.dropped, self.filled = dropped, filled
        self.device = keys.device
        self.is_initialized = filled > 0
        self._publish()

    # -- what the model calls ------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.device = key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append and return what attention must see: everything, or the window before the new tokens and those."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new, past = key_states.shape[-2], self.dropped + self.filled
        keys, values = self._room(key_states, value_states)
        at, end = self.filled, self.filled + new
        keys[:, :, at:end].copy_(key_states)
        values[:, :, at:end].copy_(value_states)
        self.filled = end
        self._publish()
        visible = past + new if not self.window else min(past, self.window - 1) + new
        return keys[:, :, end - visible : end], values[:, :, end - visible : end]

    def get_seq_length(self) -> int:
        return self.dropped + self.filled

    def reset(self) -> None:
        self.start_empty()
        self._publish()

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last ``-tokens_to_remove`` columns."""
        if tokens_to_remove > 0:
            raise ValueError("crop takes the number of tokens to remove as a negative number")
        left = self.get_seq_length() + tokens_to_remove
        if self.window and left - self.dropped < min(left, self.window - 1):
            raise RuntimeError(
                "crop goes back further than this sliding-window layer remembers; "
                "call activate_past_recording before generating"
            )
        self.filled = max(0, left - self.dropped)
        self._publish()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._take_rows(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.key_buffer is not None:
            self._take_rows([row for row in range(self.key_buffer.shape[0]) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.key_buffer is not None:
            self._take_rows(torch.arange(self.key_buffer.shape[0])[indices.to("cpu")].tolist())

    # -- what the engine calls -----------------------------------------------------------------------------

    def trim(self, stored: int) -> None:
        """Let go of columns before ``stored`` that the window has passed; the old buffers stay for their readers."""
        keep = max(self.window - 1, self.get_seq_length() - stored)
        if self.window and keep < self.filled and not self.record_past:
            self._move(self.filled - keep, keep + max(_MIN_ROOM, self.window))
            self._publish()

    # -- inside --------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        """Keep ``keys`` and ``values`` what other code expects to find there: the valid columns."""
        if self.key_buffer is None or self.value_buffer is None or not self.is_initialized:
            self.keys = self.values = None
        else:
            self.keys = self.key_buffer[:, :, : self.filled]
            self.values = self.value_buffer[:, :, : self.filled]
        if self.window:
            self.cumulative_length = self.get_seq_length()

    def _room(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Buffers into which ``key_states`` fits behind what is there, without touching a frozen column."""
        keys, values, needed = self.key_buffer, self.value_buffer, self.filled + key_states.shape[-2]
        if keys is None or values is None or (self.filled == 0 and not _fits(keys, key_states)):
            self.key_buffer, self.value_buffer = (
                torch.empty((*t.shape[:2], needed + _MIN_ROOM, t.shape[-1]), dtype=t.dtype, device=t.device)
                for t in (key_states, value_states)
            )
            self.frozen = 0
        elif not _fits(keys, key_states):
            raise RuntimeError(f"rows, heads or dtype of the new keys do not fit a cache of {tuple(keys.shape)}")
        elif needed > keys.shape[2] or self.get_seq_length() < self.frozen:
            drop = 0
            if self.window and not self.hold and not self.record_past:
                drop = max(0, self.filled - (self.window - 1))
            self._move(drop, max(needed - drop + _MIN_ROOM, (needed - drop) * 3 // 2))
        return _there(self.key_buffer), _there(self.value_buffer)

    def _move(self, drop: int, capacity: int) -> None:
        """Go on in new buffers of ``capacity`` columns, leaving out the first ``drop`` columns."""
        self.key_buffer, self.value_buffer = (
            _copy_columns(_there(t), drop, self.filled, capacity) for t in (self.key_buffer, self.value_buffer)
        )
        self.dropped, self.filled, self.frozen = self.dropped + drop, self.filled - drop, 0

    def _take_rows(self, rows: list[int]) -> None:
        """Go on with these rows, in new buffers: the old ones may be being read."""
        if self.key_buffer is None or self.value_buffer is None:
            return
        self.key_buffer, self.value_buffer = (
            _copy_rows(t, rows, self.filled) for t in (self.key_buffer, self.value_buffer)
        )
        self.frozen = 0
        self._publish()


def _fits(buffer: Tensor, states: Tensor) -> bool:
    return (
        buffer.shape[:2] == states.shape[:2]
        and buffer.shape[3] == states.shape[3]
        and buffer.dtype == states.dtype
        and buffer.device == states.device
    )


def _there(buffer: Tensor | None) -> Tensor:
    if buffer is None:
        raise RuntimeError("a cache layer without keys and values was asked to grow")
    return buffer


def _copy_columns(old: Tensor, start: int, stop: int, capacity: int) -> Tensor:
    new = old.new_empty((*old.shape[:2], capacity, old.shape[-1]))
    new[:, :, : stop - start].copy_(old[:, :, start:stop])
    return new


def _copy_rows(old: Tensor, rows: list[int], filled: int) -> Tensor:
    new = old.new_empty((len(rows), *old.shape[1:]))
    for to, row in enumerate(rows):
        new[to, :, :filled].copy_(old[row, :, :filled])
    return new


class FullLayer(GrowingLayer, DynamicLayer):
    """Full attention."""

    def __init__(self) -> None:
        DynamicLayer.__init__(self)
        self.start_empty()


class WindowLayer(GrowingLayer, DynamicSlidingWindowLayer):
    """Sliding-window (or chunked) attention."""

    def __init__(self, window: int) -> None:
        DynamicSlidingWindowLayer.__init__(self, sliding_window=window)
        self.window = window
        self.start_empty()


class _WithState(GrowingLayer):
    """A layer that has attention and recurrent state side by side."""

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        if args:
            GrowingLayer.lazy_initialization(self, *args)
        else:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        GrowingLayer.reset(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        GrowingLayer.reorder_cache(self, beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        LinearAttentionLayer.crop(self, tokens_to_remove)
        GrowingLayer.crop(self, tokens_to_remove)


class FullAndStateLayer(_WithState, LinearAttentionAndFullAttentionLayer):
    """Full attention beside a recurrent state."""

    def __init__(self, number_of_states: int) -> None:
        LinearAttentionAndFullAttentionLayer.__init__(self, number_of_states=number_of_states)
        self.start_empty()


class WindowAndStateLayer(_WithState, LinearAttentionAndSlidingWindowAttentionLayer):
    """Sliding-window attention beside a recurrent state."""

    def __init__(self, window: int, number_of_states: int) -> None:
        LinearAttentionAndSlidingWindowAttentionLayer.__init__(
            self, sliding_window=window, number_of_states=number_of_states
        )
        self.window = window
        self.start_empty()
