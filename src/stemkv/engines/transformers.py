"""The Hugging Face Transformers engine: ``PrefixCache(model, pool).generate(...)`` in place of ``model.generate``."""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor
from transformers import StoppingCriteriaList

from stemkv.engines._arena import Arena
from stemkv.engines._blocks import LoadInto
from stemkv.engines._call import Call, Watch
from stemkv.engines._groups import survey
from stemkv.engines._identity import base_model, change_marker, identify
from stemkv.engines._request import Request, context_length, read_request, setting
from stemkv.engines.prompt_progress import Progress, PromptProgress
from stemkv.identity import HitPolicy, Identity
from stemkv.keys import PUBLIC_ROOT, Chain, Namespace
from stemkv.match import Match
from stemkv.misses import Cause, Miss
from stemkv.pool import Pool

log = logging.getLogger("stemkv")

_ATTEMPTS = 3
"""How often a load whose blocks turn out bad is tried with a shorter run."""
_NAMESPACES = 64
_REMEMBERED_KEYS = 65536


class RowReport(msgspec.Struct, frozen=True):
    """What the cache did for one prompt of a call."""

    prompt_tokens: int
    cached_tokens: int
    miss: Miss | None
    """Why not more was cached; None if every block that could be used was."""
    tiers: tuple[str, ...] = ()
    """Names of the tiers that the blocks came from, nearest first."""


class Report(msgspec.Struct, frozen=True):
    """What the cache did for one call, one row for each prompt."""

    rows: tuple[RowReport, ...]
    load_s: float
    """Seconds spent on looking up and loading."""

    @property
    def prompt_tokens(self) -> int:
        return sum(row.prompt_tokens for row in self.rows)

    @property
    def cached_tokens(self) -> int:
        return sum(row.cached_tokens for row in self.rows)

    @property
    def miss(self) -> Miss | None:
        """The first row's cause that is not None."""
        return next((row.miss for row in self.rows if row.miss is not None), None)


