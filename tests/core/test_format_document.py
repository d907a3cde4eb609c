"""``docs/format.md`` says what the code does."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from stemkv import block, identity, keys
from stemkv.misses import Cause

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "format.md").read_text(encoding="utf-8")


def rows(section: str) -> list[str]:
    """The first column of all tables in a section."""
    part = TEXT.split(f"\n## {section}")[1].split("\n## ")[0]
    return re.findall(r"^\| (`[^|]*`|[a-z]+) \|", part, re.MULTILINE)


def test_identity_fields_are_documented_in_their_order() -> None:
    documented = [name.strip("`") for name in rows("1. Identity") if "`" in name]
    assert documented == list(identity.Identity.__struct_fields__)


@pytest.mark.parametrize("kind", ["Adapter", "Layout", "Shard", "GroupSpec", "TensorSpec"])
def test_records_are_documented_in_their_order(kind: str) -> None:
    name = kind.removesuffix("Spec").lower()
    (line,) = [x for x in TEXT.splitlines() if x.startswith(f"| {name} |")]
    documented = re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", line))
    assert documented == list(getattr(identity, kind).__struct_fields__)


def test_metadata_fields_are_documented_in_their_order() -> None:
    documented = [n for cell in rows("3. The block file") for n in re.findall(r"`(\w+)`", cell)]
    assert documented == list(block.Metadata.__struct_fields__)


def test_numbers_and_labels_are_those_of_the_code() -> None:
    assert f"`{block.FORMAT}`" in TEXT
    assert f"8 + {block._METADATA_BYTES} + sum over tensors of ({block._ENTRY_BYTES} +" in TEXT
    assert f"multiple of {block.ALIGNMENT}" in TEXT
    assert block.MAX_HEADER_BYTES == 1 << 20
    assert identity.MAX_PAYLOAD_BYTES == 2**31 - 2**21
    assert keys.PUBLIC_ROOT.rstrip(b"\0").decode() in TEXT
    for label in ("stemkv-identity-1", "stemkv-ns-1", "stemkv-tenant-1", "stemkv-seal-1"):
        assert f'"{label}"' in TEXT


def test_the_order_of_checks_is_documented() -> None:
    found = re.findall(r"`(bad-[a-z]+)`", TEXT.split("### Reading")[1].split("\n## ")[0])
    size_to_tokens = [c.value for c in Cause if c.value.startswith("bad-")][:8]
    assert list(dict.fromkeys(found)) == [*size_to_tokens, "bad-seal", "bad-layout", "bad-tag"]


def test_the_vectors_in_the_document_are_the_pinned_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(DOCS), *sys.path])
    from _format_vectors import render  # type: ignore[import-not-found]  # noqa: PLC0415

    assert f"<!-- generated: format-vectors -->\n{render()}\n<!-- end -->" in TEXT
