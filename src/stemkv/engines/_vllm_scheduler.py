"""The scheduler's half of the vLLM connector: what is stored, which requests load it, which blocks to store.

Every method is called by the engine's own loop and returns at once.
"""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from stemkv.config import open_pool, read_secret
from stemkv.engines._vllm_blocks import BlockTables
from stemkv.engines._vllm_claims import Claims
from stemkv.engines._vllm_events import Announced
from stemkv.engines._vllm_lookup import Asked, Found, Lookup, Lookups, Scopes, scope_of
from stemkv.engines._vllm_messages import Handshake, Load, PageIds, Report, Save, Step
from stemkv.engines._vllm_options import Options
from stemkv.errors import ModelError
from stemkv.identity import Identity
from stemkv.misses import Cause, Miss

log = logging.getLogger("stemkv")
_STORING_S = 2.0
"""A lookup may miss a block that a worker was told to store so shortly before: it is not asked for again."""
_ASK_AGAIN_S = 0.2
"""How often is looked whether another engine has stored what is waited for."""
_REMEMBERED = 1 << 16
_NOT_KNOWN = frozenset({Cause.DEADLINE, Cause.IO_ERROR, Cause.PENDING, Cause.CLOSED, Cause.NOT_CACHEABLE})
"""Misses that say nothing about whether a block is there."""
_EAGLE_LIKE = ("eagle", "eagle3", "mtp", "deepseek_mtp", "draft_model", "medusa")


class _Request:
    """What is known of a request that has not ended."""

    def __init__(self, request: Any, lookup: Lookup) -> None:
        self.request = request
        self.lookup = lookup
        self.preemptions = 0
        self.failures = 0
        self.start = 0
        """Tokens of the engine's own cache when a hit was last offered."""
        self.loaded = 0
        self.next_save: int | None = None
        self.sent = False
        self.counted = False
        self.arrived = time.monotonic()
        self.claims: set[bytes] = set()


