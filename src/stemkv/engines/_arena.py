"""Host memory for caches, used again from call to call.

The first touch of fresh memory costs more than copying a block into it (a page fault for every 4 KiB), so that
a warm request would spend most of its loading time there.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 64


class Arena:
    """Hands out uninitialised tensors; a chunk is used again when no tensor refers to it any more.

    Keeps at most ``keep_bytes`` of idle memory. Not thread-safe: one call at a time allocates.
    """

    def __init__(self, keep_bytes: int = 1 << 30) -> None:
        self._keep_bytes = keep_bytes
        self._chunks: list[np.ndarray] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None) -> Tensor:
        """Like torch.empty; memory of the host comes from a chunk."""
        if device is None or device.type != "cpu":
            return torch.empty(tuple(shape), dtype=dtype, device=device)
        nbytes = math.prod(shape) * dtype.itemsize
        chunk = self._take(nbytes + _ALIGNMENT)
        start = -chunk.__array_interface__["data"][0] % _ALIGNMENT
        return torch.from_numpy(chunk)[start : start + nbytes].view(dtype).view(tuple(shape))

    def _take(self, nbytes: int) -> np.ndarray:
        for number in range(len(self._chunks)):
            # Two references: the list's and getrefcount's own argument.
            if nbytes <= self._chunks[number].nbytes <= 2 * nbytes + (1 << 20) and (
                sys.getrefcount(self._chunks[number]) <= 2
            ):
                self._chunks.append(self._chunks.pop(number))
                return self._chunks[-1]
        # Not np.empty: it asks for huge pages, which the kernel may take long to put together.
        self._chunks.append(np.frombuffer(mmap.mmap(-1, nbytes), np.uint8))
        self._forget()
        return self._chunks[-1]

    def _forget(self) -> None:
        """Drop the chunks that were unused longest; those still in use live on until their tensors are gone."""
        while len(self._chunks) > 1 and sum(chunk.nbytes for chunk in self._chunks) > self._keep_bytes:
            del self._chunks[0]
