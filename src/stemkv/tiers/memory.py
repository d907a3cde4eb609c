"""The memory tier: records in this process, bounded in bytes."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from stemkv import policy
from stemkv.block import BlockError, Record
from stemkv.keys import BlockRef, Namespace
from stemkv.misses import Cause, Miss
from stemkv.tiers.base import Tier, TierStats
from stemkv.tiers.explain import Ghosts, KnownNamespace, explain_absence


@dataclass(slots=True)
class _Entry:
    record: Record
    hits: int
    priority: float
    children: int
    """Entries here that need this one."""


@dataclass(slots=True)
class _Known:
    namespace: Namespace
    blocks: int = 0


class MemoryTier(Tier):
    """Holds records as they are, sealed if they came sealed. ``max_bytes`` bounds their total size."""

    name = "memory"

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: dict[bytes, _Entry] = {}
        self._children: dict[bytes, set[bytes]] = {}
        self._leaves: list[tuple[float, int, bytes]] = []
        self._order = itertools.count()
        self._known: dict[bytes, dict[bytes, _Known]] = {}
        """By tenant id, then by namespace id: the namespaces that have blocks here."""
        self._first: dict[bytes, Counter[bytes]] = {}
        """By tokens digest: the ids of the namespaces that hold a first block with these tokens."""
        self._ghosts = Ghosts()
        self._bytes = 0
        self._clock = 0.0
        self._evicted = 0
        self._quarantined = 0
        self._closed = False

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        entries = self._entries
        return [key in entries for key in keys]

    def fetch(self, ref: BlockRef, buffer: memoryview | None) -> tuple[memoryview, bytes]:
        entry = self._entries.get(ref.key)
        if entry is None:
            raise BlockError(Cause.CLOSED if self._closed else Cause.EVICTED)
        return entry.record.data, entry.record.tag

    def quarantine(self, ref: BlockRef, miss: Miss) -> None:
        """Drop the entry: memory that changed under us is not worth keeping."""
        with self._lock:
            if ref.key in self._entries:
                self._remove(ref.key)
                self._quarantined += 1

    def put(self, records: Sequence[Record]) -> list[Miss | None]:
        with self.holding(records), self._lock:
            return [self._put_one(record) for record in records]

    def delete(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            here = [key for key in dict.fromkeys(keys) if key in self._entries]
            for key in here:
                self._remove(key)
            return len(here)

    def touch(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                entry = self._entries.get(key)
                if entry is not None:
                    entry.hits += 1
                    self._rank(entry)

    def explain(self, ref: BlockRef) -> Miss | None:
        with self._lock:
            known = [
                KnownNamespace(
                    k.namespace.id, k.namespace.tenant_id, k.namespace.identity, k.namespace.generation, k.blocks
                )
                for k in self._known.get(ref.namespace.tenant_id, {}).values()
            ]
            same_text = set(self._first.get(ref.tokens_digest, ())) if ref.index == 0 else set()
            siblings = self._children.get(ref.needs, set()) - {ref.key}
            diverged = any(self._entries[k].record.ref.group == ref.group for k in siblings)
            return explain_absence(
                ref, known=known, same_text=same_text, diverged=diverged, evicted=ref.key in self._ghosts
            )

    def stats(self) -> TierStats:
        with self._lock:
            return TierStats(len(self._entries), self._bytes, self._max_bytes, self._evicted, self._quarantined)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._entries.clear()
            self._children.clear()
            self._leaves.clear()
            self._known.clear()
            self._first.clear()
            self._ghosts = Ghosts()
            self._bytes = 0

    # Everything below is called with the lock held.

    def _put_one(self, record: Record) -> Miss | None:
        key, size = record.ref.key, len(record.data)
        if self._closed:
            return Miss(Cause.CLOSED)
        if key in self._entries:
            return None
        if not self._make_room(size, record.ref):
            return Miss(Cause.NO_SPACE)
        entry = _Entry(record, 1, 0.0, len(self._children.get(key, ())))
        self._entries[key] = entry
        self._children.setdefault(record.ref.needs, set()).add(key)
        parent = self._entries.get(record.ref.needs)
        if parent is not None:
            parent.children += 1
        self._count(record.ref, 1)
        self._bytes += size
        self._ghosts.discard(key)
        self._rank(entry)
        return None

    def _make_room(self, size: int, ref: BlockRef) -> bool:
        """Evict until ``size`` more bytes fit for ``ref``, never what is leased."""
        if self._bytes + size <= self._max_bytes:
            return True
        if size > self._max_bytes or not policy.may_evict(ref, needed_is_here=ref.needs in self._entries):
            return False
        kept: list[tuple[float, int, bytes]] = []
        while self._bytes + size > self._max_bytes and self._leaves:
            item = heapq.heappop(self._leaves)
            entry = self._entries.get(item[2])
            if entry is None or entry.children or entry.priority != item[0]:
                continue  # outdated: the entry went, grew a suffix or was ranked anew
            if self.leased(item[2]):
                kept.append(item)
                continue
            self._clock = max(self._clock, entry.priority)
            self._remove(item[2])
            self._ghosts.add(item[2])
            self._evicted += 1
        for item in kept:
            heapq.heappush(self._leaves, item)
        return self._bytes + size <= self._max_bytes

    def _remove(self, key: bytes) -> None:
        ref = self._entries[key].record.ref
        self._bytes -= len(self._entries.pop(key).record.data)
        siblings = self._children[ref.needs]
        siblings.discard(key)
        if not siblings:
            del self._children[ref.needs]
        parent = self._entries.get(ref.needs)
        if parent is not None:
            parent.children -= 1
            if not parent.children:
                self._push(parent)
        self._count(ref, -1)

    def _count(self, ref: BlockRef, change: int) -> None:
        """Keep what :meth:`explain` needs, and only for namespaces that have blocks."""
        tenant = self._known.setdefault(ref.namespace.tenant_id, {})
        known = tenant.setdefault(ref.namespace.id, _Known(ref.namespace))
        known.blocks += change
        if not known.blocks:
            del tenant[ref.namespace.id]
            if not tenant:
                del self._known[ref.namespace.tenant_id]
        if ref.index == 0:
            first = self._first.setdefault(ref.tokens_digest, Counter())
            first[ref.namespace.id] += change
            if not first[ref.namespace.id]:
                del first[ref.namespace.id]
            if not first:
                del self._first[ref.tokens_digest]

    def _rank(self, entry: _Entry) -> None:
        entry.priority = policy.priority(self._clock, entry.hits, entry.record.cost_s, len(entry.record.data))
        if not entry.children:
            self._push(entry)

    def _push(self, entry: _Entry) -> None:
        heapq.heappush(self._leaves, (entry.priority, next(self._order), entry.record.ref.key))
        if len(self._leaves) > 64 + 4 * len(self._entries):  # mostly outdated: start anew
            self._leaves = [(e.priority, next(self._order), key) for key, e in self._entries.items() if not e.children]
            heapq.heapify(self._leaves)
