"""Which blocks of a request are stored: asked on threads, for all workers' shards, with a deadline."""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from stemkv.engines._vllm_claims import Claims
from stemkv.engines._vllm_identity import adapter_digest, adapter_stamp
from stemkv.engines._vllm_messages import Prompt
from stemkv.engines._vllm_threads import Threads
from stemkv.identity import Adapter, Identity
from stemkv.keys import Chain, Namespace, framed, token_bytes
from stemkv.match import Match
from stemkv.misses import Cause, Miss
from stemkv.pool import Pool

log = logging.getLogger("stemkv")
_THREADS = 4
_WORTH_WAITING = 256
"""Fewer tokens are computed rather than waited for."""
_SICK_S = 5.0
"""How long nothing is asked of the tiers after one did not answer in time."""


class Found(NamedTuple):
    """The answer to a lookup."""

    tokens: int = 0
    """Tokens of the prompt that are stored, for every worker."""
    miss: Miss | None = None
    """Why it is not more."""
    prompt: Prompt | None = None
    """What a worker needs to know of the text; None if it cannot be stored."""
    keys: Sequence[bytes] = ()
    """Chain keys of the text for the first worker."""
    busy: bool = False
    """Another engine is computing what is missing."""
    claim: bytes = b""
    """This engine's claim to compute what is missing; empty for none."""


class Asked(NamedTuple):
    """What of a request is needed for a lookup: copied, because the engine goes on changing the request."""

    tokens: list[int]
    scope: tuple[bytes, ...]
    lora: Any
    limit: int | None = None
    """Most blocks to find, after a load failed at that block."""


class Lookup:
    """One question; the answer comes from a thread. Not an answer in time is a miss."""

    def __init__(self, timeout_s: float) -> None:
        self.started = time.monotonic()
        self._deadline = self.started + timeout_s
        self.found: Found | None = None

    def answer(self) -> tuple[Found | None, bool]:
        """The answer, if there is one yet, and whether it is late."""
        if self.found is not None:
            return self.found, False
        return None, time.monotonic() >= self._deadline


class Scopes:
    """The namespaces of the workers, one set for each LoRA adapter."""

    def __init__(self, identities: Sequence[Identity], *, generation: int, root: bytes) -> None:
        self._identities = tuple(identities)
        self._generation, self._root = generation, root
        self._known: dict[bytes, tuple[Namespace, ...]] = {}

    def of(self, adapter: bytes) -> tuple[Namespace, ...]:
        """Namespaces for an adapter's digest; empty for none."""
        found = self._known.get(adapter)
        if found is None:
            if len(self._known) > 256:
                self._known.clear()
            applied = (Adapter(digest=adapter, scale=1.0),) if adapter else ()  # the scale is in the adapter's files
            found = self._known[adapter] = tuple(
                Namespace(msgspec.structs.replace(i, adapters=applied), generation=self._generation, root=self._root)
                for i in self._identities
            )
        return found


