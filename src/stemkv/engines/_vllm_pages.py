"""KV memory of the engine as opaque pages, and copying them in and out.

A page is what one layer keeps of one engine block. Its bytes mean nothing here (on CPUs keys are transposed or packed
for matrix units; on GPUs layouts change with the attention library), so pages are only ever copied whole, element by
element in the order in which they lie in memory, and the layout's name is part of the identity.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stemkv.errors import UnsupportedModelError
from stemkv.identity import TensorSpec

_RAW = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.int16), 4: (torch.int32, np.int32), 8: (torch.int64, np.int64)}


def raw_pages(tensor: Tensor, num_blocks: int) -> Tensor:
    """``tensor`` as integers ``[num_blocks, ...]``, the dimensions of a page in memory order. Raises ValueError."""
    if tensor.dtype.itemsize not in _RAW or tensor.ndim < 2 or tensor.shape[0] % num_blocks:
        raise ValueError(f"KV memory {tuple(tensor.shape)} of {tensor.dtype} is not {num_blocks} blocks")
    raw = tensor.detach().view(_RAW[tensor.dtype.itemsize][0])
    if raw.shape[0] != num_blocks:  # kernels may use smaller blocks than the engine: some of them make a page
        raw = raw.unflatten(0, (num_blocks, raw.shape[0] // num_blocks))
    inner = sorted(range(1, raw.ndim), key=lambda d: (-raw.stride(d), d))
    return raw.permute(0, *inner)


def memory_order(tensor: Tensor) -> str:
    """In which order a page's dimensions lie in memory, for the layout's name."""
    inner = sorted(range(1, tensor.ndim), key=lambda d: (-tensor.stride(d), d))
    return "".join(map(str, inner)) + ":" + "x".join(str(tensor.shape[d]) for d in inner)


def page_bytes(pages: Tensor) -> int:
    """Bytes of one page."""
    return math.prod(pages.shape[1:]) * pages.dtype.itemsize


class Group:
    """The pages of one KV group of the engine: ``per_block`` consecutive engine blocks make one stored block.

    A payload has, for each layer in order, its pages. Reading and writing may happen on any thread.
    """

    def __init__(self, layers: Sequence[Tensor], per_block: int) -> None:
        sizes: dict[int, list[Tensor]] = {}
        for pages in layers:
            sizes.setdefault(page_bytes(pages), []).append(pages)
        self.per_block = per_block
        self.tensors = tuple(
            TensorSpec(f"pages-{i}" if i else "pages", "U8", (len(same), per_block, size))
            for i, (size, same) in enumerate(sizes.items())
        )
        self.layers = [pages for same in sizes.values() for pages in same]
        self.nbytes = sum(t.nbytes for t in self.tensors)
        self.on_host = all(pages.device.type == "cpu" for pages in self.layers)
        # numpy: torch would start a team of threads in each thread that copies.
        self._host = [pages.numpy() for pages in self.layers] if self.on_host else []

    def read(self, ids: Sequence[int], out: np.ndarray) -> None:
        """Copy the pages of the engine blocks ``ids`` into ``out`` (bytes). For KV memory of the host."""
        for pages, part in self._parts(out):
            for block, page in zip(ids, part, strict=True):
                page[...] = pages[block]

    def write(self, ids: Sequence[int], wanted: Sequence[bool], payload: memoryview) -> None:
        """Copy a payload into those of the engine blocks ``ids`` that are wanted."""
        if not self.on_host:
            self._write_device(ids, wanted, payload)
            return
        for pages, part in self._parts(np.frombuffer(payload, np.uint8)):
            for block, page, take in zip(ids, part, wanted, strict=True):
                if take:
                    pages[block] = page

    def _parts(self, flat: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        parts, at = [], 0
        for pages in self._host:
            size = pages[0].nbytes * self.per_block
            part = flat[at : at + size].view(pages.dtype).reshape(self.per_block, *pages.shape[1:])
            parts.append((pages, part))
            at += size
        return parts

    # -- devices: written with care after vLLM's own connectors, not run on a GPU by our tests -------------------

    def read_device(self, ids: Sequence[int], out: Tensor) -> None:
        """Queue copies of the pages of ``ids`` into pinned ``out`` (uint8) on the current stream."""
        at = 0
        for pages in self.layers:
            size = page_bytes(pages)
            for block in ids:
                page = pages[block]
                out[at : at + size].view(page.dtype).view(page.shape).copy_(page, non_blocking=True)
                at += size

    def _write_device(self, ids: Sequence[int], wanted: Sequence[bool], payload: memoryview) -> None:
        staged = torch.frombuffer(bytearray(payload), dtype=torch.uint8).pin_memory()
        at = 0
        with torch.cuda.stream(_load_stream(self.layers[0].device)):
            for pages in self.layers:
                size = page_bytes(pages)
                for block, take in zip(ids, wanted, strict=True):
                    if take:
                        page = pages[block]
                        page.copy_(staged[at : at + size].view(page.dtype).view(page.shape), non_blocking=True)
                    at += size
            torch.cuda.current_stream().synchronize()  # the bytes are there before anybody hears of it


_streams: dict[tuple[Any, int], Any] = {}


def _load_stream(device: torch.device) -> Any:
    """A stream of this thread's own."""
    key = (device, threading.get_ident())
    if key not in _streams:
        _streams[key] = torch.cuda.Stream(device)
    return _streams[key]


