"""stemkv: compute a prompt's beginning once, start from it everywhere.

    from stemkv import PrefixCache, load_settings, open_pool

    with open_pool(load_settings()) as pool:
        cache = PrefixCache(model, pool)
        output = cache.generate(**inputs, max_new_tokens=64)

The names below are the public interface; everything else may change. They are loaded when first used, so that
``import stemkv`` takes a few milliseconds and needs neither torch nor a server.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stemkv.errors import (
    ConfigError,
    ModelError,
    RequestError,
    StemKVError,
    StoreError,
    StoreFormatError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from stemkv.config import Settings, load_settings, open_pool
    from stemkv.engines.transformers import PrefixCache
    from stemkv.misses import Cause, Miss
    from stemkv.pool import Pool
    from stemkv.tiers.file import FileTier
    from stemkv.tiers.memory import MemoryTier

__version__ = "0.1.0"

__all__ = [
    "Cause",
    "ConfigError",
    "FileTier",
    "MemoryTier",
    "Miss",
    "ModelError",
    "Pool",
    "PrefixCache",
    "RequestError",
    "Settings",
    "StemKVError",
    "StoreError",
    "StoreFormatError",
    "UnsupportedModelError",
    "__version__",
    "load_settings",
    "open_pool",
]

_LAZY = {
    "Cause": "stemkv.misses",
    "FileTier": "stemkv.tiers.file",
    "MemoryTier": "stemkv.tiers.memory",
    "Miss": "stemkv.misses",
    "Pool": "stemkv.pool",
    "PrefixCache": "stemkv.engines.transformers",
    "Settings": "stemkv.config",
    "load_settings": "stemkv.config",
    "open_pool": "stemkv.config",
}
_EXTRAS = {"stemkv.engines.transformers": "transformers"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'stemkv' has no attribute {name!r}")
    module = _LAZY[name]
    try:
        value = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if module not in _EXTRAS or missing == "stemkv":
            raise
        extra = _EXTRAS[module]
        raise ImportError(f"stemkv.{name} needs {missing}: pip install 'stemkv[{extra}]'", name=error.name) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
