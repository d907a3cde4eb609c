"""Settings of the vLLM connector: ``kv_connector_extra_config["stemkv"]``. Imports neither vLLM nor torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from stemkv.config import Settings, load_settings
from stemkv.errors import ConfigError

OLDEST = (0, 12)
"""The first vLLM whose connectors get the KV layout (``kv_cache_config``) and hybrid models (``SupportsHMA``)."""
NEWEST_TESTED = "0.32.0"
SUPPORTED = f"{OLDEST[0]}.{OLDEST[1]} or later, tested with {NEWEST_TESTED}"
NOT_HERE = frozenset({"repeatable", "host", "port", "max_queue", "drain_s"})
"""Settings of ``stemkv serve`` that mean nothing inside vLLM."""


class Options(NamedTuple):
    """Checked settings."""

    settings: Settings
    own_block_tokens: int
    """``block_tokens`` if it was set, else 0."""
    on_error: str = "refuse"
    """What happens when the cache cannot work at start-up: ``refuse`` to start, or start with the cache ``off``."""
    lookup_timeout_s: float = 1.0
    """How long a request may wait to learn what is stored; then it is computed."""
    load_timeout_s: float = 10.0
    """How long loading one request's blocks may take; then it is computed."""
    share_wait_s: float = 10.0
    """How long a request may wait for another replica that is computing its beginning; 0 for not at all."""


_OWN = {"on_error": "refuse", "lookup_timeout_s": 1.0, "load_timeout_s": 10.0, "share_wait_s": 10.0}


def wants_off(raw: object) -> bool:
    """Whether a broken configuration asks for ``on_error: off``; never raises."""
    return isinstance(raw, Mapping) and raw.get("on_error") == "off"


def read_options(extra: Mapping[str, Any], *, environ: Mapping[str, str] | None = None) -> Options:
    """Options from ``kv_connector_extra_config``. Raises ConfigError with one sentence.

    ``STEMKV_*`` variables count too; what is in the configuration wins.
    """
    unknown = sorted(set(extra) - {"stemkv"})
    if unknown:
        raise ConfigError(
            f'unknown key {unknown[0]!r} in kv_connector_extra_config: put stemkv\'s settings under "stemkv"'
        )
    raw = extra.get("stemkv", {})
    if not isinstance(raw, Mapping):
        raise ConfigError(f'kv_connector_extra_config["stemkv"] is {raw!r}: it must be a table of settings')
    useless = sorted(NOT_HERE & set(raw))
    if useless:
        raise ConfigError(f"{useless[0]} is a setting of 'stemkv serve' and has no meaning in vLLM: leave it out")
    own = {name: raw.get(name, default) for name, default in _OWN.items()}
    if own["on_error"] not in ("refuse", "off"):
        raise ConfigError(f"on_error = {own['on_error']!r}: choose refuse (do not start) or off (start uncached)")
    for name in ("lookup_timeout_s", "load_timeout_s", "share_wait_s"):
        value = own[name]
        zero = value == 0 and name == "share_wait_s"
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not (zero or 0 < value <= 3600):
            raise ConfigError(f"{name} = {value!r} is not a number of seconds above 0, at most 3600")
    given = {"memory_bytes": 0} | {k: v for k, v in raw.items() if k not in _OWN}
    try:
        settings = load_settings(given, environ=environ)
    except ConfigError as error:
        raise ConfigError(str(error).replace("(command line)", "(kv_connector_extra_config)")) from None
    if settings.seal and not settings.secret_file:
        raise ConfigError("seal needs secret_file: name a file with at least 32 random bytes")
    if not settings.store:
        raise ConfigError(
            "store is empty: vLLM's scheduler and workers are processes of their own and meet in a folder; name one"
        )
    return Options(settings, settings.block_tokens if "block_tokens" in raw else 0, **own)


def check_version(version: str) -> tuple[int, int]:
    """(major, minor) of a vLLM version. Raises ConfigError for one that is too old or not recognizable.

    A development build without a number (``dev``) counts as new.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        if version == "dev":
            return OLDEST[0], 999
        raise ConfigError(f"vLLM {version} is not a version that stemkv knows: it supports {SUPPORTED}")
    numbers = int(found[1]), int(found[2])
    if numbers == (0, 0) or (numbers == (0, 1) and "dev" in version):  # built from a checkout without tags
        return OLDEST[0], 999
    if numbers < OLDEST:
        raise ConfigError(f"vLLM {version} is too old for stemkv, which supports {SUPPORTED}")
    return numbers
