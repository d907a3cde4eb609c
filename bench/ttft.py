"""Time to first token of a 4,096-token prompt on SmolLM2-135M in bf16: cold, restored, and handed over directly.

Every process-crossing figure comes from processes of its own (``ttft_worker.py``), model loaded, one short warm-up.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import Bench

HERE = Path(__file__).parent
PEERS = HERE.parent / ".venv-peers" / "bin" / "python"
PROCESSES = 5
ROUNDS = 7


def worker(mode: str, store: Path, *, rounds: int = 1) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "ttft_worker.py"), mode, str(store), str(rounds)]
    out = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(out.stdout.splitlines()[-1])


def new_processes(bench: Bench, store: Path) -> list[float]:
    """Restore in a process that never saw the prompt, beside a cold prompt in the same process."""
    worker("fill", store)
    results = [worker("restore", store) for _ in range(PROCESSES)]
    for result in results:
        if result["cached_tokens"] != 4032:
            raise SystemExit(f"bench: only {result['cached_tokens']} tokens came from the file tier")
    warm, cold = ([r[k] for r in results] for k in ("warm_s", "cold_s"))
    direct = [r["direct_s"] for r in results]
    bench.row("ttft-file-tier-new-process", "s", warm, against="cold", against_runs=cold, reach=">= 60", inverse=True)
    bench.row("ttft-kv-already-in-process", "s", direct, against="cold", against_runs=cold, inverse=True)
    bench.row(
        "ttft-file-tier-over-kv-in-process", "s", warm, against="the same KV handed over directly", against_runs=direct
    )
    bench.row("file-tier-load-only", "ms", [1e3 * r["load_s"] for r in results])
    return warm


def one_process(bench: Bench, store: Path) -> None:
    runs = worker("compare", store, rounds=ROUNDS)
    bench.row("ttft-memory-tier", "s", runs["memory"], against="the same KV handed over directly",
              against_runs=runs["direct"], reach="<= 1.15")  # fmt: skip
    bench.row("cold-while-storing", "s", runs["cold_storing"], against="cold without stemkv",
              against_runs=runs["cold_plain"], reach="<= 1.02")  # fmt: skip


def llama_cpp(bench: Bench, warm: list[float]) -> None:
    """llama-cpp-python restoring its own state for a prompt of the same length (``make bench`` builds it once)."""
    if not PEERS.exists():
        print("  llama-cpp-python is not installed (make .venv-peers/stamp): no row for it")
        return
    model = subprocess.check_output([sys.executable, str(HERE / "ttft_worker.py"), "model-path", "-", "0"], text=True)
    command = [str(PEERS), str(HERE / "llama_worker.py"), model.split()[-1], str(PROCESSES)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        print(f"  llama-cpp-python ended with status {done.returncode} on this machine: no row for it")
        return
    theirs = json.loads(done.stdout.splitlines()[-1])
    bench.row("ttft-file-tier-against-llama-cpp", "s", warm, against="llama-cpp-python, load_state",
              against_runs=theirs["restore_s"], reach="< 1")  # fmt: skip


def main() -> None:
    bench = Bench("ttft")
    print("bench/ttft.py: 4,096 tokens, the last 16 of them new")
    with tempfile.TemporaryDirectory(prefix="stemkv-bench-", dir=os.environ.get("STEMKV_BENCH_DIR")) as name:
        warm = new_processes(bench, Path(name) / "a")
        one_process(bench, Path(name) / "b")
        bench.write()  # what follows takes longest
        llama_cpp(bench, warm)
    bench.write()


if __name__ == "__main__":
    main()