class Adapters:
    """Content digests of LoRA adapters, by the number under which the engine keeps their weights in memory.

    Files that change later say nothing about weights that are loaded already, so such an adapter is not cached.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[int, tuple[str, Any, bytes]] = {}

    def digest(self, lora: Any) -> bytes | None:
        """The digest, or None if it cannot be told what is loaded. Blocks while files are read."""
        try:
            stamp = adapter_stamp(lora.lora_path)
            with self._lock:
                known = self._seen.get(lora.lora_int_id)
            if known is None:
                known = (lora.lora_path, stamp, adapter_digest(lora.lora_path))
                if adapter_stamp(lora.lora_path) != stamp:
                    return None
                with self._lock:
                    known = self._seen.setdefault(lora.lora_int_id, known)
        except (OSError, ValueError) as error:
            log.warning("requests with the adapter %r are not cached: %s", lora.lora_name, error)
            return None
        return known[2] if known[:2] == (lora.lora_path, stamp) else None


class Lookups:
    """Asks the pool on a few threads."""

    def __init__(self, pool: Pool, scopes: Scopes, timeout_s: float, claims: Claims | None) -> None:
        self._pool, self._scopes, self._timeout_s = pool, scopes, timeout_s
        self.claims = claims
        self._threads = Threads("stemkv-lookup", _THREADS)
        self._adapters = Adapters()
        self._sick_until = 0.0

    @property
    def sick(self) -> bool:
        """Whether a tier did not answer in time lately."""
        return time.monotonic() < self._sick_until

    def found_sick(self) -> None:
        """Leave the tiers alone for a while."""
        self._sick_until = time.monotonic() + _SICK_S

    def start(self, asked: Asked) -> Lookup:
        """Begin a lookup; never blocks."""
        lookup = Lookup(self._timeout_s)
        if self.sick:
            lookup.found = Found(miss=Miss(Cause.DEADLINE))
            return lookup

        def work() -> None:
            try:
                lookup.found = self._find(asked)
            except Exception as error:  # a fault of the cache is a miss
                log.exception("a lookup failed; the prompt is computed")
                lookup.found = Found(miss=Miss(Cause.IO_ERROR, type(error).__name__))

        self._threads.submit(work)
        return lookup

    def _find(self, asked: Asked) -> Found:
        adapter = self._adapters.digest(asked.lora) if asked.lora is not None else b""
        if adapter is None:
            return Found(miss=Miss(Cause.NOT_CACHEABLE, "lora"))
        namespaces = self._scopes.of(adapter)
        size = namespaces[0].identity.block_tokens
        prompt = Prompt(token_bytes(asked.tokens), asked.scope, adapter)
        tokens = asked.tokens if asked.limit is None else asked.tokens[: asked.limit * size + 1]
        match = self._common(namespaces, tokens, asked.scope)
        # Keys of the whole text, for the blocks that will be stored.
        keys = match.chain.keys if asked.limit is None else _chain(namespaces[0], asked.tokens, asked.scope).keys
        found = Found(match.tokens, match.miss, prompt, keys)
        missing = match.blocks < len(keys) and len(asked.tokens) - match.tokens >= _WORTH_WAITING
        if self.claims is None or match.miss is None or not missing or asked.limit is not None:
            return found
        claim = self.claims.take(keys[match.blocks :])
        return found._replace(busy=True) if claim is None else found._replace(claim=claim)

    def _common(self, namespaces: Sequence[Namespace], tokens: list[int], scope: tuple[bytes, ...]) -> Match:
        """The longest run that all shards have."""
        first: Match | None = None
        while True:
            matches = [self._match(_chain(namespace, tokens, scope)) for namespace in namespaces]
            first = first or matches[0]
            shortest = min(matches, key=lambda m: m.blocks)
            if all(m.blocks == shortest.blocks for m in matches):
                return msgspec.structs.replace(first, blocks=shortest.blocks, miss=first.miss or shortest.miss)
            # A window need not be there at a shorter boundary, so all are asked again.
            first = msgspec.structs.replace(first, miss=shortest.miss)
            tokens = tokens[: shortest.blocks * namespaces[0].identity.block_tokens + 1]

    def _match(self, chain: Chain) -> Match:
        match = self._pool.match(chain)
        self._pool.release(match)  # the worker, which loads, takes a lease of its own
        return match


def _chain(namespace: Namespace, tokens: Sequence[int], scope: tuple[bytes, ...]) -> Chain:
    return Chain(namespace, tokens, {0: scope} if scope else None)


def chain_of(namespace: Namespace, prompt: Prompt, stop: int | None = None) -> Chain:
    """The chain of a prompt, or of its first ``stop`` tokens."""
    packed = array("I")
    packed.frombytes(prompt.tokens if stop is None else prompt.tokens[: 4 * stop])
    return _chain(namespace, packed, prompt.scope)


def scope_of(salt: str | None, epoch: bytes) -> tuple[bytes, ...]:
    """What sets a request apart besides its text: the caller's salt, and a reset of the cache."""
    parts = (b"" if salt is None else framed("salt", salt), framed("epoch", epoch) if epoch else b"")
    return tuple(part for part in parts if part)
