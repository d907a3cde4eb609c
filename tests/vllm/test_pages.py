"""Pages in whatever order an engine keeps them: what is read is what is written, and nothing else is touched."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stemkv.engines._vllm_pages import Group, check_memory, memory_order, page_bytes, raw_pages
from stemkv.errors import UnsupportedModelError

BLOCKS, HEADS, TOKENS, WIDTH = 6, 3, 8, 10
LAYOUTS = {
    "block, head, token": (0, 1, 2, 3),
    "block, token, head": (0, 2, 1, 3),
    "head, block, token": (1, 0, 2, 3),
}


def memory(order: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """[blocks, heads, tokens, width] lying in memory in ``order``, with random bytes."""
    sizes = (BLOCKS, HEADS, TOKENS, WIDTH)
    flat = torch.randint(0, 256, [int(np.prod(sizes)) * dtype.itemsize], dtype=torch.uint8).view(dtype)
    made = flat.view([sizes[d] for d in order])
    return made.permute([order.index(d) for d in range(4)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("order", LAYOUTS.values(), ids=list(LAYOUTS))
def test_a_block_comes_back_as_it_was(order: tuple[int, ...], dtype: torch.dtype) -> None:
    layers = [memory(order, dtype) for _ in range(3)]
    group = Group([raw_pages(layer, BLOCKS) for layer in layers], per_block=2)
    before = [layer.clone() for layer in layers]
    out = np.empty(group.nbytes, np.uint8)
    group.read([4, 1], out)
    for layer in layers:
        layer.view(torch.uint8).zero_()
    group.write([2, 5], [True, True], memoryview(out.tobytes()))
    for layer, old in zip(layers, before, strict=True):
        assert torch.equal(layer[2].view(torch.uint8), old[4].view(torch.uint8))
        assert torch.equal(layer[5].view(torch.uint8), old[1].view(torch.uint8))
        assert not layer[[0, 1, 3, 4]].view(torch.uint8).any()


def test_pages_that_are_not_wanted_are_not_touched() -> None:
    layer = memory((0, 1, 2, 3), torch.float32)
    before = layer.clone()
    group = Group([raw_pages(layer, BLOCKS)], per_block=3)
    group.write([0, 1, 2], [False, True, False], memoryview(bytes(group.nbytes)))
    assert not layer[1].any()
    assert torch.equal(layer[[0, 2, 3, 4, 5]].view(torch.uint8), before[[0, 2, 3, 4, 5]].view(torch.uint8))


def test_kernel_blocks_make_one_page() -> None:
    layer = memory((0, 1, 2, 3), torch.bfloat16)
    pages = raw_pages(layer, BLOCKS // 2)
    assert pages.shape[0] == BLOCKS // 2
    assert page_bytes(pages) == 2 * HEADS * TOKENS * WIDTH * 2


def test_layers_of_different_sizes_live_in_one_block() -> None:
    group = Group([torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(4, 6, dtype=torch.uint8)] * 2, per_block=1)
    assert [t.shape for t in group.tensors] == [(2, 1, 8), (2, 1, 6)]
    assert group.nbytes == 28


def test_the_order_in_memory_is_part_of_the_layout() -> None:
    names = {memory_order(memory(order, torch.float32)) for order in LAYOUTS.values()}
    assert len(names) >= 2


def test_memory_that_is_not_made_of_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="is not 4 blocks"):
        raw_pages(torch.zeros(6, 2), 4)


def test_memory_that_loses_bytes_is_found_before_it_is_used() -> None:
    sound = torch.zeros(4, 8, dtype=torch.uint8)
    check_memory([Group([sound], per_block=2)])
    assert not sound.any()
    shared = torch.zeros(1, 8, dtype=torch.uint8).expand(4, 8)  # four blocks at one place
    with pytest.raises(UnsupportedModelError, match="does not give back"):
        check_memory([Group([shared], per_block=2)])
