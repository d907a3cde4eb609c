"""Between payloads and the cache: the buffers of one call, loading into them, copying out of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stemkv.engines._arena import Arena
from stemkv.engines._groups import TO_DTYPE, Plan, states_of
from stemkv.engines._layers import GrowingLayer
from stemkv.identity import GroupSpec, HitPolicy
from stemkv.keys import BlockRef
from stemkv.match import Match
from stemkv.tiers.base import Sink


class Row(NamedTuple):
    """One prompt of a batch."""

    pad: int
    """Padding columns in front of it."""
    tokens: list[int]


_RAW = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.int16), 4: (torch.int32, np.int32), 8: (torch.int64, np.int64)}
"""The integer type by which elements of a size are moved: numpy has no bfloat16."""


def arrays_in(spec: GroupSpec, payload: memoryview) -> list[np.ndarray]:
    """The tensors of a block as integer arrays, views of its payload."""
    views, at = [], 0
    for t in spec.tensors:
        kind = _RAW[TO_DTYPE[t.dtype].itemsize][1]
        views.append(np.frombuffer(payload, kind, t.nbytes // kind().itemsize, at).reshape(t.shape))
        at += t.nbytes
    return views


def write(tensor: Tensor, array: np.ndarray) -> None:
    """Copy ``array`` (integers) into ``tensor``, bit for bit."""
    # Host copies go through numpy: torch would start a team of threads in each of the pool's reading threads.
    if tensor.device.type == "cpu":
        _raw(tensor).numpy()[...] = array
    else:
        _raw(tensor).copy_(torch.from_numpy(np.broadcast_to(array, tensor.shape).copy()))


def read(tensor: Tensor, array: np.ndarray) -> None:
    """Copy ``tensor`` into ``array`` (integers), bit for bit."""
    if tensor.device.type == "cpu":
        array[...] = _raw(tensor).numpy()
    else:
        array[...] = _raw(tensor).cpu().numpy()


def _raw(tensor: Tensor) -> Tensor:
    return tensor.detach().view(_RAW[tensor.dtype.itemsize][0])


class Stack(NamedTuple):
    """One tensor kind (keys or values) of all layers of a group: ``[rows, heads, columns, dim]`` each."""

    layers: tuple[Tensor, ...]
    whole: Tensor | None
    """The same as one ``[layers, rows, heads, columns, dim]`` tensor where the layers still share their storage."""

    def put(self, block: np.ndarray, rows: slice, start: int, stop: int) -> None:
        """Write the first columns of ``block`` (layers, heads, tokens, dim) to columns ``start:stop`` of ``rows``."""
        block = block[:, None, :, : stop - start]
        if self.whole is not None:
            write(self.whole[:, rows, :, start:stop], block)
            return
        for layer, part in zip(self.layers, block, strict=True):
            write(layer[rows, :, start:stop], part)

    def take(self, block: np.ndarray, row: int, start: int) -> None:
        """Copy columns from ``start`` on of ``row`` into ``block``."""
        stop = start + block.shape[2]
        if self.whole is not None:
            read(self.whole[:, row, :, start:stop], block)
            return
        for layer, part in zip(self.layers, block, strict=True):
            read(layer[row, :, start:stop], part)

    def zero(self, rows: slice, stop: int) -> None:
        for layer in self.layers:
            layer[rows, :, :stop].zero_()


class Buffers:
    """The layers of one call and the buffers behind them."""

    def __init__(self, plan: Plan, rows: int, arena: Arena) -> None:
        self.plan = plan
        self._arena = arena
        self.rows = rows
        self.layers = plan.make_layers()
        self._stacks: dict[int, tuple[Stack, Stack]] = {}

    def allocate(self, capacity: int, columns: int, dropped: dict[int, int]) -> None:
        """Give every attention layer room for ``capacity`` columns, of which ``columns`` are about to be loaded.

        ``dropped`` has the first column kept of each TRAILING group.
        """
        for group, spec in enumerate(self.plan.groups):
            if spec.policy is HitPolicy.EXACT:
                continue
            first = dropped.get(group, 0)
            stacks = tuple(self._stack(spec, tensor, capacity - first) for tensor in (0, 1))
            self._stacks[group] = (stacks[0], stacks[1])
            for index, keys, values in zip(spec.layers, stacks[0].layers, stacks[1].layers, strict=True):
                self.layers[index].adopt(keys, values, filled=columns - first, dropped=first)

    def _stack(self, spec: GroupSpec, tensor: int, capacity: int) -> Stack:
        _, heads, _, dim = spec.tensors[tensor].shape
        dtype = TO_DTYPE[spec.tensors[tensor].dtype]
        shape = (self.rows, heads, capacity, dim)
        devices = [self.plan.devices[i] for i in spec.layers]
        if len(set(devices)) == 1:
            whole = self._arena.empty((len(devices), *shape), dtype, devices[0])
            return Stack(tuple(whole), whole)
        return Stack(tuple(self._arena.empty(shape, dtype, d) for d in devices), None)

    def stacks(self, group: int) -> tuple[Stack, Stack]:
        """Keys and values of a group as they are now: layers may have moved to other buffers meanwhile."""
        layers = [self.layers[i] for i in self.plan.groups[group].layers]
        old = self._stacks.get(group)
        keys, values = tuple(layer.key_buffer for layer in layers), tuple(layer.value_buffer for layer in layers)
        if old is not None and all(a is b for a, b in zip(keys, old[0].layers, strict=True)):
            return old
        return Stack(keys, None), Stack(values, None)

    def dropped(self, group: int) -> int:
        """First column that the buffers of ``group`` hold."""
        return int(self.layers[self.plan.groups[group].layers[0]].dropped)

    def attention_groups(self) -> list[int]:
        return [g for g, spec in enumerate(self.plan.groups) if spec.policy is not HitPolicy.EXACT]

    def growing_layers(self) -> list[GrowingLayer]:
        return [layer for layer in self.layers if isinstance(layer, GrowingLayer)]

    def columns(self) -> int:
        """Columns that all attention layers have; 0 for a model without any."""
        return min((int(self.layers[i].get_seq_length()) for g in self.attention_groups()
                    for i in self.plan.groups[g].layers), default=0)  # fmt: skip

    def freeze(self, columns: int) -> None:
        """From now on columns before ``columns`` may be read by another thread."""
        for layer in self.growing_layers():
            layer.frozen = max(layer.frozen, columns)

    def snapshot(self, row: int) -> dict[int, list[Tensor]]:
        """A copy of the recurrent state of ``row``, for each EXACT group its tensors stacked over layers."""
        copies = {}
        for group, spec in enumerate(self.plan.groups):
            if spec.policy is HitPolicy.EXACT:
                states = [dict(states_of(self.layers[i])) for i in spec.layers]
                copies[group] = [torch.stack([s[t.name][row] for s in states]) for t in spec.tensors]
        return copies

    def set_state(self, group: int, rows: slice, arrays: Sequence[np.ndarray]) -> None:
        """Write one row's recurrent state into ``rows`` and mark it as there."""
        spec = self.plan.groups[group]
        for position, index in enumerate(spec.layers):
            layer, device = self.layers[index], self.plan.devices[index]
            for t, stacked in zip(spec.tensors, arrays, strict=True):
                kind, number = ("conv", int(t.name[4:])) if t.name.startswith("conv") else ("state", int(t.name[5:]))
                states = layer.conv_states if kind == "conv" else layer.recurrent_states
                if states[number] is None:
                    shape = torch.empty((self.rows, *t.shape[1:]), dtype=TO_DTYPE[t.dtype], device=device)
                    name = "conv_states" if kind == "conv" else "recurrent_states"
                    layer.lazy_initialization(**{name: shape, "state_idx": number})
                write(states[number][rows], stacked[position])
                layer.has_previous_state[number] = True


