"""The closed set of reasons why tokens were computed instead of loaded.

Every lookup that does not cover the whole prompt carries exactly one :class:`Miss`. Its text form,
``cause`` or ``cause:detail``, is what headers, metrics (the cause alone) and logs show.
"""

from __future__ import annotations

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

    # A stored block that is not what it should be; it is quarantined
    BAD_SIZE = "bad-size"
    BAD_HEADER = "bad-header"
    BAD_VERSION = "bad-version"
    BAD_KEY = "bad-key"
    BAD_NAMESPACE = "bad-namespace"
    BAD_IDENTITY = "bad-identity"
    BAD_GENERATION = "bad-generation"
    BAD_TOKENS = "bad-tokens"
    BAD_LAYOUT = "bad-layout"
    BAD_SEAL = "bad-seal"
    """The block names a sealing key that this process does not have."""
    BAD_TAG = "bad-tag"


CORRUPT = frozenset(
    {
        Cause.BAD_SIZE,
        Cause.BAD_HEADER,
        Cause.BAD_VERSION,
        Cause.BAD_KEY,
        Cause.BAD_NAMESPACE,
        Cause.BAD_IDENTITY,
        Cause.BAD_GENERATION,
        Cause.BAD_TOKENS,
        Cause.BAD_LAYOUT,
        Cause.BAD_TAG,
    }
)
"""Causes after which the stored bytes are moved to quarantine."""


class Miss(msgspec.Struct, frozen=True):
    """One named cause, with an optional detail such as the identity fields that differ."""

    cause: Cause
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.cause.value}:{self.detail}" if self.detail else self.cause.value
