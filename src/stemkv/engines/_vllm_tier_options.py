"""Settings of the vLLM tier: its entry in ``secondary_tiers``. Imports neither vLLM nor torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from stemkv.config import Settings
from stemkv.engines._vllm_options import read_options
from stemkv.errors import ConfigError


class TierOptions(NamedTuple):
    """Checked settings."""

    settings: Settings
    lookup_timeout_s: float
    """How long a key may be "ask again later"; then it is a miss."""
    load_timeout_s: float
    """How long loading what one request needs may take; then what has not arrived is computed."""
    store_timeout_s: float = 30.0
    """How long vLLM keeps rows in place for a store; then what was not copied out is not stored."""
    load_threads: int = 4
    """Threads that read, verify and copy blocks."""
    tenant: str = ""
    """Whose KV this is; other tenants' blocks in the same store are neither found nor recognized."""
    weights: tuple[str, ...] = ()
    """Weight files, where they cannot be found by the model's name."""
    after_reset: str = "apart"
    """After vLLM reset its cache (weights reloaded, sleep): ``apart`` reuses nothing older and hands nothing on, since
    vLLM does not say whether the weights are still those of the files; ``keep`` takes them to be."""
    enable_kv_events: bool = False
    """Whether blocks stored and lost are told as KV events, where vLLM publishes them."""
    locality: str | None = None
    """``LOCAL`` or ``REMOTE``, for KV events and ``kv_load_tiers``."""


_OUTSIDE = ("enable_kv_events", "locality")
"""Settings that stand beside ``stemkv``, where vLLM's own tiers have them."""
_OWN = ("store_timeout_s", "load_threads", "tenant", "weights", "after_reset")


def read_tier_options(config: Mapping[str, Any], *, environ: Mapping[str, str] | None = None) -> TierOptions:
    """Options from a tier's entry, without what vLLM took out of it. Raises ConfigError with one sentence.

    The table ``stemkv`` is that of the connector (see ``read_options``) and the settings above.
    """
    unknown = sorted(set(config) - {"stemkv", *_OUTSIDE})
    if unknown:
        raise ConfigError(f'unknown key {unknown[0]!r} in the StemKVTier entry: put stemkv\'s settings under "stemkv"')
    raw = config.get("stemkv", {})
    if not isinstance(raw, Mapping):
        raise ConfigError(f'"stemkv" in the StemKVTier entry is {raw!r}: it must be a table of settings')
    if "block_tokens" in raw:
        raise ConfigError("block_tokens is set by vLLM here, as block_size of kv_connector_extra_config: leave it out")
    if "share_wait_s" in raw:
        raise ConfigError("share_wait_s is a setting of the connector and has no meaning in the tier: leave it out")
    own = {name: raw[name] for name in _OWN if name in raw} | {
        name: config[name] for name in _OUTSIDE if name in config
    }
    common = read_options({"stemkv": {k: v for k, v in raw.items() if k not in _OWN}}, environ=environ)
    if isinstance(own.get("weights"), str):
        own["weights"] = [own["weights"]]
    for name, fits, what in _CHECKS:
        if name in own and not fits(own[name]):
            raise ConfigError(f"{name} = {own[name]!r}: {what}")
    own["weights"] = tuple(own.get("weights", ()))
    return TierOptions(common.settings, common.lookup_timeout_s, common.load_timeout_s, **own)


def _number(value: object, least: float, most: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most


_CHECKS: tuple[tuple[str, Any, str], ...] = (
    ("store_timeout_s", lambda v: _number(v, 0.001, 3600), "it is a number of seconds above 0, at most 3600"),
    ("load_threads", lambda v: isinstance(v, int) and _number(v, 1, 64), "it is a number from 1 to 64"),
    ("tenant", lambda v: isinstance(v, str), "it is text"),
    ("weights", lambda v: isinstance(v, list) and all(isinstance(p, str) for p in v), "it is a list of paths"),
    ("after_reset", lambda v: v in ("apart", "keep"), "choose apart or keep"),
    ("enable_kv_events", lambda v: isinstance(v, bool), "it is true or false"),
    ("locality", lambda v: v in (None, "LOCAL", "REMOTE"), "choose LOCAL or REMOTE"),
)
