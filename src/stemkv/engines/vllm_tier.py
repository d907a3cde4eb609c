"""A secondary tier for vLLM's own host offload (GPU deployments).

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config":
      {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10737418240, "secondary_tiers":
        [{"type": "StemKVTier", "module_path": "stemkv.engines.vllm_tier", "stemkv": {"store": "/var/cache/stemkv"}}]}}'

vLLM copies KV between device and host memory and asks its tiers by block hash. This one binds each hash to weights,
configuration, layout, tenant and generation (see ``foreign_ref``), keeps rows of host memory as blocks of a pool, and
writes a row only after its block was verified. All methods run on the scheduler's thread: they hand work to threads,
never wait for storage and never raise for a fault of the cache. ``docs/vllm.md`` has settings and sizing.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np

from stemkv.engines._vllm_options import NEWEST_TESTED, wants_off

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.v1.kv_offload.base import (
        Locality,
        LookupResult,
        Medium,
        OffloadingCounterMetadata,
        OffloadingEvent,
        RequestOffloadingContext,
    )
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
except ImportError as error:
    raise ImportError(
        f"StemKVTier needs a vLLM with secondary tiers, August 2026 or later (tested with {NEWEST_TESTED}): with an "
        f"older one use stemkv.engines.vllm_connector ({error})"
    ) from error

from stemkv.config import open_pool, read_secret
from stemkv.engines._vllm_metrics import _LABELS
from stemkv.engines._vllm_tier_identity import check_supported, engine_config, hash_scheme, identities
from stemkv.engines._vllm_tier_jobs import Done, Jobs
from stemkv.engines._vllm_tier_lookups import Lookups
from stemkv.engines._vllm_tier_names import Names
from stemkv.engines._vllm_tier_options import TierOptions, read_tier_options
from stemkv.errors import ConfigError, StemKVError
from stemkv.guard import guarded
from stemkv.metrics import COUNTERS
from stemkv.misses import Cause, Miss
from stemkv.pool import Pool
from stemkv.writer import Job

log = logging.getLogger("stemkv")
_T = TypeVar("_T")

PREFIX = "vllm:stemkv_tier_"
"""Of metrics. vLLM unregisters those with "vllm" in their names before it registers anew."""
_OF_ENGINES = frozenset({"lookups", "prompt_tokens", "hit_tokens", "miss_tokens"})
_OWN_COUNTERS = {
    "asked_keys": ("Keys looked up: hit, miss, late (no answer in time), refused (too many at once).", ("result",)),
    "first_misses": ("Lookups that did not find everything, by the cause of the first miss.", ("cause",)),
    "load_results": ("Blocks of finished loads: loaded, or the cause of the miss.", ("result",)),
    "store_results": ("Blocks of finished stores: stored, or the cause why not.", ("result",)),
    "call_faults": ("Calls that failed inside the tier and were answered as a miss.", ("call",)),
}
_GONE = frozenset({Cause.EVICTED, Cause.UNSEEN, *(cause for cause in Cause if cause.value.startswith("bad-"))})
"""Causes after which a block is no longer stored."""
_MOST_TOUCHED = 65536
_CLOSE_S = 10.0


def _calm(otherwise: Callable[[], Any]) -> Callable[[Callable[..., _T]], Callable[..., _T]]:
    """For what vLLM calls: whatever goes wrong inside is logged, counted and answered with ``otherwise()``."""

    def wrap(method: Callable[..., _T]) -> Callable[..., _T]:
        @functools.wraps(method)
        def call(self: StemKVTier, *args: Any, **kwargs: Any) -> _T:
            try:
                return method(self, *args, **kwargs)
            except Exception:  # the engine's boundary
                log.exception("stemkv's vLLM tier failed in %s", method.__name__)
                self.count("call_faults", method.__name__)
                return otherwise()

        return call

    return wrap


def _unforeseen(error: Exception) -> ConfigError:
    sentence = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return ConfigError(f'stemkv: {sentence}; "on_error": "off" starts vLLM without the cache')


class _Rows:
    """Rows of vLLM's host memory. Holds no export of the view itself, which vLLM releases at its end."""

    def __init__(self, view: memoryview, row_bytes: int) -> None:
        self._flat = np.frombuffer(view.cast("B"), np.uint8).reshape(-1, row_bytes)

    def write(self, row: int, payload: memoryview) -> None:
        """Copy ``payload`` into a row; numpy lets other threads run meanwhile."""
        np.copyto(self._flat[row], np.frombuffer(payload, np.uint8))

    def read(self, row: int, payload: memoryview) -> None:
        """Copy a row into ``payload``."""
        np.copyto(np.frombuffer(payload, np.uint8), self._flat[row])

    def release(self) -> None:
        """Let go of the memory."""
        self._flat = np.empty((0, 0), np.uint8)


