"""Health of the store, found out by using it: a tiny block goes into each tier, comes back verified, and is deleted."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time

import msgspec

from stemkv import block
from stemkv.identity import GroupSpec, HitPolicy, Identity, Layout, TensorSpec
from stemkv.keys import BlockRef, Chain, Namespace
from stemkv.misses import Cause, Miss
from stemkv.pool import Pool
from stemkv.server.threads import in_thread
from stemkv.tiers.base import Sink, Tier

_DEGRADED = frozenset({Cause.READ_ONLY, Cause.NO_SPACE})
"""Answers are right and blocks are read, but nothing new is kept: worth knowing, no reason to take the server out."""
_FRESH_S = 1.0
"""A result younger than this is given again, so that asking often costs nothing."""


class TierHealth(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tier: ``ok``, ``degraded`` (serves, stores nothing) or ``failed``, and why."""

    name: str
    status: str
    cause: str = ""
    blocks: int = 0
    bytes: int = 0
    max_bytes: int = 0
    seconds: float = 0.0


class Health(msgspec.Struct, frozen=True):
    """The whole: the worst of the tiers, with ``message`` naming it."""

    status: str
    tiers: tuple[TierHealth, ...]
    message: str = ""


class Probe:
    """Checks the tiers of a pool, one check at a time. ``deadline_s`` bounds how long a caller waits."""

    def __init__(self, pool: Pool, *, deadline_s: float = 5.0) -> None:
        self._pool = pool
        self._deadline_s = deadline_s
        self._last: tuple[float, Health] | None = None
        self._running: asyncio.Future[Health] | None = None
        self._now = ""
        """Name of the tier that is being checked."""

    async def check(self) -> Health:
        """The health now. Never raises; a tier that hangs is named after ``deadline_s``."""
        if self._last is not None and time.monotonic() - self._last[0] < _FRESH_S:
            return self._last[1]
        if self._running is None:
            self._running = in_thread(self._check_all, "stemkv-health")
        try:
            health = await asyncio.wait_for(asyncio.shield(self._running), self._deadline_s)
        except asyncio.TimeoutError:
            # The check goes on; until the tier answers, later callers wait for the same one.
            late = TierHealth(self._now, "failed", Cause.DEADLINE.value)
            message = f"Tier '{self._now}' did not answer within {self._deadline_s:g} s."
            return Health("failed", (late,), message)
        self._running = None
        self._last = time.monotonic(), health
        return health

    def _check_all(self) -> Health:
        tiers = []
        for tier in self._pool.tiers:
            self._now = tier.name
            tiers.append(self._check(tier))
        for status in ("failed", "degraded"):
            bad = [t for t in tiers if t.status == status]
            if bad:
                return Health(status, tuple(tiers), f"Tier '{bad[0].name}': {bad[0].cause}.")
        return Health("ok", tuple(tiers))

    def _check(self, tier: Tier) -> TierHealth:
        began = time.perf_counter()
        try:
            stats = tier.stats()
            miss = Miss(Cause.READ_ONLY) if stats.read_only else self._round_trip(tier)
        except Exception as error:  # noqa: BLE001 - a tier must not raise; if one does, that is what health is for
            return TierHealth(tier.name, "failed", f"{type(error).__name__}: {error}"[:200])
        status = "ok" if miss is None else "degraded" if miss.cause in _DEGRADED else "failed"
        seconds = round(time.perf_counter() - began, 6)
        cause = "" if miss is None else str(miss)
        return TierHealth(tier.name, status, cause, stats.blocks, stats.bytes, stats.max_bytes, seconds)

    def _round_trip(self, tier: Tier) -> Miss | None:
        """Put, get, compare, delete; the first thing that went wrong."""
        ref, content = _fresh_block()
        data, payload = block.begin(ref)
        payload[:] = content
        try:
            miss = tier.put([block.finish(ref, data, 0.0, self._pool.sealer)])[0]
            if miss is not None:
                return miss
            back = _Back()
            miss = tier.get([ref], back, sealer=self._pool.sealer)[0]
            if miss is None and back.content != content:
                return Miss(Cause.BAD_TAG, "the probe came back changed")
            return miss
        finally:
            tier.delete([ref.key])


class _Back(Sink):
    content = b""

    def accept(self, index: int, payload: memoryview) -> None:
        self.content = bytes(payload)


_SIZE = 64
_IDENTITY = Identity(
    weights_digest=hashlib.sha256(b"stemkv health probe").digest(),
    weights_source="health",
    config_digest=bytes(32),
    kv_dtype="U8",
    layout=Layout("health", "probe", 1),
    groups=(GroupSpec(HitPolicy.PREFIX, (0,), (TensorSpec("probe", "U8", (1, _SIZE)),)),),
    block_tokens=8,
)


def _fresh_block() -> tuple[BlockRef, bytes]:
    """A block that nobody else has: its tokens are random, in a namespace of their own."""
    tokens = list(os.urandom(_IDENTITY.block_tokens))
    return Chain(Namespace(_IDENTITY, tenant="stemkv-health"), tokens).ref(0, 0), os.urandom(_SIZE)