class SchedulerSide:
    """State of the scheduler's half. Inert until the workers have said who they are."""

    def __init__(self, options: Options, config: Any, group_ids: tuple[int, ...], page_tokens: tuple[int, ...]) -> None:
        self._options = options
        self._group_ids, self._page_tokens = group_ids, page_tokens
        self.pool = open_pool(msgspec.structs.replace(options.settings, memory_bytes=0))
        method = getattr(config.speculative_config, "method", None) or ""
        # The draft's KV of a block's last token depends on the token after it, which is no part of a finished prompt.
        self._drop_last = 1 if str(method).startswith(_EAGLE_LIKE) else 0
        self._lookups: Lookups | None = None
        self._requests: dict[str, _Request] = {}
        self._loads: list[Load] = []
        self._ended: list[str] = []
        self._asked: OrderedDict[bytes, float] = OrderedDict()
        self._failed_at: dict[str, int] = {}
        self._tables = BlockTables()
        self._said = False
        self._epoch = b""
        self._size = 0
        self.announced = Announced()

    def meet(self, workers: Iterable[Handshake]) -> str:
        """Learn the workers' identities; returns why there is no cache, or nothing."""
        workers = list(workers)
        why = next((w.why_off for w in workers if w.why_off), "" if workers else "no worker has said what its KV is")
        if why:
            return why
        identities = [msgspec.msgpack.decode(w.identity, type=Identity) for w in workers]
        sizes = {i.block_tokens for i in identities}
        if len(sizes) != 1:
            raise ModelError(f"the workers use blocks of {sorted(sizes)} tokens: give one block_tokens to all")
        self._size = sizes.pop()
        settings = self._options.settings
        scopes = Scopes(identities, generation=settings.generation, root=read_secret(settings))
        claims = Claims(Path(settings.store).expanduser()) if self._options.share_wait_s else None
        self._lookups = Lookups(self.pool, scopes, self._options.lookup_timeout_s, claims)
        return ""

    # -- a request's life ----------------------------------------------------------------------------------------

    def new_request(self, request: Any) -> None:
        """Start looking up ``request``."""
        if self._lookups is not None:
            self._requests[request.request_id] = _Request(request, self._look(request))

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """How many tokens beyond ``computed`` can be loaded; None while that is not known. Changes nothing else."""
        state = self._requests.get(request.request_id)
        if state is None or self._lookups is None:
            return 0, False
        if request.num_preemptions > state.preemptions:  # what it computed before may be stored by now
            state.preemptions = request.num_preemptions
            if not state.failures:
                state.lookup = self._look(request)
        found, late = state.lookup.answer()
        if found is None and not late:
            return None, False
        if found is None:
            self._lookups.found_sick()
            found = state.lookup.found = Found(miss=Miss(Cause.DEADLINE))
        if found.claim:
            state.claims.add(found.claim)
        if found.busy and self._wait_for_other(state):
            return None, False
        state.start = computed
        more = found.tokens - computed
        return (more, True) if more > 0 else (0, False)

    def allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        """``request`` got ``blocks``; with ``tokens`` > 0 they wait to be loaded."""
        state = self._requests.get(request.request_id)
        if tokens <= 0 or state is None:
            return
        state.loaded = tokens
        try:
            pages = self._pages(blocks.get_block_ids())
        except Exception:  # without its pages the worker reports the load as failed, and the prompt is computed
            log.exception("the blocks of a request are not what they should be")
            pages = ()
        self._loads.append(Load(request.request_id, state.start, state.start + tokens, pages))

    def step(self, output: Any) -> Step:
        """What the workers are to do in the step that ``output`` describes."""
        loads, self._loads = self._loads, []
        ended, self._ended = self._ended, []
        step = Step(loads=loads, forget=ended, tokens=output.total_num_scheduled_tokens)
        if self._lookups is not None and self._lookups.claims is not None:
            self._lookups.claims.expire()
        for load in loads:
            self._send_prompt(step, load.request)
        try:
            self._tables.step(output)
            self._plan_saves(step, output)
        except Exception:  # loads must reach the worker: their requests wait for it
            log.log(logging.DEBUG if self._said else logging.ERROR, "nothing is stored of this step", exc_info=True)
            self._said = True
            step.saves.clear()
        return step

    def finished(self, request: Any) -> None:
        """``request`` has ended."""
        state = self._requests.pop(request.request_id, None)
        if state is not None:
            self._ended.append(request.request_id)
            self._failed_at.pop(request.request_id, None)
            self._tables.forget(request.request_id)
            self._give_up_claims(state)

    def transferred(self, output: Any) -> None:
        """What the workers report after a step."""
        report = getattr(output, "kv_connector_worker_meta", None)
        if isinstance(report, Report):
            self.announced.stored(report.stored)
            for name, block in report.failed.items():
                self._failed_at[name] = min(block, self._failed_at.get(name, block))
        # Of several workers each reports in its own time; vLLM names a request when all have.
        ended = getattr(output, "failed_recving", None)
        for name in list(self._failed_at) if ended is None else ended:
            self._load_failed(name, self._failed_at.pop(name, 0))

    def reset(self) -> None:
        """Use nothing that was stored so far: the engine's weights may have changed in memory."""
        self._epoch = os.urandom(32)
        for state in self._requests.values():  # what they have computed so far is of either kind
            state.lookup = Lookup(0.0)
            state.lookup.found = Found(miss=Miss(Cause.NOT_CACHEABLE, "reset"))

    # -- inside --------------------------------------------------------------------------------------------------

    def _look(self, request: Any, limit: int | None = None) -> Lookup:
        why_not = self._not_cacheable(request)
        if why_not is not None or self._lookups is None:
            lookup = Lookup(0.0)
            lookup.found = Found(miss=why_not or Miss(Cause.CLOSED))
            return lookup
        scope = scope_of(request.cache_salt, self._epoch)
        return self._lookups.start(Asked(request.prompt_token_ids, scope, request.lora_request, limit))

    def _wait_for_other(self, state: _Request) -> bool:
        """Whether to wait on for another engine that computes what is missing; asks again now and then."""
        now = time.monotonic()
        if now - state.arrived > self._options.share_wait_s:
            return False
        if now - state.lookup.started > _ASK_AGAIN_S:
            state.lookup = self._look(state.request)
        return True

    def _give_up_claims(self, state: _Request) -> None:
        claims = self._lookups.claims if self._lookups is not None else None
        for key in state.claims:
            if claims is not None:
                claims.done(key)
        state.claims.clear()

    def _not_cacheable(self, request: Any) -> Miss | None:
        """The first thing about ``request`` that keys do not cover."""
        reasons = {
            "embeddings": request.prompt_token_ids is None or request.prompt_embeds is not None,
            # vLLM's identifiers of media may be names that the caller chose.
            "multimodal": bool(getattr(request, "mm_features", None)),
            "streamed": bool(getattr(request, "resumable", False)),
        }
        return next((Miss(Cause.NOT_CACHEABLE, name) for name, applies in reasons.items() if applies), None)

    def _load_failed(self, name: str, block: int) -> None:
        """Look again in front of the block that failed, once; a load that took too long is not repeated."""
        state = self._requests.get(name)
        if state is None or self._lookups is None:
            return
        state.failures += 1
        state.loaded = 0
        keys = state.lookup.found.keys if state.lookup.found else ()
        if 0 <= block < len(keys):
            self.announced.absent(keys[block : block + 1])
            self._asked.pop(keys[block], None)
        if block < 0:
            self._lookups.found_sick()
        if block <= 0 or state.failures > 1:
            old = state.lookup.found or Found()
            cause = Cause.DEADLINE if block < 0 else Cause.IO_ERROR
            state.lookup.found = old._replace(tokens=0, miss=Miss(cause, "load"))
        else:
            state.lookup = self._look(state.request, limit=block)

    def _pages(self, block_ids: Any) -> PageIds:
        return tuple(tuple(block_ids[group]) for group in self._group_ids)

    def _send_prompt(self, step: Step, name: str) -> None:
        state = self._requests.get(name)
        found = state.lookup.found if state is not None else None
        if state is not None and not state.sent and found is not None and found.prompt is not None:
            step.prompts[name] = found.prompt
            state.sent = True

    def _plan_saves(self, step: Step, output: Any) -> None:
        for name, tokens in output.num_scheduled_tokens.items():
            state = self._requests.get(name)
            found = state.lookup.found if state is not None else None
            if state is None or found is None:
                continue
            self._count(state, found)
            if found.prompt is None:
                continue
            stop = self._complete(state.request, tokens)
            first = self._first_save(state, found)
            if stop > first:
                self._save(step, output, state, found, first, stop)

    def _complete(self, request: Any, tokens: int) -> int:
        """Blocks of the prompt that are complete after this step computed ``tokens``."""
        known = min(request.num_computed_tokens + tokens, request.num_prompt_tokens - self._drop_last)
        return max(0, known) // self._size

    def _first_save(self, state: _Request, found: Found) -> int:
        if state.next_save is None:
            state.next_save = found.tokens // self._size
        return state.next_save

    def _save(self, step: Step, output: Any, state: _Request, found: Found, first: int, stop: int) -> None:
        name = state.request.request_id
        state.next_save = stop
        ids = self._tables.of(output, name)
        if ids is None:
            return
        pages = self._pages(ids)
        since = state.lookup.started - _STORING_S
        for start, end in self._not_asked_since(since, found.keys, first, stop):
            cut = tuple(
                group[start * self._size // tokens : end * self._size // tokens]
                for group, tokens in zip(pages, self._page_tokens, strict=True)
            )
            step.saves.append(Save(name, start, end, cut))
            self._send_prompt(step, name)

    def _not_asked_since(self, since: float, keys: Any, first: int, stop: int) -> list[tuple[int, int]]:
        """Runs of blocks in ``first:stop`` that no other request has had stored since then."""
        now = time.monotonic()
        runs: list[tuple[int, int]] = []
        for index in range(first, stop):
            if self._asked.get(keys[index], 0.0) > since:
                continue
            self._asked[keys[index]] = now
            self._asked.move_to_end(keys[index])
            if runs and runs[-1][1] == index:
                runs[-1] = (runs[-1][0], index + 1)
            else:
                runs.append((index, index + 1))
        while len(self._asked) > _REMEMBERED:
            self._asked.popitem(last=False)
        return runs

    def _count(self, state: _Request, found: Found) -> None:
        """Count a request when it is computed for the first time; what the engine's own cache had is left out."""
        if state.counted:
            return
        state.counted = True
        known = found.tokens // self._size
        if found.miss is not None and found.miss.cause not in _NOT_KNOWN:
            self.announced.absent(found.keys[known : known + 1])
        wanted = max(0, state.request.num_prompt_tokens - state.start)
        loaded = min(state.loaded, wanted)
        metrics = self.pool.metrics
        outcome = "miss" if not loaded else "hit" if found.miss is None else "partial"
        metrics.add("lookups", outcome=outcome)
        metrics.add("prompt_tokens", wanted)
        metrics.add("hit_tokens", loaded)
        metrics.add("miss_tokens", wanted - loaded, cause="new" if found.miss is None else found.miss.cause.value)

    def close(self) -> None:
        """End."""
        self.pool.close(0.0)