def copies_of(groups: Sequence[Group]) -> HostCopies | DeviceCopies:
    """New copies for a step."""
    return (HostCopies if all(group.on_host for group in groups) else DeviceCopies)(groups)


def check_memory(groups: Sequence[Group]) -> None:
    """Write random bytes, read them back, leave zeros; before the engine uses its memory. Raises if they differ."""
    for group in groups:
        ids = range(group.per_block)
        written, copies = os.urandom(group.nbytes), copies_of([group])
        group.write(ids, [True] * len(ids), memoryview(written))
        copies.take(0, 0, ids)
        copies.taken()
        found = bytearray(group.nbytes)
        copies.fill(SimpleNamespace(group=0, index=0), memoryview(found))
        group.write(ids, [True] * len(ids), memoryview(bytes(group.nbytes)))
        if found != written:
            raise UnsupportedModelError("this engine's KV memory does not give back the bytes that were written to it")


class HostCopies:
    """Copies of blocks on their way to the pool, taken before the engine may overwrite its own. One a step."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._copies: dict[tuple[int, int], np.ndarray] = {}

    def take(self, group: int, index: int, ids: Sequence[int]) -> None:
        """Copy block ``index`` of ``group`` from the engine blocks ``ids``."""
        copy = np.empty(self._groups[group].nbytes, np.uint8)
        self._groups[group].read(ids, copy)
        self._copies[group, index] = copy

    def taken(self) -> None:
        """Called when all copies of the step are taken."""

    def fill(self, ref: Any, payload: memoryview) -> None:
        """Give a copy to the pool (see ``BlockSource``); it is dropped then."""
        payload[:] = self._copies.pop((ref.group, ref.index)).data


class DeviceCopies:
    """The same for device memory: copied on the step's own stream, so that later steps cannot overtake the copy.

    Not run on a GPU by our tests.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._copies: dict[tuple[int, int], Tensor] = {}
        self._done: Any = None

    def take(self, group: int, index: int, ids: Sequence[int]) -> None:
        """Queue the copy of block ``index`` of ``group``."""
        copy = torch.empty(self._groups[group].nbytes, dtype=torch.uint8, pin_memory=True)
        self._groups[group].read_device(ids, copy)
        self._copies[group, index] = copy

    def taken(self) -> None:
        """Mark the point on the stream after which the copies are complete."""
        self._done = torch.cuda.Event()
        self._done.record()

    def fill(self, ref: Any, payload: memoryview) -> None:
        """Wait for the copy (on the writer's thread) and give it to the pool."""
        self._done.synchronize()
        payload[:] = self._copies.pop((ref.group, ref.index)).numpy().data
