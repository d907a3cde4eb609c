"""The test vectors of ``docs/format.md``, from ``tests/core/vectors.json``; called by ``docs/generate.py``."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

VECTORS = Path(__file__).resolve().parent.parent / "tests" / "core" / "vectors.json"


def render() -> str:
    """A fenced block with the vectors that a reader in another language needs first; the file has all of them."""
    v: dict[str, Any] = json.loads(VECTORS.read_text(encoding="utf-8"))
    lines = ["```text", *_identity(v), *_keys(v), *_block(v["blocks"][0], "GMAC"), *_block(v["blocks"][2], "sealed")]
    return "\n".join([*lines, "```"])


def _identity(v: dict[str, Any]) -> list[str]:
    plain = v["identities"]["plain"]
    return [
        "identity 'plain'",
        *_fields(plain["fields"]),
        *_wrapped("  encoding", plain["encoding"]),
        f"  digest        {plain['digest']}",
        "",
    ]


def _fields(fields: dict[str, Any]) -> list[str]:
    return [line for name, value in fields.items() for line in _folded(f"  {name} = {_shown(value)}")]


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        if "hex" in value:
            return value["hex"] or "(empty)"
        return ", ".join(f"{k}={_shown(x)}" for k, x in value.items())
    if isinstance(value, list):
        return "(" + ", ".join(f"({_shown(x)})" if isinstance(x, dict) else _shown(x) for x in value) + ")"
    return json.dumps(value, ensure_ascii=False)


def _keys(v: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for name, space in v["namespaces"].items():
        of = f"identity '{space['identity']}', tenant '{space['tenant']}', generation {space['generation']}"
        lines += [f"namespace '{name}': {of}", f"  root          {v['roots'][space['root']]}"]
        lines += [f"  {part:13} {space[part]}" for part in ("key", "id", "tenant_key", "tenant_id")]
        lines.append("")
    for number, chain in enumerate(v["chains"], 1):
        extras = [f"; extras of block {int(i) + 1}: {', '.join(e)}" for i, e in chain["extras"].items()]
        lines.append(f"chain {number}: namespace '{chain['namespace']}', tokens {chain['tokens']}{''.join(extras)}")
        lines.append(f"  k_0           {chain['root']}")
        lines += [f"  k_{i}           {key}" for i, key in enumerate(chain["keys"], 1)]
        for group, keys in chain["group_keys"].items():
            lines += [f"  group {group}, k_{i}  {key}" for i, key in enumerate(keys, 1)]
        lines += [f"  tokens_{i}      {digest}" for i, digest in enumerate(chain["tokens_digests"], 1)]
        lines.append("")
    return lines


def _block(block: dict[str, Any], kind: str) -> list[str]:
    return [
        f"block {block['index'] + 1} of chain {block['chain'] + 1}, group {block['group']}, {kind}",
        *_wrapped("  plain payload", block["payload"]),
        *_wrapped("  stored payload", block["stored_payload"]),
        f"  header bytes  {block['header_bytes']}",
        *_wrapped("  header JSON", block["header"]),
        f"  sha256 of the whole file  {block['sha256']}",
        "",
    ]


def _folded(line: str) -> list[str]:
    return textwrap.wrap(line, 116, initial_indent="  ", subsequent_indent="      ", break_long_words=False)


def _wrapped(name: str, text: str) -> list[str]:
    return [f"{name}:", *[f"    {text[at : at + 112]}" for at in range(0, len(text), 112)]]


if __name__ == "__main__":
    print(render())
