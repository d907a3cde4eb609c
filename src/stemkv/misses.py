"""The closed set of reasons why tokens were computed instead of loaded.

Every lookup that does not cover the whole prompt carries exactly one :class:`Miss`. Its text form,
``cause`` or ``cause:detail``, is what headers, metrics (the cause alone) and logs show.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from enum import Enum

import msgspec


class Cause(str, Enum):
    """Why a run of blocks ended where it did. The value is the public, stable name."""

    # The prompt itself
    TOO_SHORT = "too-short"
    """The prompt has less than one full block before its last token."""
    UNSEEN = "unseen"
    """No block of this prompt was ever stored here."""
    END_OF_STORED = "end-of-stored"
    """Everything stored of this text was found; the rest is new."""
    DIVERGED = "diverged"
    """The stored text continues with other tokens from this block on."""
    NOT_CACHEABLE = "not-cacheable"
    """The request carries something stemkv does not key (for example embeddings); the detail names it."""

    # What must be equal for KV to be reusable
    IDENTITY = "identity"
    """The text is stored under another identity; the detail lists the fields that differ."""
    GENERATION = "generation"
    """The text is stored under another generation of the same identity."""

    # It was there, or should have been
    EVICTED = "evicted"
    """The block was removed to make room."""
    PENDING = "pending"
    """The block is still waiting to be written."""
    DROPPED = "dropped"
    """The block was never stored because the write queue was full."""
    NOT_CAPTURED = "not-captured"
    """The block was never stored because copying it out of the engine failed; the detail names the error."""
    NO_SPACE = "no-space"
    """The block was never stored because the tier had no room."""
    NO_STATE = "no-state"
    """The keys and values are there, but no window or recurrent state at a usable boundary."""

    # Faults of a tier
    READ_ONLY = "read-only"
    """The block was never stored because the tier cannot be written."""
    DEADLINE = "deadline"
    """The tier did not answer in time."""
    IO_ERROR = "io-error"
    """The tier failed to read or write; the detail names the error."""
    CLOSED = "closed"
    """The tier or the pool is closed."""

    # A stored block that is not what it should be. It is taken out of use, so that it can be stored anew.
    BAD_SIZE = "bad-size"
    """The stored block has another size than a block of this kind has."""
    BAD_HEADER = "bad-header"
    """The stored block's header is malformed."""
    BAD_VERSION = "bad-version"
    """The stored block has a format that this stemkv does not read; the detail names it."""
    BAD_KEY = "bad-key"
    """The stored block says it is another block."""
    BAD_NAMESPACE = "bad-namespace"
    """The stored block says it belongs to another namespace."""
    BAD_IDENTITY = "bad-identity"
    """The stored block says it was computed under another identity."""
    BAD_GENERATION = "bad-generation"
    """The stored block says it is of another generation."""
    BAD_TOKENS = "bad-tokens"
    """The stored block says it holds other tokens."""
    BAD_LAYOUT = "bad-layout"
    """The stored block holds other tensors than this engine expects."""
    BAD_SEAL = "bad-seal"
    """The stored block was tagged or sealed with another key, for example before ``seal`` was switched on."""
    BAD_TAG = "bad-tag"
    """The stored block's bytes are not those that were stored."""


CORRUPT = frozenset(cause for cause in Cause if cause.value.startswith("bad-"))
"""Causes after which a tier takes the stored bytes out of use (a file goes to quarantine).

``bad-seal`` is among them because such a block would otherwise stand in the way of its replacement for ever.
"""


class Miss(msgspec.Struct, frozen=True):
    """One named cause, with an optional detail such as the identity fields that differ."""

    cause: Cause
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.cause.value}:{self.detail}" if self.detail else self.cause.value


class Reasons:
    """Why keys are not stored or could not be loaded, for the last ``limit`` of them. Thread-safe.

    One entry takes about 300 bytes.
    """

    def __init__(self, limit: int = 65536) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._misses: OrderedDict[bytes, Miss] = OrderedDict()

    def get(self, key: bytes) -> Miss | None:
        return self._misses.get(key)

    def remember(self, key: bytes, miss: Miss) -> None:
        with self._lock:
            self._misses[key] = miss
            self._misses.move_to_end(key)
            if len(self._misses) > self._limit:
                self._misses.popitem(last=False)

    def forget(self, keys: Iterable[bytes]) -> None:
        """What is there after all needs no reason any more."""
        if self._misses:
            with self._lock:
                for key in keys:
                    self._misses.pop(key, None)