class StemKVTier(SecondaryTierManager):
    """Blocks of a stemkv pool behind vLLM's ``TieringOffloadingManager``.

    Raises StemKVError with one sentence at start-up, or starts without a cache if the settings say ``on_error: off``.
    Raises nothing later.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **config: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self._told: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self._touched: dict[bytes, None] = {}
        self._said: set[str] = set()
        self._failed: list[JobResult] = []
        self._events: list[OffloadingEvent] = []
        self._pool: Pool | None = None
        """None while the cache is off: everything is a miss."""
        try:
            self._open(offloading_spec, primary_kv_view, read_tier_options(config))
        except Exception as error:  # noqa: BLE001 - the engine's boundary
            why = error if isinstance(error, StemKVError) else _unforeseen(error)
            if not wants_off(config.get("stemkv")):
                raise why from (None if why is error else error)
            log.error("stemkv's vLLM tier is off: %s", why)  # noqa: TRY400 - the sentence says it all

    def _open(self, spec: Any, view: memoryview, options: TierOptions) -> None:
        self._options = options
        engine = engine_config()
        check_supported(engine)
        self._names = Names(
            identities(engine, spec.config, self.block_size_bytes, options.weights),
            hash_scheme(engine),
            tenant=options.tenant,
            generation=options.settings.generation,
            root=read_secret(options.settings),
        )
        self.locality = Locality(options.locality) if options.locality else None
        self._emits = options.enable_kv_events and spec.kv_events_config.enable_kv_cache_events
        pool = open_pool(options.settings)
        self._guards = guarded(pool.tiers, pool.metrics)
        self._rows = _Rows(view, self.block_size_bytes)
        self._lookups = Lookups(self._present, timeout_s=options.lookup_timeout_s)
        self._jobs = Jobs(pool, self._rows, self._names.ref, self._here, threads=options.load_threads)
        self._pool = pool
        log.info("stemkv's vLLM tier keeps rows of %d bytes in %s", self.block_size_bytes, options.settings.store)

    # -- what is there -------------------------------------------------------------------------------------------------

    @_calm(lambda: LookupResult.MISS)
    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """HIT, MISS, or RETRY for at most ``lookup_timeout_s``."""
        if self._pool is None:
            return LookupResult.MISS
        found = self._lookups.ask(key, req_context.req_id)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    @_calm(RequestOffloadingContext)
    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Nothing to prepare; chunks are stored as they come."""
        return RequestOffloadingContext()

    @_calm(lambda: None)
    def on_request_finished(self, req_context: Any) -> None:
        """Forget what only this request asked for."""
        if self._pool is not None:
            self._lookups.forget(req_context.req_id)

    @_calm(lambda: None)
    def on_schedule_end(self, context: Any) -> None:
        """Send this step's lookups and uses to their threads."""
        if self._pool is None:
            return
        self._lookups.step()
        if self._touched:
            keys, self._touched = list(self._touched), {}
            self._pool.writer.submit(Job(run=lambda: self._touch(keys), nbytes=0, keys=()))

    @_calm(lambda: None)
    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Note a use, for the order in which blocks are given up; applied later."""
        if self._pool is not None and len(self._touched) < _MOST_TOUCHED:
            self._touched.update(dict.fromkeys(keys))

    def _touch(self, keys: Iterable[bytes]) -> None:
        names = [name for name in map(self._name, keys) if name]
        for guard in self._guards:
            guard.touch(names)

    def _name(self, key: bytes) -> bytes:
        """The block's key in the pool; empty if vLLM's key cannot name a block."""
        try:
            return self._names.ref(key).key
        except (ValueError, KeyError):
            return b""

    def _present(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of vLLM's keys the pool has. On the lookup thread."""
        here = self._here([self._name(key) for key in keys])
        if not all(here):
            self._count_why_not(keys[here.index(False)])
        return here

    def _count_why_not(self, key: bytes) -> None:
        try:
            ref = self._names.ref(key)
        except (ValueError, KeyError):
            why = Miss(Cause.NOT_CACHEABLE, "hash")
        else:
            told = (guard.explain(ref) for guard in self._guards)
            why = next((miss for miss in told if miss is not None), Miss(Cause.UNSEEN))
        self.count("first_misses", why.cause.value)
        if why.cause is Cause.IDENTITY and str(why) not in self._said:
            self._said.add(str(why))
            log.warning("KV in the store was computed with another %s: it is not used", why.detail)

    def _here(self, names: Sequence[bytes]) -> list[bool]:
        """Which blocks some tier of the pool has. Blocks."""
        found = [False] * len(names)
        for guard in self._guards:
            found = [a or b for a, b in zip(found, guard.here(names), strict=True)]
        return found

    # -- transfers -----------------------------------------------------------------------------------------------------

    def submit_load(self, job_metadata: Any) -> None:
        """Begin to fill rows with blocks; each is verified first."""
        self._submit(job_metadata, store=False)

    def submit_store(self, job_metadata: Any) -> None:
        """Begin to store rows; dropped, and reported as failed, while too much is waiting."""
        self._submit(job_metadata, store=True)

    def _submit(self, job: Any, *, store: bool) -> None:
        try:
            if self._pool is None:
                self._failed.append(JobResult(job.job_id, success=False))
                return
            keys, rows = list(job.keys), [int(row) for row in job.chunk_ids]
            if store:
                before = self._names.before(keys, job.req_context)
                blocks = functools.partial(self._names.chained, keys, before)
                self._jobs.store(job.job_id, keys, rows, self._options.store_timeout_s, blocks)
            else:
                self._jobs.load(job.job_id, keys, rows, self._options.load_timeout_s)
        except Exception:  # the engine's boundary
            log.exception("stemkv's vLLM tier could not begin a transfer")
            self.count("call_faults", "submit_store" if store else "submit_load")
            self._failed.append(JobResult(job.job_id, success=False))

    @_calm(list)
    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that are over, those that ran out of time among them."""
        results, self._failed = self._failed, []
        for done in self._jobs.finished() if self._pool is not None else ():
            self._note(done)
            arrived = tuple(key for key in done.keys if key not in done.misses)
            results.append(
                JobResult(
                    done.id,
                    success=not done.misses,
                    successful_keys=arrived if done.misses and arrived and not done.store else None,
                    transfer_time=done.seconds,
                    transfer_bytes=len(arrived) * self.block_size_bytes,
                )
            )
        return results

    def _note(self, done: Done) -> None:
        """Let later lookups, counters and events know what a job has shown."""
        kind, good = ("store_results", "stored") if done.store else ("load_results", "loaded")
        here = [key for key in done.keys if key not in done.misses]
        self._lookups.note(here, here=True)
        if not done.store:
            self._lookups.note(done.misses, here=False)
        self.count(kind, good, len(here))
        for miss in done.misses.values():
            self.count(kind, miss.cause.value)
        if self._emits:
            gone = [key for key, miss in done.misses.items() if miss.cause in _GONE]
            for keys, removed in ((here, False), (gone, True)):
                if keys and removed != done.store:
                    self._events.append(OffloadingEvent(keys, self.medium, removed, self.locality))

    @_calm(lambda: None)
    def drain_jobs(self) -> None:
        """Wait until no job touches rows; deadlines see to that. vLLM calls this when it resets its cache."""
        if self._pool is None:
            return
        self._jobs.drain()
        self._lookups.clear()
        if self._options.after_reset == "apart":
            self._names.set_apart(os.urandom(16))
            log.warning("vLLM reset its cache, so its weights may be others now: KV stored so far is no longer used")

    # -- reports -------------------------------------------------------------------------------------------------------

    @_calm(tuple)
    def take_events(self) -> Iterable[OffloadingEvent]:
        """Blocks stored, and blocks found to be gone, since the last call."""
        events, self._events = self._events, []
        return events

    def count(self, name: str, result: str, value: int = 1) -> None:
        """Raise one of the tier's own counters."""
        self._counts[name, (result,)] += value

    @classmethod
    def build_metric_definitions(cls, extra_config: Mapping[str, Any]) -> dict[str, OffloadingCounterMetadata]:  # noqa: ARG003
        """The tier's own counters and those of its pool."""
        pool = {name: (text, _LABELS.get(name, ())) for name, text in COUNTERS.items() if name not in _OF_ENGINES}
        return {PREFIX + name: OffloadingCounterMetadata(*what) for name, what in (pool | _OWN_COUNTERS).items()}

    @_calm(lambda: None)
    def get_stats(self) -> OffloadingConnectorStats | None:
        """What was counted since the last call."""
        now: Counter[tuple[str, tuple[str, ...]]] = Counter(self._counts)
        if self._pool is not None:
            now.update({("asked_keys", (result,)): n for result, n in self._lookups.counts.items()})
            for (name, pairs), value in self._pool.metrics.snapshot().items():
                if name not in _OF_ENGINES:
                    now[name, tuple(dict(pairs).get(label, "") for label in _LABELS.get(name, ()))] += value  # type: ignore[assignment]
        stats = OffloadingConnectorStats()
        for (name, labels), value in now.items():
            grown = value - self._told[name, labels]
            if grown:
                stats.increase_counter(PREFIX + name, grown, labels)
        self._told = now
        return stats

    @_calm(lambda: None)
    def shutdown(self) -> None:
        """Finish what has begun, within some seconds; rows are not touched afterwards."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        self._lookups.close()
        self._jobs.close(_CLOSE_S)
        self._rows.release()
        # On a thread of its own: a hanging tier must not keep the engine from ending.
        closing = threading.Thread(target=pool.close, args=(_CLOSE_S,), name="stemkv-tier-close", daemon=True)
        closing.start()
        closing.join(2 * _CLOSE_S)