class LoadInto(Sink):
    """Scatters the blocks of one prompt into the buffers, also from several threads at once."""

    def __init__(self, buffers: Buffers, match: Match, row: Row, rows: slice, columns: int) -> None:
        self._buffers, self._match, self._row, self._rows, self._columns = buffers, match, row, rows, columns
        self._stacks = {g: (buffers.stacks(g), buffers.dropped(g)) for g in buffers.attention_groups()}

    def accept(self, index: int, payload: memoryview) -> None:
        ref = self._match.refs[index]
        arrays = arrays_in(ref.spec, payload)
        if ref.spec.policy is HitPolicy.EXACT:
            self._buffers.set_state(ref.group, self._rows, arrays)
            return
        stacks, dropped = self._stacks[ref.group]
        start = self._row.pad + ref.first_token
        stop = min(start + ref.token_count, self._columns)
        if stop > start:
            for stack, array in zip(stacks, arrays, strict=True):
                stack.put(array, self._rows, start - dropped, stop - dropped)


class CopyOut:
    """The source of one prompt's new blocks; reads frozen columns and copies of states, on the writer thread."""

    def __init__(self, buffers: Buffers, row: Row, at: int, states: dict[int, dict[int, Any]]) -> None:
        self._pad, self._at = row.pad, at
        self._stacks = {g: (buffers.stacks(g), buffers.dropped(g)) for g in buffers.attention_groups()}
        self._states = states

    def fill(self, ref: BlockRef, payload: memoryview) -> None:
        """Write the payload of ``ref``."""
        arrays = arrays_in(ref.spec, payload)
        if ref.spec.policy is HitPolicy.EXACT:
            for array, state in zip(arrays, self._states[ref.index][ref.group], strict=True):
                read(state, array)
            return
        stacks, dropped = self._stacks[ref.group]
        for stack, array in zip(stacks, arrays, strict=True):
            stack.take(array, self._at, self._pad + ref.first_token - dropped)
