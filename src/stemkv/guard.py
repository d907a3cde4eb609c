"""A tier as the pool uses it: whatever the tier does, the pool sees results, never an exception.

The contract of a tier (``tiers/base.py``) already says that it does not raise. Tiers come from third parties too, and
a fault in the cache must never reach the request that only wanted to be faster; so a broken contract (an exception,
results that do not line up, a hit that was never handed over) is a miss here, logged and counted in ``tier_faults``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TypeVar

from stemkv.block import Record
from stemkv.keys import BlockRef
from stemkv.metrics import Metrics
from stemkv.misses import Cause, Miss
from stemkv.sealing import Sealer
from stemkv.tiers.base import Sink, Tier

log = logging.getLogger("stemkv")
_T = TypeVar("_T")


class Guard:
    """The methods of one tier that the pool uses. Thread-safe as far as the tier is; none raises.

    ``name`` is the tier's in counters and causes.
    """

    def __init__(self, tier: Tier, name: str, metrics: Metrics) -> None:
        self.tier, self.name = tier, name
        self._metrics = metrics

    def _calling(self, name: str) -> _Call:
        return _Call(self.name, name, self._metrics)

    def contains(self, keys: Sequence[bytes]) -> list[bool] | Miss:
        """Whether each key is here, or the fault that kept the tier from saying so."""
        with self._calling("contains") as call:
            return _lined_up(self.tier.contains(keys), len(keys))
        return call.fault

    def here(self, keys: Sequence[bytes]) -> list[bool]:
        """Like :meth:`contains`; nothing is here after a fault."""
        found = self.contains(keys)
        return [False] * len(keys) if isinstance(found, Miss) else found

    def get(
        self, refs: Sequence[BlockRef], sink: Sink, indexes: Sequence[int], *, sealer: Sealer, deadline: float | None
    ) -> list[Miss | None]:
        """Load ``refs``, which have ``indexes`` in ``sink``; a hit only where the sink has accepted the block."""
        share = _Share(sink, indexes)
        results: list[Miss | None] = [None] * len(refs)
        with self._calling("get") as call:
            results = _misses(self.tier.get(refs, share, sealer=sealer, deadline=deadline), len(refs))
            if any(miss is None and i not in share.outcome for i, miss in enumerate(results)):
                raise ValueError("a hit was not handed over")
        return [miss or share.outcome.get(i, call.fault) for i, miss in enumerate(results)]

    def record(self, ref: BlockRef, *, sealer: Sealer) -> Record | Miss:
        """A verified copy of a whole record."""
        with self._calling("record") as call:
            return self.tier.record(ref, sealer=sealer)
        return call.fault

    def put(self, records: Sequence[Record]) -> list[Miss | None]:
        """Store records; None where the block is now here."""
        with self._calling("put") as call:
            return _misses(self.tier.put(records), len(records))
        return [call.fault] * len(records)

    def explain(self, ref: BlockRef) -> Miss | None:
        """Why ``ref`` is not here, if the tier knows."""
        with self._calling("explain") as call:
            return _misses([self.tier.explain(ref)], 1)[0]
        return call.fault

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note a use."""
        with self._calling("touch"):
            self.tier.touch(keys)

    def lease(self, keys: Sequence[bytes]) -> None:
        """Keep from being evicted."""
        with self._calling("lease"):
            self.tier.lease(keys)

    def release(self, keys: Sequence[bytes]) -> None:
        """Undo one lease."""
        with self._calling("release"):
            self.tier.release(keys)

    def close(self) -> None:
        """Close the tier."""
        with self._calling("close"):
            self.tier.close()


def guarded(tiers: Sequence[Tier], metrics: Metrics) -> tuple[Guard, ...]:
    """Guards of ``tiers``, with the tiers' names, and a number where a nearer one has the same name."""
    own = [tier.name for tier in tiers]
    names = [f"{name}-{before + 1}" if (before := own[:i].count(name)) else name for i, name in enumerate(own)]
    return tuple(Guard(tier, name, metrics) for tier, name in zip(tiers, names, strict=True))


class _Call:
    """One call of a tier; swallows and notes what it raises."""

    def __init__(self, tier: str, name: str, metrics: Metrics) -> None:
        self._tier, self._name, self._metrics = tier, name, metrics
        self.fault = Miss(Cause.IO_ERROR, f"{tier} {name}")
        """The miss for whatever the call was to give."""

    def __enter__(self) -> _Call:  # noqa: PYI034 - typing.Self is not in 3.10
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        if kind is None or not issubclass(kind, Exception):
            return False
        log.error("tier %s failed in %s, which its contract forbids", self._tier, self._name, exc_info=error)
        self._metrics.add("tier_faults", tier=self._tier, call=self._name)
        self.fault = Miss(Cause.IO_ERROR, f"{self._tier} {self._name} {kind.__name__}")
        return True


class _Share(Sink):
    """Some indexes of another sink; keeps what became of each block that was handed over."""

    def __init__(self, sink: Sink, indexes: Sequence[int]) -> None:
        self._sink, self._indexes = sink, indexes
        self.outcome: dict[int, Miss | None] = {}

    def buffer(self, index: int, nbytes: int) -> memoryview | None:
        return self._sink.buffer(self._indexes[index], nbytes)

    def accept(self, index: int, payload: memoryview) -> None:
        try:
            self._sink.accept(self._indexes[index], payload)
            self.outcome[index] = None
        except Exception as error:  # not the tier's fault, and not the request's: this block is computed instead
            log.exception("a loaded block could not be taken over")
            self.outcome[index] = Miss(Cause.IO_ERROR, f"sink {type(error).__name__}")


def _lined_up(results: list[_T], count: int) -> list[_T]:
    if len(results) != count:
        raise ValueError(f"{len(results)} results for {count} blocks")
    return results


def _misses(results: list[Miss | None], count: int) -> list[Miss | None]:
    if not all(miss is None or isinstance(miss, Miss) for miss in _lined_up(results, count)):
        raise TypeError("a result is neither None nor a Miss")
    return results
