"""Ways in which stored bytes go wrong, each with the causes by which a reader may name them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from stemkv import block
from stemkv.keys import BlockRef, Namespace
from stemkv.misses import CORRUPT, Cause
from stemkv.sealing import Sealer
from stemkv.testing import samples

IN_HEADER = CORRUPT - {Cause.BAD_SIZE}
"""What a flipped bit in a header may come out as: it depends on the field it hit."""
_SIZE = frozenset({Cause.BAD_SIZE})


class Mutation(NamedTuple):
    """One way to change the stored form of a block."""

    name: str
    change: Callable[[bytes], bytes]
    causes: frozenset[Cause]


def flip(at: int, bit: int) -> Callable[[bytes], bytes]:
    """Flip one bit."""

    def change(raw: bytes) -> bytes:
        return raw[:at] + bytes([raw[at] ^ (1 << bit)]) + raw[at + 1 :]

    return change


def cut(size: int) -> Callable[[bytes], bytes]:
    """Keep the first ``size`` bytes."""
    return lambda raw: raw[:size]


def grow(by: int) -> Callable[[bytes], bytes]:
    """Append ``by`` zeros."""
    return lambda raw: raw + bytes(by)


def zero(start: int, size: int) -> Callable[[bytes], bytes]:
    """Overwrite ``size`` bytes from ``start`` by zeros."""
    return lambda raw: raw[:start] + bytes(size) + raw[start + size :]


def swap(raw: bytes) -> Callable[[bytes], bytes]:
    """Put other bytes in their place."""
    return lambda _: raw


def places(raw: bytes) -> dict[str, range]:
    """The kinds of places in a block file, with their bytes."""
    header = 8 + int.from_bytes(raw[:8], "little")
    end = len(raw[8:header].rstrip()) + 8
    tag = raw.index(b'"tag":"') + len(b'"tag":"')
    return {
        "length": range(8),
        "json": range(8, end),
        "padding": range(end, header),
        "tag": range(tag, tag + 32),
        "payload": range(header, len(raw)),
    }


def flips(raw: bytes, count: int, chance: random.Random) -> Iterator[Mutation]:
    """``count`` single-bit flips, the same number at every kind of place."""
    kinds = list(places(raw).items())
    for i in range(count):
        kind, where = kinds[i % len(kinds)]
        at, bit = chance.choice(where), chance.randrange(8)
        causes = frozenset({Cause.BAD_TAG}) if kind == "payload" else IN_HEADER
        yield Mutation(f"flip {kind} byte {at} bit {bit}", flip(at, bit), causes)


def resizes(size: int, chance: random.Random) -> Iterator[Mutation]:
    """Truncation and extension by little and much."""
    for keep in sorted({0, 1, 7, 8, 9, 4095, 4096, size - 1, chance.randrange(1, size)}):
        if keep < size:
            yield Mutation(f"truncate to {keep}", cut(keep), _SIZE)
    for more in (1, 4096, chance.randrange(2, 10_000)):
        yield Mutation(f"extend by {more}", grow(more), _SIZE)


def zeroings(size: int, chance: random.Random) -> Iterator[Mutation]:
    """What a power cut leaves: all zeros, or zeros from some page on."""
    yield Mutation("all zeros", zero(0, size), IN_HEADER)
    for page in range(4096, size, 4096):
        yield Mutation(f"zeros from {page}", zero(page, size - page), frozenset({Cause.BAD_TAG}))
    at = chance.randrange(8, 512)
    yield Mutation(f"zeros at {at}", zero(at, 64), IN_HEADER)


def impostors(ref: BlockRef, sealer: Sealer) -> Iterator[Mutation]:
    """Whole, rightly tagged records of something else in the place of ``ref``."""
    space = ref.namespace
    other = samples.identity("other model")
    claims = {
        Cause.BAD_KEY: samples.forged(ref, sealer=sealer, key=bytes(32)),
        Cause.BAD_NAMESPACE: samples.forged(ref, sealer=sealer, namespace_id=bytes(32)),
        Cause.BAD_IDENTITY: samples.forged(ref, sealer=sealer, other_identity=other),
        Cause.BAD_GENERATION: samples.forged(ref, sealer=sealer, generation=space.generation + 1),
        Cause.BAD_TOKENS: samples.forged(ref, sealer=sealer, tokens_digest=bytes(32)),
    }
    for cause, raw in claims.items():
        yield Mutation(f"forged: {cause.value}", swap(raw), frozenset({cause}))
    # Real blocks of the same text, copied from elsewhere: already their key is another.
    elsewhere = {
        "another model": Namespace(other),
        "another generation": Namespace(space.identity, generation=space.generation + 1),
        "another tenant": Namespace(space.identity, tenant="somebody else"),
    }
    for name, where in elsewhere.items():
        raw = samples.stored_form(samples.record(samples.chain(1, of=where).ref(0, 0), sealer=sealer))
        yield Mutation(f"copied from {name}", swap(raw), frozenset({Cause.BAD_KEY}))
    newer = samples.stored_form(samples.record(ref, sealer=sealer)).replace(block.FORMAT.encode(), b"stemkv-block/2", 1)
    yield Mutation("a newer format", swap(newer), frozenset({Cause.BAD_VERSION}))


def every_kind(ref: BlockRef, sealer: Sealer, *, flips_each: int = 8, seed: int = 0) -> list[Mutation]:
    """At least one mutation of every kind, the same ones for the same ``seed``."""
    chance = random.Random(seed)  # noqa: S311 - which byte to change, not a secret
    raw = samples.stored_form(samples.record(ref, sealer=sealer))
    return [
        *flips(raw, flips_each * len(places(raw)), chance),
        *resizes(len(raw), chance),
        *zeroings(len(raw), chance),
        *impostors(ref, sealer),
    ]
