"""KV events for routers: which blocks are in the store, with their tokens, in vLLM's own form."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored

from stemkv.engines._vllm_messages import Stored

_MEDIUM = "STORAGE"
_REMEMBERED = 1 << 16


def wanted(config: Any) -> bool:
    """Whether this engine publishes events."""
    events = getattr(config, "kv_events_config", None)
    return bool(events is not None and events.enable_kv_cache_events)


def _hash(key: bytes) -> Any:
    """A block's hash as the engine publishes its own."""
    try:
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash  # noqa: PLC0415
    except ImportError:
        return key
    return maybe_convert_block_hash(key)


class Announced:
    """Blocks that were announced as stored. They may vanish later: it shows when they are looked up."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self._events: list[Any] = []

    def stored(self, blocks: Iterable[Stored]) -> None:
        """Announce ``blocks``."""
        for block in blocks:
            tokens = array("I", block.tokens).tolist()
            self._keys[block.key] = None
            self._events.append(
                BlockStored(
                    block_hashes=[_hash(block.key)],
                    parent_block_hash=_hash(block.parent) if block.parent else None,
                    token_ids=tokens,
                    block_size=len(tokens),
                    lora_id=None,
                    medium=_MEDIUM,
                    lora_name=None,
                )
            )
        while len(self._keys) > _REMEMBERED:
            self._keys.popitem(last=False)

    def absent(self, keys: Iterable[bytes]) -> None:
        """Blocks that a lookup did not find, or that failed to load."""
        gone = [key for key in keys if key in self._keys]
        for key in gone:
            del self._keys[key]
        if gone:
            self._events.append(BlockRemoved(block_hashes=[_hash(key) for key in gone], medium=_MEDIUM))

    def take(self) -> list[Any]:
        """Events since the last call."""
        events, self._events = self._events, []
        return events
