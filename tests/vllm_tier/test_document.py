"""``docs/vllm.md``: its flags are accepted, its settings and defaults are those of the code, its sums are right."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from stemkv.engines import _vllm_tier_options
from stemkv.engines._vllm_options import _OWN, read_options
from stemkv.engines._vllm_tier_options import TierOptions, read_tier_options
from stemkv.engines.vllm_tier import PREFIX, StemKVTier

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "vllm.md").read_text(encoding="utf-8")
CONNECTOR_ONLY = ("block_tokens", "share_wait_s")
FLAGS = [json.loads(found) for found in re.findall(r"--kv-transfer-config '(\{.*?\})'\n", TEXT, re.DOTALL)]


def table(after: str) -> list[list[str]]:
    lines = TEXT.split(after)[1].split("\n\n")
    rows = next(part for part in lines if part.startswith("|")).splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def test_the_flags_are_accepted() -> None:
    connector, tier = FLAGS
    assert connector["kv_connector"] == "StemKVConnector"
    read_options(connector["kv_connector_extra_config"], environ={})
    entry = dict(tier["kv_connector_extra_config"]["secondary_tiers"][0])
    assert (entry.pop("type"), entry.pop("module_path")) == (StemKVTier.__name__, StemKVTier.__module__)
    read_tier_options(entry, environ={})


def test_the_tiers_flag_starts_vllms_scheduler_side(start: Any) -> None:
    extra = FLAGS[1]["kv_connector_extra_config"]
    (entry,) = extra["secondary_tiers"]
    engine = start(extra={"block_size": extra["block_size"]})
    assert engine.tier.tier_type == entry["type"]
    assert engine.tier._names._identities[0].block_tokens == extra["block_size"]


def test_the_settings_are_those_of_the_code() -> None:
    rows = {row[0].strip("`"): (row[1], row[2].strip("`")) for row in table("## Settings")}
    defaults = TierOptions._field_defaults | _OWN
    for name, (where, shown) in rows.items():
        if name not in ("memory_bytes", "block_tokens"):
            assert json.loads(shown) == json.loads(json.dumps(defaults[name])), name
        only = "tier" if name in _vllm_tier_options._OWN else "connector" if name in CONNECTOR_ONLY else "both"
        assert where == only, name
    assert set(rows) >= {*_vllm_tier_options._OWN, *_OWN}


def test_the_tiers_counters_exist() -> None:
    known = StemKVTier.build_metric_definitions({})
    for names, labels, _ in table("## Metrics and events"):
        for name in re.findall(r"`stemkv_tier_(\w+)`", names):
            assert known[PREFIX + name].labelnames == tuple(re.findall(r"`(\w+)`", labels)), name
        for name in re.findall(r"`\.\.\._(\w+)`", names):
            assert set(known[PREFIX + name].labelnames) <= set(re.findall(r"`(\w+)`", labels)), name


@pytest.mark.parametrize("row", table("bytes per token = "), ids=lambda row: row[0])
def test_the_sums_are_right(row: list[str]) -> None:
    product = eval(row[1].replace("×", "*"))
    assert product == int(row[2].removesuffix(" B").replace(",", ""))
    assert round(product * 2000 / 1e6) == int(row[3].removesuffix(" MB"))
    assert round(100 * 2**30 / product / 1e6, 1) == float(row[4].removesuffix(" million"))
