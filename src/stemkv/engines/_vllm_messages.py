"""What the two halves of the vLLM connector tell each other. vLLM carries these between its processes.

Everything is bytes, numbers and tuples, so it is small and any serializer can carry it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
except ImportError:  # vLLM before 0.2x has no way back from worker to scheduler: failed loads are then retried blindly
    KVConnectorWorkerMetadata = object

PageIds = tuple[tuple[int, ...], ...]
"""For each group of the engine, ids of its blocks in KV memory, in the order of the text."""


@dataclass(frozen=True)
class Prompt:
    """A request's text and whatever else is in its keys. Sent once a request."""

    tokens: bytes
    """u32 little-endian."""
    scope: tuple[bytes, ...] = ()
    """Mixed into the first block's key: a salt, or what a reset of the cache set apart."""
    adapter: bytes = b""
    """Content digest of the LoRA adapter; empty for none."""


@dataclass(frozen=True)
class Load:
    """Fill a waiting request's blocks with tokens ``start:stop`` of its prompt."""

    request: str
    start: int
    stop: int
    pages: PageIds
    """From the beginning of the text; empty if the scheduler could not say, which fails the load."""


@dataclass(frozen=True)
class Save:
    """Copy out the blocks ``first:stop`` of a prompt, which this step completes."""

    request: str
    first: int
    stop: int
    pages: PageIds
    """From block ``first`` on."""


@dataclass
class Step(KVConnectorMetadata):
    """What the worker is to do in one step of the engine."""

    prompts: dict[str, Prompt] = field(default_factory=dict)
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    forget: list[str] = field(default_factory=list)
    """Requests that have ended."""
    tokens: int = 0
    """Tokens computed in this step."""


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """Sent once, when a worker has its KV memory: who it is, or why it does not cache."""

    identity: bytes = b""
    """An Identity in msgpack."""
    why_off: str = ""


class Stored(NamedTuple):
    """A block that is stored now."""

    key: bytes
    parent: bytes
    """Empty for the first block of a text."""
    tokens: bytes


@dataclass
class Report(KVConnectorWorkerMetadata):
    """What a worker tells the scheduler after a step."""

    failed: dict[str, int] = field(default_factory=dict)
    """Loads that failed: the first block that could not be had, or -1 if it took too long."""
    stored: list[Stored] = field(default_factory=list)
    """Blocks that are stored now, if the engine publishes events."""

    def aggregate(self, other: Report) -> Report:
        """The reports of two ranks as one."""
        for request, block in other.failed.items():
            self.failed[request] = min(block, self.failed.get(request, block))
        self.stored += other.stored
        return self
