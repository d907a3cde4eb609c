"""One ``generate`` call: where its cache starts, what is computed ahead of generate, what is stored when."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StoppingCriteria

from stemkv.engines._arena import Arena
from stemkv.engines._blocks import Buffers, CopyOut, Row
from stemkv.engines._groups import Plan
from stemkv.engines._request import Request
from stemkv.engines.prompt_progress import Progress
from stemkv.identity import HitPolicy
from stemkv.keys import Chain, Namespace
from stemkv.pool import Pool

_STORE_EVERY = 1024
"""Generated tokens after which a model with sliding windows stores them, to let go of what the window passed."""


class Call:
    """The cache of one call, from what was loaded to what is stored. Not reused."""

    def __init__(
        self,
        model: Any,
        plan: Plan,
        pool: Pool,
        namespace: Namespace,
        request: Request,
        chains: Sequence[Chain],
        arena: Arena,
        fault: Callable[[str], None],
        longest: int | None,
    ) -> None:
        if request.ids is None:
            raise ValueError("a call without token ids cannot be cached")
        self.ids = request.ids
        self.model, self.plan, self.pool, self.namespace = model, plan, pool, namespace
        self.request, self.chains = request, list(chains)
        self.block_tokens = namespace.identity.block_tokens
        self.prompt_columns = int(self.ids.shape[1])
        self.loaded = self.covered = 0
        """Columns of the prompt that were loaded, and that the cache has (loaded or computed ahead)."""
        self._arena, self._fault, self._longest = arena, fault, longest
        self.buffers = Buffers(plan, len(request.rows) * request.expand, arena)
        self.cache = DynamicCache()
        self.started = time.perf_counter()
        self._stored = [0] * len(request.rows) * request.expand
        self._snapshots: list[dict[int, dict[int, list[Tensor]]]] = [{} for _ in self._stored]
        self._saved_states: list[set[int]] = [set() for _ in self._stored]
        self._cost_per_token = 0.0

    def rows_of(self, prompt: int) -> slice:
        """The rows of the cache that continue ``prompt``."""
        return slice(prompt * self.request.expand, (prompt + 1) * self.request.expand)

    # -- before generate -----------------------------------------------------------------------------------

    def prepare(self, blocks: Sequence[int]) -> int:
        """Make room for loading ``blocks`` blocks of each prompt; returns the columns that this covers."""
        rows = self.request.rows
        columns = min((row.pad + n * self.block_tokens for row, n in zip(rows, blocks, strict=True)), default=0)
        columns = columns if any(blocks) else 0
        dropped = {}
        for group, spec in enumerate(self.plan.groups):
            if spec.policy is HitPolicy.TRAILING and columns:
                dropped[group] = (
                    rows[0].pad + spec.blocks_needed(blocks[0], self.block_tokens).start * self.block_tokens
                )
        self.buffers = Buffers(self.plan, len(rows) * self.request.expand, self._arena)
        room = min(self.request.new_tokens, max(256, self.prompt_columns))
        self.buffers.allocate(self.prompt_columns + room + 1, columns, dropped)
        for number, row in enumerate(rows):
            self._zero_padding(self.rows_of(number), min(row.pad, columns), dropped)
        for layer in self.buffers.growing_layers():
            layer.hold = True
        self.cache.layers = self.buffers.layers
        self.cache.layer_class_to_replicate = None
        self._starts_at(columns)
        return columns

    def shorten(self, columns: int) -> None:
        """Use only the first ``columns`` columns of what was loaded; for models with PREFIX groups alone."""
        for layer in self.buffers.growing_layers():
            layer.crop(columns - layer.get_seq_length())
        self._starts_at(columns)

    def _starts_at(self, columns: int) -> None:
        self.loaded = self.covered = columns
        for number, row in enumerate(self.request.rows):
            done = max(0, columns - row.pad) // self.block_tokens
            self._stored[self.rows_of(number)] = [done] * self.request.expand

    def _zero_padding(self, rows: slice, padding: int, dropped: dict[int, int]) -> None:
        """Padding is masked, but attention multiplies by what is there: it must be finite."""
        for group in self.buffers.attention_groups() if padding else ():
            for stack in self.buffers.stacks(group):
                stack.zero(rows, max(0, padding - dropped.get(group, 0)))

    def last_full_column(self) -> int:
        """The column up to which a hit on every block of every prompt would reach."""
        return min(
            row.pad + (len(row.tokens) - 1) // self.block_tokens * self.block_tokens for row in self.request.rows
        )

    def compute_ahead(self, chunk: int, boundaries: Sequence[int], split: int | None, progress: Progress) -> None:
        """Compute all but the last part of the prompt, which is left to generate.

        Stops every ``chunk`` columns, at ``boundaries`` (in blocks) where a recurrent state is to be kept, and at
        column ``split``.
        """
        self.started = time.perf_counter()
        pad = self.request.rows[0].pad
        at, total = self.covered, self.prompt_columns
        states = {pad + b * self.block_tokens for b in boundaries if pad + b * self.block_tokens > at}
        chunks = set(range(at + chunk, total, chunk))
        stops = states | chunks | ({split} if split is not None and split > at else set())
        for stop in sorted(s for s in stops if s < total):
            self._forward(at, stop)
            self.covered = at = stop
            with self.safely("storing a part of a prompt"):
                self._after_part(stop, whole_chunk=stop in chunks)
            progress(at, total)

    def _after_part(self, stop: int, *, whole_chunk: bool) -> None:
        if self._on_boundary(stop):
            self.keep_states(stop)
        if whole_chunk:
            self.store_prompt(stop)
            self.let_go(stop)

    @contextmanager
    def safely(self, doing: str) -> Iterator[None]:
        """The boundary at which faults of storing end."""
        try:
            yield
        except Exception:  # noqa: BLE001
            self._fault(doing)

    def _on_boundary(self, column: int) -> bool:
        return self.plan.has(HitPolicy.EXACT) and (column - self.request.rows[0].pad) % self.block_tokens == 0

    @torch.no_grad()
    def _forward(self, start: int, stop: int) -> None:
        """Run the model over columns ``start:stop`` the way generate would."""
        ids = self._expanded(self.ids)
        mask = None if self.request.mask is None else self._expanded(self.request.mask)
        ones = torch.ones_like(ids) if mask is None else mask.to(ids.device)
        positions = (ones.long().cumsum(-1) - 1).masked_fill(ones == 0, 0)[:, :stop]
        padded = mask is not None and not bool((mask[:, :stop] != 0).all())
        accepted = self.model._supports_logits_to_keep()  # noqa: SLF001
        inputs = self.model.prepare_inputs_for_generation(
            ids[:, :stop],
            next_sequence_length=stop - start,
            attention_mask=ones[:, :stop] if padded else None,
            position_ids=positions,
            use_cache=True,
            is_first_iteration=True,
            **{self.plan.argument: self.cache},
            **({"logits_to_keep": 1} if accepted else {}),
        )
        self.model(**inputs, return_dict=True)

    def _expanded(self, tensor: Tensor) -> Tensor:
        return tensor if self.request.expand == 1 else tensor.repeat_interleave(self.request.expand, 0)

    # -- during generate -----------------------------------------------------------------------------------

    @contextmanager
    def slicing(self) -> Iterator[None]:
        """Make the first forward of generate compute only what the cache does not cover.

        Generate does so itself for greedy search, sampling and beams, but not for assisted and prompt-lookup
        decoding or for models without attention, which would silently compute on the wrong positions.
        """
        model, name, cached = self.model, "prepare_inputs_for_generation", self.covered
        original, own = getattr(model, name), model.__dict__.get(name)

        def prepare(input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
            ours = kwargs.get(self.plan.argument) is self.cache
            if ours and kwargs.get("is_first_iteration") and input_ids.shape[1] >= self.prompt_columns:
                kwargs["next_sequence_length"] = input_ids.shape[1] - cached
            return original(input_ids, *args, **kwargs)

        if cached:
            setattr(model, name, prepare)
        try:
            yield
        finally:
            if cached:
                delattr(model, name)
            if own is not None:
                setattr(model, name, own)

    def first_token(self) -> None:
        """Called when the first new token exists, so the whole prompt's KV does too."""
        computed = sum(max(0, self.prompt_columns - max(self.loaded, row.pad)) for row in self.request.rows)
        self._cost_per_token = (time.perf_counter() - self.started) / max(1, computed)
        self.store_prompt(self.prompt_columns)

    def next_token(self, ids: Tensor) -> None:
        """Called after every token with the text so far; keeps states and stores from time to time."""
        if not self.request.follows_text:
            return
        columns = int(ids.shape[1]) - 1
        if self.plan.has(HitPolicy.EXACT) and self._on_boundary(columns):
            for states in self._snapshots:
                states.clear()
            self.keep_states(columns)
        if self.plan.has(HitPolicy.TRAILING) and (columns - self.prompt_columns + 1) % _STORE_EVERY == 0:
            self.store_text(ids, ended=None)
            self.let_go(columns)

    # -- storing -------------------------------------------------------------------------------------------

    def keep_states(self, column: int) -> None:
        """Copy the recurrent states as they are now, after ``column`` columns."""
        for row, states in enumerate(self._snapshots):
            pad = self.request.rows[row // self.request.expand].pad
            states[(column - pad) // self.block_tokens - 1] = self.buffers.snapshot(row)

    def store_prompt(self, columns: int) -> None:
        """Hand the full blocks of the prompts' first ``columns`` columns to the writer."""
        seen: set[bytes] = set()
        for number, row in enumerate(self.request.rows):
            at = self.rows_of(number)
            full = self._store(at.start, row, self.chains[number], columns, seen)
            self._stored[at] = [full] * self.request.expand
            self._saved_states[at] = [set(self._saved_states[at.start]) for _ in range(self.request.expand)]

    def store_text(self, sequences: Tensor, ended: Sequence[int] | None) -> None:
        """Hand the full blocks of prompts and generated text to the writer.

        ``ended`` has for each row the column after its last token; None while all rows go on. Nothing is stored of
        texts longer than the call's ``longest``, from where on KV depends on more than the text.
        """
        if self._longest is not None and sequences.shape[1] > self._longest:
            return
        columns = min(self.buffers.columns() or int(sequences.shape[1]) - 1, int(sequences.shape[1]))
        seen: set[bytes] = set()
        for at, tokens in enumerate(sequences.tolist()):
            pad = self.request.rows[at // self.request.expand].pad
            end = columns if ended is None else min(columns, ended[at])
            if (end - pad) // self.block_tokens > self._stored[at]:
                row = Row(pad, tokens[pad:end])
                self._stored[at] = self._store(at, row, Chain(self.namespace, row.tokens), end, seen)

    def let_go(self, columns: int) -> None:
        """Free what sliding windows have passed and the writer has."""
        pads = [row.pad for row in self.request.rows for _ in range(self.request.expand)]
        stored = min((p + n * self.block_tokens for p, n in zip(pads, self._stored, strict=True)), default=columns)
        for layer in self.buffers.growing_layers():
            layer.trim(stored)

    def _store(self, at: int, row: Row, chain: Chain, columns: int, seen: set[bytes]) -> int:
        """Queue the new full blocks before ``columns`` of cache row ``at``; returns how many blocks are done."""
        full = min(max(0, columns - row.pad) // self.block_tokens, len(chain))
        new = [i for i in range(self._stored[at], full) if chain.keys[i] not in seen]
        blocks = [(group, i) for i in new for group in self.buffers.attention_groups()]
        states = self._snapshots[at]
        kept = sorted(i for i in states if i < len(chain) and i not in self._saved_states[at])
        blocks += [(group, i) for i in kept for group in states[i]]
        seen.update(chain.keys[i] for i in new)
        if blocks:
            self._saved_states[at].update(kept)
            self.buffers.freeze(columns)
            source = CopyOut(self.buffers, row, at, dict(states))
            self.pool.store(chain, blocks, source, cost_s=self._cost_per_token * self.block_tokens)
        return max(full, self._stored[at])


class Watch(StoppingCriteria):
    """Never stops anything; tells the call about every token. After a fault it only watches the rest go by.

    ``computed`` is called once, with the prompt's columns, when the first new token exists.
    """

    def __init__(self, call: Call, computed: Callable[[int], None]) -> None:
        self._call, self._computed = call, computed
        self._first = self._working = True

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        del scores
        if self._working:
            self._working = False
            with self._call.safely("storing during generation"):
                if self._first:
                    self._call.first_token()
                self._call.next_token(input_ids)
                self._working = True
        if self._first:
            self._first = False
            self._computed(self._call.prompt_columns)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
