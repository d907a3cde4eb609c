"""The vLLM KV connector: prompts computed once are loaded by any later request, replica, or restart.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "StemKVConnector",
        "kv_connector_module_path": "stemkv.engines.vllm_connector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"stemkv": {"store": "/var/cache/kv"}}}'

``stemkv vllm-args`` prints the flag. vLLM makes one object in the scheduler and one in each worker; this class is the
boundary between vLLM and both halves (``_vllm_scheduler.py``, ``_vllm_worker.py``): nothing that goes wrong with the
cache gets past it once the engine runs. It is counted, logged once, and the prompt is computed.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

try:
    import vllm
except ModuleNotFoundError as missing:
    if missing.name != "vllm":
        raise
    raise ImportError(
        "stemkv.engines.vllm_connector needs vLLM: it is loaded by 'vllm serve', see docs/vllm.md", name="vllm"
    ) from None

from stemkv.engines._vllm_options import SUPPORTED, Options, check_version, read_options, wants_off
from stemkv.errors import ConfigError, StemKVError

check_version(vllm.__version__)
try:
    from vllm.distributed.kv_transfer.kv_connector.v1 import base as _base
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
except ImportError as error:
    raise ConfigError(
        f"vLLM {vllm.__version__} has no connector interface that stemkv knows ({error}): it supports {SUPPORTED}"
    ) from None

from stemkv.engines import _vllm_events, _vllm_identity, _vllm_metrics  # noqa: E402  after the checks above
from stemkv.engines._vllm_messages import Handshake, Step  # noqa: E402
from stemkv.engines._vllm_scheduler import SchedulerSide  # noqa: E402
from stemkv.engines._vllm_worker import Ended, WorkerSide  # noqa: E402

log = logging.getLogger("stemkv")
_TransferResults: Any = getattr(_base, "KVConnectorTransferResults", None)
_Method = TypeVar("_Method", bound=Callable[..., Any])


def _boundary(default: Callable[[], Any]) -> Callable[[_Method], _Method]:
    """A method that vLLM calls: where there is no cache, or it fails, it returns ``default()``."""

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def call(self: StemKVConnector, *args: Any, **kwargs: Any) -> Any:
            if self.off:
                return default()
            try:
                return method(self, *args, **kwargs)
            except Exception:  # noqa: BLE001  the one boundary between the cache and the engine
                self.fault(method.__name__)
                return default()

        return call  # type: ignore[return-value]

    return decorate


def _none() -> None:
    return None


class StemKVConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module. ``off`` says why there is no cache; empty while there is one."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.off = ""
        self.faults: Counter[str] = Counter()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._options: Options | None = None
        self._config, self._kv_cache = vllm_config, kv_cache_config
        self._counted = _vllm_metrics.Since()
        self._invalid_pages: set[int] = set()
        self._waiting: set[str] = set()
        with _Start(self):
            self._options = read_options(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
            _vllm_identity.check_supported(vllm_config)
            ids = _vllm_identity.engine_groups(kv_cache_config)
            if _TransferResults is None and len(ids) > 1:
                raise ConfigError(f"vLLM {vllm.__version__} cannot recompute failed loads of models with windows")
            tokens = tuple(kv_cache_config.kv_cache_groups[i].kv_cache_spec.block_size for i in ids)
            if role == KVConnectorRole.SCHEDULER:
                self._scheduler = SchedulerSide(self._options, vllm_config, ids, tokens)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: what is not stored is computed again."""
        return False

    def fault(self, where: str) -> None:
        """Count a fault that is being handled; log the first of each kind with its traceback."""
        self.faults[where] += 1
        level = logging.ERROR if self.faults[where] == 1 else logging.DEBUG
        log.log(level, "%s failed; vLLM goes on without the cache", where, exc_info=True)

    def switch_off(self, why: str) -> None:
        """Go on without a cache."""
        log.error("the cache is off: %s", why)
        self.off = why

    # -- worker --------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Work out what this worker's KV is, and open the pool."""
        if self.off or self._options is None:
            return
        with _Start(self):
            plan = _vllm_identity.plan(self._config, self._kv_cache, kv_caches, self._options)
            first = plan.identity.shard.tp_rank == 0 and plan.identity.shard.pp_rank == 0
            self._worker = WorkerSide(self._options, plan, events=first and _vllm_events.wanted(self._config))
            log.info("KV of %s: identity %s", self._config.model_config.model, plan.identity.digest.hex()[:16])

    def get_handshake_metadata(self) -> Handshake:
        """This worker's identity, or why it does not cache."""
        if self.off or self._worker is None:
            return Handshake(why_off=self.off or "the worker has no KV memory")
        return self._worker.handshake()

    @_boundary(_none)
    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None and isinstance(connector_metadata, Step):
            self._worker.begin(connector_metadata)

    @_boundary(_none)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin this step's loads."""
        step = self._connector_metadata
        if self._worker is not None and isinstance(step, Step):
            self._waiting.update(load.request for load in step.loads)
            self._worker.start_loads(step.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request does not run before all its layers are loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: layers are copied together after the step."""

    @_boundary(_none)
    def wait_for_save(self) -> None:
        """Copy out what the step completed."""
        step = self._connector_metadata
        if self._worker is not None and isinstance(step, Step):
            self._worker.save(step)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose load has ended, for a vLLM without :meth:`get_transfer_results`."""
        ended = self._ended_loads()
        self._invalid_pages |= ended.pages
        return None, ended.all or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Requests whose load has ended, and those whose load failed."""
        ended = self._ended_loads()
        return _TransferResults(finished_recving=ended.all, failed_recving=ended.failed)

    def _ended_loads(self) -> Ended:
        """What the worker says; a request whose load it knows nothing of has failed: nobody may wait for ever."""
        if not self._waiting or self._worker is None:
            return Ended(set(), set(), set())
        try:
            ended = self._worker.poll()
            lost = self._waiting - ended.all - self._worker.in_flight()
        except Exception:  # noqa: BLE001  the same boundary
            self.fault("get_transfer_results")
            ended, lost = Ended(set(), set(), set()), set(self._waiting)
        self._waiting -= ended.all | lost
        return Ended(ended.all | lost, ended.failed | lost, ended.pages)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Engine blocks that failed to load, where :meth:`get_finished` was asked."""
        pages, self._invalid_pages = self._invalid_pages, set()
        return pages

    @_boundary(_none)
    def build_connector_worker_meta(self) -> Any:
        """Which loads failed where, and what is stored now."""
        return None if self._worker is None else self._worker.report()

    # -- scheduler -----------------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, Any]) -> None:
        """Learn the workers' identities."""
        if self.off or self._scheduler is None:
            return
        with _Start(self):
            why = self._scheduler.meet(m for _, m in sorted(metadata.items()) if isinstance(m, Handshake))
            if why:
                self.switch_off(why)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """The same, from a vLLM whose workers are numbered by one rank."""
        self.set_xfer_handshake_metadata_pp_aware(metadata)

    @_boundary(_none)
    def on_new_request(self, request: Any) -> None:
        """Start the lookup."""
        if self._scheduler is not None:
            self._scheduler.new_request(request)

    @_boundary(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """What is stored beyond ``num_computed_tokens``; None while that is being looked up."""
        return (0, False) if self._scheduler is None else self._scheduler.matched(request, num_computed_tokens)

    @_boundary(_none)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note where to load what was offered."""
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks, num_external_tokens)

    @_boundary(Step)
    def build_connector_meta(self, scheduler_output: Any) -> Step:
        """What the workers are to load and store in this step."""
        return Step() if self._scheduler is None else self._scheduler.step(scheduler_output)

    @_boundary(_none)
    def update_connector_output(self, connector_output: Any) -> None:
        """Hear of loads that failed and of blocks that are stored."""
        if self._scheduler is not None:
            self._scheduler.transferred(connector_output)

    @_boundary(lambda: (False, None))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request; its blocks are free, since what is stored was copied."""
        if self._scheduler is not None:
            self._scheduler.finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same for models with several KV groups."""
        return self.request_finished(request, [])

    @_boundary(tuple)
    def take_events(self) -> Iterable[Any]:
        """``BlockStored`` and ``BlockRemoved`` since the last call."""
        return () if self._scheduler is None else self._scheduler.announced.take()

    @_boundary(_none)
    def reset_cache(self) -> bool | None:
        """Use nothing that was stored so far: vLLM asks for it when weights change in memory."""
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    # -- both ----------------------------------------------------------------------------------------------------

    @_boundary(_none)
    def get_kv_connector_stats(self) -> Any:
        """Counters since the last call."""
        side = self._scheduler or self._worker
        return None if side is None else self._counted.stats(side.pool.metrics, self.faults)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """Counters as they arrive in the process that logs."""
        return _vllm_metrics.StemKVStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine: Any) -> Any:
        """Prometheus counters ``vllm:stemkv_*``."""
        return _vllm_metrics.StemKVProm(vllm_config, metric_types, labelnames, per_engine)

    @_boundary(_none)
    def shutdown(self) -> None:
        """Finish what waits to be stored, for a moment."""
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()


class _Start:
    """Something that must work at start-up: else refuse with one sentence, or switch off if so configured."""

    def __init__(self, connector: StemKVConnector) -> None:
        self._connector = connector

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> bool:
        if not isinstance(error, Exception):
            return False
        if isinstance(error, StemKVError):
            sentence = str(error)
        else:
            sentence = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            log.error("stemkv cannot work with this vLLM", exc_info=error)
        options = self._connector._options  # noqa: SLF001
        extra = self._connector._config.kv_transfer_config.kv_connector_extra_config or {}  # noqa: SLF001
        if options.on_error == "off" if options else wants_off(extra.get("stemkv")):
            self._connector.switch_off(sentence)
            return True
        if isinstance(error, StemKVError):
            return False
        raise ConfigError(f'stemkv: {sentence}; "on_error": "off" starts vLLM without the cache') from error
