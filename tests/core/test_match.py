"""How far a hit reaches, against the definition written out by brute force."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemkv.identity import GroupSpec, HitPolicy
from stemkv.match import ABSENT, refs_to_load, usable_blocks

from . import make

BLOCK_TOKENS = 4


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[GroupSpec], tuple[list[int], ...], int]:
    """Groups of any policies, the tier of each of their blocks, and the run of the PREFIX groups."""
    length = draw(st.integers(0, 12))
    groups = draw(st.lists(st.sampled_from([make.PREFIX, make.EXACT, *TRAILINGS]), min_size=1, max_size=4))
    tier = st.sampled_from([0, 0, 0, 1, ABSENT])
    presence = tuple(draw(st.lists(tier, min_size=length, max_size=length)) for _ in groups)
    runs = [[*w, ABSENT].index(ABSENT) for g, w in zip(groups, presence, strict=True) if g is make.PREFIX]
    return groups, presence, min(runs, default=length)


TRAILINGS = [msgspec.structs.replace(make.TRAILING, window=w) for w in (1, 2, 5, 6, 9, 40)]


@settings(max_examples=500)
@given(worlds())
def test_a_hit_ends_at_the_last_boundary_where_every_group_has_all_it_needs(
    world: tuple[list[GroupSpec], tuple[list[int], ...], int],
) -> None:
    groups, presence, run = world

    def possible(boundary: int) -> bool:
        for spec, where in zip(groups, presence, strict=True):
            if spec.policy is HitPolicy.EXACT:
                needed = [boundary - 1]
            elif spec.policy is HitPolicy.PREFIX:
                needed = list(range(boundary))
            else:
                first_token = max(0, boundary * BLOCK_TOKENS - (spec.window - 1))
                needed = sorted({t // BLOCK_TOKENS for t in range(first_token, boundary * BLOCK_TOKENS)})
            if any(where[i] == ABSENT for i in needed):
                return False
        return True

    expected = max((b for b in range(1, run + 1) if possible(b)), default=0)
    assert usable_blocks(groups, presence, run, BLOCK_TOKENS) == expected


@given(worlds())
def test_exactly_the_needed_blocks_are_loaded_each_from_the_tier_that_has_it(
    world: tuple[list[GroupSpec], tuple[list[int], ...], int],
) -> None:
    groups, presence, run = world
    chain = make.chain(len(presence[0]), ns=make.namespace(*groups))
    blocks = usable_blocks(groups, presence, run, BLOCK_TOKENS)
    refs, where = refs_to_load(chain, presence, blocks)
    wanted = {(g, i) for g, s in enumerate(groups) for i in s.blocks_needed(blocks, BLOCK_TOKENS) if blocks}
    assert [(r.group, r.index) for r in refs] == sorted(wanted)
    assert where == tuple(presence[r.group][r.index] for r in refs)
    assert ABSENT not in where


@pytest.mark.parametrize("blocks", [2000])
def test_looking_for_a_boundary_is_linear_in_the_prompt(blocks: int) -> None:
    """A long prompt whose windows are all missing must not cost windows times blocks."""
    calls = 0

    class Counting(list[int]):
        def __getitem__(self, at: object) -> int:  # type: ignore[override]
            nonlocal calls
            calls += 1
            return ABSENT

    wide = msgspec.structs.replace(make.TRAILING, window=4 * blocks)
    assert usable_blocks([wide], (Counting([ABSENT] * blocks),), blocks, BLOCK_TOKENS) == 0
    assert calls <= 2 * blocks