class PrefixCache:
    """``model.generate`` that starts from stored blocks. One call at a time; other threads wait.

    ``weight_files`` are the files the model was loaded from; left out, they are found by the model's own record
    of its origin, else the weights in memory are hashed. Prompts are computed in pieces of ``prefill_chunk``
    tokens, so that memory stays bounded; up to that length they are computed in one go, which is fastest.
    ``progress(done, total)`` is called as the model works through a prompt and may raise to give it up. Loading takes
    at most ``load_timeout_s``; what is not there by then is computed.

    ``repeatable`` computes a new prompt's full blocks and its tail in two steps, as a later hit on all of them will:
    the same prompt then gives the same bits with and without that hit. It costs one small forward pass on a miss.

    Raises UnsupportedModelError for a model with a layer that cannot be cached.
    """

    def __init__(
        self,
        model: Any,
        pool: Pool,
        *,
        tenant: str = "",
        generation: int = 0,
        weight_files: Iterable[str | Path] | None = None,
        block_tokens: int = 64,
        prefill_chunk: int = 8192,
        progress: Progress | None = None,
        repeatable: bool = False,
        root: bytes = PUBLIC_ROOT,
        load_timeout_s: float = 10.0,
    ) -> None:
        self.model = model
        self.pool = pool
        self.tenant, self.generation = tenant, generation
        self.progress = progress
        self._repeatable = repeatable
        self.last_report = Report((), 0.0)
        self.faults = 0
        """Faults of the cache that were turned into uncached computing."""
        self._inner = base_model(model)
        self._plan = survey(self._inner, block_tokens)
        self._prompt = PromptProgress(self._inner, self._tell) if progress is not None else None
        # Padding runs through recurrent states, and shifts positions unless the model takes them from outside.
        positions = "position_ids" in inspect.signature(self._inner.forward).parameters
        self._padding_shapes_kv = self._plan.has(HitPolicy.EXACT) or not positions
        self._weight_files = None if weight_files is None else list(weight_files)
        self._block_tokens = block_tokens
        self._chunk = max(1, prefill_chunk // block_tokens) * block_tokens
        self._root = root
        self._load_timeout_s = load_timeout_s
        self._context, self._stable_context = context_length(self._inner.config)
        self._identities: OrderedDict[Any, Identity] = OrderedDict()
        self._recent: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()
        self._arena = Arena()
        self.identity  # noqa: B018  computed now, so that a model that cannot be identified fails here

    @property
    def identity(self) -> Identity:
        """What must be equal for another process to share blocks with this model as it is now."""
        marker = change_marker(self._inner)
        if marker not in self._identities:
            self._identities[marker] = identify(self._inner, self._plan, self._block_tokens, self._weight_files)
            while len(self._identities) > _NAMESPACES:
                self._identities.popitem(last=False)
        return self._identities[marker]

    def namespace(self, tenant: str | None = None) -> Namespace:
        """The namespace of ``tenant`` (this cache's own if None) for the model as it is now."""
        tenant = self.tenant if tenant is None else tenant
        return Namespace(self.identity, tenant=tenant, generation=self.generation, root=self._root)

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: Any = None,
        *,
        tenant: str | None = None,
        on_report: Callable[[Report], None] | None = None,
        **arguments: Any,
    ) -> Any:
        """``model.generate`` with the same arguments and the same result.

        ``tenant`` overrides the cache's own. ``on_report`` is called with the report before anything is computed;
        afterwards it is in :attr:`last_report`. Raises RequestError for what cannot be combined with a prefix
        cache, and whatever ``model.generate`` raises; a fault of the cache only means that the call is computed.
        """
        given = {"inputs": inputs, "generation_config": generation_config, **arguments}
        given = {name: value for name, value in given.items() if value is not None}
        request = read_request(self._inner, given, self._context)
        with self._lock:
            call = self._begin(request, tenant)
            if on_report is not None:
                on_report(self.last_report)
            if call is None:
                return self.model.generate(**given)
            return self._finish(call, given)

    # -- the cache's side; nothing in here reaches the caller ----------------------------------------------

    def _begin(self, request: Request, tenant: str | None) -> Call | None:
        """Look up, load and compute ahead; None if generate is to run on its own."""
        started = time.perf_counter()
        miss = request.miss or self._unstable(request)
        call, rows = None, self._unserved(request, miss)
        if miss is None:
            try:
                namespace = self.namespace(tenant)
                chains = [Chain(namespace, row.tokens) for row in request.rows]
                call = Call(self._inner, self._plan, self.pool, namespace, request, chains, self._arena, self._fault,
                            self._stable_context)  # fmt: skip
                rows = self._load(call, started + self._load_timeout_s)
            except Exception as error:  # noqa: BLE001  the boundary at which faults of the cache end
                call, rows = None, self._unserved(request, Miss(Cause.IO_ERROR, type(error).__name__))
                self._fault("looking up a prompt")
        self.last_report = Report(rows, time.perf_counter() - started)
        self._count(rows)
        return call

    def _finish(self, call: Call, given: dict[str, Any]) -> Any:
        split = call.last_full_column() if self._repeatable else None
        criteria = [Watch(call, self._computed), *given.pop("stopping_criteria", ())]
        argument = {self._plan.argument: call.cache}
        with self._telling(call):
            call.compute_ahead(self._chunk, self._boundaries(call), split, self._tell)
            with call.slicing():
                result = self.model.generate(**given, **argument, stopping_criteria=StoppingCriteriaList(criteria))
        if call.request.follows_text:
            with call.safely("storing generated text"):
                sequences = result if isinstance(result, Tensor) else result.sequences
                call.store_text(sequences, _ends(sequences, call.prompt_columns, self._end_tokens(given)))
        return result

    @contextmanager
    def _telling(self, call: Call) -> Iterator[None]:
        """Report progress until the prompt is computed or given up."""
        if self._prompt is not None:
            self._prompt.begin(call.loaded, call.prompt_columns)
        try:
            yield
        finally:
            if self._prompt is not None:
                self._prompt.end()

    def _computed(self, columns: int) -> None:
        if self._prompt is not None:
            self._prompt.end()
        self._tell(columns, columns)

    def _tell(self, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(done, total)

    def _load(self, call: Call, deadline: float) -> tuple[RowReport, ...]:
        without: set[bytes] = set()
        reasons: dict[int, Miss] = {}
        for _ in range(_ATTEMPTS):
            matches = [self.pool.match(chain, without=without) for chain in call.chains]
            try:
                blocks = self._together(call.request, matches)
                columns = call.prepare(blocks)
                failed = self._load_matches(call, matches, columns, deadline)
            finally:
                for match in matches:
                    self.pool.release(match)
            for number, match in enumerate(matches):
                bad = [failed[ref.key] for ref in match.refs if ref.key in failed]
                if bad:
                    reasons.setdefault(number, bad[0])
            if not failed:
                return self._rows(call, matches, reasons)
            if not (self._plan.has(HitPolicy.TRAILING) or self._plan.has(HitPolicy.EXACT)):
                call.shorten(_before_failures(call, matches, failed))
                return self._rows(call, matches, reasons)
            without |= set(failed)
        call.prepare([0] * len(call.chains))
        return self._rows(call, matches, reasons)

    def _load_matches(self, call: Call, matches: Sequence[Match], columns: int, deadline: float) -> dict[bytes, Miss]:
        failed: dict[bytes, Miss] = {}
        for number, (match, row) in enumerate(zip(matches, call.request.rows, strict=True)):
            wanted = [i for i, ref in enumerate(match.refs) if row.pad + ref.first_token < columns]
            if wanted:
                part = msgspec.structs.replace(
                    match, refs=tuple(match.refs[i] for i in wanted), where=tuple(match.where[i] for i in wanted)
                )
                sink = LoadInto(call.buffers, part, row, call.rows_of(number), columns)
                left = deadline - time.perf_counter()
                failed |= self.pool.load(part, sink, deadline=time.monotonic() + left)
        return failed

    def _together(self, request: Request, matches: Sequence[Match]) -> list[int]:
        """Blocks to load for each row. Windows and states fit one column only, so there all rows must agree."""
        blocks = [match.blocks for match in matches]
        if self._plan.has(HitPolicy.TRAILING) or self._plan.has(HitPolicy.EXACT):
            ends = {(row.pad, n) for row, n in zip(request.rows, blocks, strict=True)}
            if len(ends) > 1:
                return [0] * len(blocks)
        return blocks

    def _rows(self, call: Call, matches: Sequence[Match], reasons: dict[int, Miss]) -> tuple[RowReport, ...]:
        rows = []
        for number, (row, match) in enumerate(zip(call.request.rows, matches, strict=True)):
            cached = max(0, call.loaded - row.pad)
            miss = reasons.get(number, match.miss)
            if cached < match.tokens and miss is None:
                miss = Miss(Cause.NO_STATE, "batch")
            used = {w for ref, w in zip(match.refs, match.where, strict=True) if ref.first_token < cached}
            tiers = tuple(self.pool.tiers[w].name for w in sorted(used))
            rows.append(RowReport(len(row.tokens), cached, miss, tiers))
        return tuple(rows)

    def _unstable(self, request: Request) -> Miss | None:
        """What this model makes not cacheable: KV that depends on padding or on the text's length, for example."""
        if self._padding_shapes_kv and any(row.pad for row in request.rows):
            return Miss(Cause.NOT_CACHEABLE, "padding")
        longest = max((len(row.tokens) for row in request.rows), default=0)
        if self._stable_context is not None and longest > self._stable_context:
            return Miss(Cause.NOT_CACHEABLE, "rope")
        return None

    @staticmethod
    def _unserved(request: Request, miss: Miss | None) -> tuple[RowReport, ...]:
        if request.rows:
            return tuple(RowReport(len(row.tokens), 0, miss) for row in request.rows)
        return (RowReport(request.columns, 0, miss),) * request.batch

    def _boundaries(self, call: Call) -> list[int]:
        """Where (in blocks) to keep recurrent states: the last usable boundary, and where texts were seen to part."""
        if not self._plan.has(HitPolicy.EXACT):
            return []
        found = []
        for chain in call.chains:
            found.append((chain.token_count - 1) // self._block_tokens)
            shared = next((i for i, key in enumerate(chain.keys) if key not in self._recent), len(chain))
            found.append(min(shared, found[-1]))
            self._recent.update(dict.fromkeys(chain.keys))
            while len(self._recent) > _REMEMBERED_KEYS:
                self._recent.popitem(last=False)
        return sorted({b for b in found if b > 0})

    def _end_tokens(self, given: dict[str, Any]) -> set[int]:
        end = setting(self._inner, given, "eos_token_id")
        if end is None:
            return set()
        return set(end.flatten().tolist() if isinstance(end, Tensor) else end if isinstance(end, list) else [end])

    def _count(self, rows: Sequence[RowReport]) -> None:
        metrics = self.pool.metrics
        for row in rows:
            complete = row.miss is None
            outcome = "hit" if complete and row.cached_tokens else "partial" if row.cached_tokens else "miss"
            metrics.add("lookups", outcome=outcome)
            metrics.add("prompt_tokens", row.prompt_tokens)
            metrics.add("hit_tokens", row.cached_tokens)
            cause = "new" if row.miss is None else row.miss.cause.value
            metrics.add("miss_tokens", row.prompt_tokens - row.cached_tokens, cause=cause)

    def _fault(self, doing: str) -> None:
        """Count a fault that is being handled; log the first with its traceback, later ones only at debug level."""
        self.faults += 1
        level = logging.ERROR if self.faults == 1 else logging.DEBUG
        log.log(level, "%s failed; computing without the cache", doing, exc_info=True)


def _before_failures(call: Call, matches: Sequence[Match], failed: dict[bytes, Miss]) -> int:
    """The columns in front of every block that failed to load."""
    starts = [
        row.pad + ref.first_token
        for row, match in zip(call.request.rows, matches, strict=True)
        for ref in match.refs
        if ref.key in failed
    ]
    columns = min(starts, default=call.loaded)
    return columns if any(columns > row.pad for row in call.request.rows) else 0


def _ends(sequences: Tensor, prompt: int, end_tokens: set[int]) -> list[int]:
    """For each row the column after its last real token: after the first end token, or the end."""
    ends = []
    for row in sequences.tolist():
        stop = next((i + 1 for i in range(prompt, len(row)) if row[i] in end_tokens), len(row))
        ends.append(stop)
    return ends
