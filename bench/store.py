"""The store itself: keys, file tier reads and writes, opening and lookups, each beside a plain reference."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from harness import BLOCK_SHAPE, Bench, interleaved, last_level_cache, seconds
from stemkv import block
from stemkv.identity import GroupSpec, HitPolicy, Identity, Layout, TensorSpec
from stemkv.keys import BlockRef, Chain, Namespace
from stemkv.sealing import Sealer
from stemkv.tiers.base import Sink
from stemkv.tiers.file import FileTier

SEALER = Sealer()
SMOLLM2 = GroupSpec(
    HitPolicy.PREFIX,
    tuple(range(BLOCK_SHAPE[0])),
    (TensorSpec("k", "BF16", BLOCK_SHAPE), TensorSpec("v", "BF16", BLOCK_SHAPE)),
)
TINY = GroupSpec(HitPolicy.PREFIX, (0,), (TensorSpec("k", "U8", (64,)),))


def chain(group: GroupSpec, blocks: int, seed: int = 0) -> Chain:
    identity = Identity(
        weights_digest=b"w" * 32,
        weights_source="files",
        config_digest=b"c" * 32,
        kv_dtype="BF16",
        layout=Layout("bench", "LHTD", 1),
        groups=(group,),
    )
    return Chain(Namespace(identity, generation=seed), range(seed, seed + 64 * blocks))


def record(
    ref: BlockRef, fill: Callable[[memoryview], None] | None = None, buffer: bytearray | None = None
) -> block.Record:
    data, payload = block.begin(ref, buffer)
    if fill is not None:
        fill(payload)
    return block.finish(ref, data, 0.02, SEALER)


class Buffers(Sink):
    """A distinct, already touched buffer for each record."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = buffers
        self.accepted = 0

    def buffer(self, index: int, nbytes: int) -> memoryview:
        return self._buffers[index]

    def accept(self, index: int, payload: memoryview) -> None:
        self.accepted += 1


def bench_read(bench: Bench, folder: Path) -> None:
    """Verified reads against ``preadv`` of the same files into the same buffers, page cache warm."""
    size = block.record_bytes(SMOLLM2)
    count = max(last_level_cache() * 5 // 4, 256 << 20) // size
    keys = chain(SMOLLM2, count)
    refs = [keys.ref(0, i) for i in range(count)]
    tier = FileTier(folder, max_bytes=4 * count * size)
    for ref in refs:
        if tier.put([record(ref, lambda p: p.__setitem__(slice(None), os.urandom(len(p))))]) != [None]:
            raise SystemExit("bench: could not store the blocks to read")
    files = [folder / "blocks" / r.key.hex()[:2] / f"{r.key.hex()}.safetensors" for r in refs]
    buffers = [memoryview(bytearray(size)) for _ in refs]

    def plain(part: slice) -> None:
        for path, buffer in zip(files[part], buffers[part], strict=True):
            fd = os.open(path, os.O_RDONLY)
            if os.preadv(fd, [buffer], 0) != size:
                raise SystemExit(f"bench: short read of {path}")
            os.close(fd)

    def verified(part: slice) -> None:
        if any(tier.get(refs[part], Buffers(buffers[part]), sealer=SEALER)):
            raise SystemExit("bench: a block did not verify")

    def rate(work: Callable[[slice], None], readers: int) -> float:
        threads = [threading.Thread(target=work, args=(slice(n, None, readers),)) for n in range(readers)]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return count * size / (time.perf_counter() - started) / 1e9

    for readers in (1, 2):
        runs = interleaved({"v": lambda n=readers: rate(verified, n), "p": lambda n=readers: rate(plain, n)}, 7)  # type: ignore[misc]
        name = f"file-read-verified-{readers}-reader" + "s" * (readers > 1)
        bench.row(name, "GB/s", runs["v"], against="preadv", against_runs=runs["p"], reach=">= 0.75")
    tier.close()


def bench_write(bench: Bench, folder: Path) -> None:
    """From tensors to published files: copy, tag, write, rename and index, against ``safetensors.save_file``.

    Into a folder that has been in use: its 256 sub-folders are there.
    """
    count = 64
    tensors = [{n: torch.randn(BLOCK_SHAPE).bfloat16() for n in ("k", "v")} for _ in range(count)]
    keys = chain(SMOLLM2, count)
    refs = [keys.ref(0, i) for i in range(count)]
    total = count * block.record_bytes(SMOLLM2)

    tier = FileTier(folder / "ours", max_bytes=4 * total)
    used = chain(TINY, 2048)
    tier.put([record(used.ref(0, i)) for i in range(len(used))])
    buffers = [bytearray(total // count) for _ in range(16)]  # as the pool does for a tier that keeps no records
    plain = folder / "theirs"
    plain.mkdir()

    def write() -> None:
        for at in range(0, count, 16):
            batch = [
                record(refs[i], lambda p, i=i: _copy(tensors[i], p), buffers[i - at])  # type: ignore[misc]
                for i in range(at, at + 16)
            ]
            if any(tier.put(batch)):
                raise SystemExit("bench: a block was not stored")

    def ours() -> float:
        took = seconds(write)
        if tier.delete([ref.key for ref in refs]) != count:
            raise SystemExit("bench: a block was not there")
        return total / took / 1e9

    def theirs() -> float:
        took = seconds(lambda: [save_file(t, plain / f"{i}.safetensors") for i, t in enumerate(tensors)])
        for path in plain.iterdir():
            path.unlink()
        return total / took / 1e9

    runs = interleaved({"o": ours, "t": theirs}, 9)
    bench.row("file-write", "GB/s", runs["o"], against="safetensors.save_file", against_runs=runs["t"], reach=">= 0.8")
    tier.close()


def _copy(tensors: dict[str, torch.Tensor], payload: memoryview) -> None:
    flat = torch.frombuffer(payload, dtype=torch.bfloat16)
    half = len(flat) // 2
    flat[:half].copy_(tensors["k"].view(-1))
    flat[half:].copy_(tensors["v"].view(-1))


def bench_keys(bench: Bench) -> None:
    tokens = list(range(131_072))
    namespace = chain(SMOLLM2, 1).namespace
    bench.row("key-chain-131072-tokens", "ms", [1e3 * seconds(lambda: Chain(namespace, tokens)) for _ in range(15)],
              reach="<= 10")  # fmt: skip


def bench_import(bench: Bench) -> None:
    code = "import time; t = time.perf_counter(); import stemkv; stemkv.Pool; print(time.perf_counter() - t)"
    runs = [float(subprocess.check_output([sys.executable, "-c", code])) * 1e3 for _ in range(9)]
    bench.row("import-stemkv", "ms", runs, reach="<= 150")


def bench_index(bench: Bench, folder: Path) -> None:
    """Opening a folder of 100,000 blocks and looking up 2,048 keys in it, against SQLite alone."""
    count, depth = 100_000, 2_048
    tier = FileTier(folder, max_bytes=1 << 40)
    first: Chain | None = None
    for seed in range(0, count, depth):
        keys = chain(TINY, min(depth, count - seed), seed)
        first = first or keys
        for at in range(0, len(keys), 512):
            tier.put([record(keys.ref(0, i)) for i in range(at, min(at + 512, len(keys)))])
    if first is None or tier.stats().blocks != count:
        raise SystemExit(f"bench: {tier.stats().blocks} blocks stored, not {count}")
    tier.close()
    wanted = list(first.keys)

    def ours() -> float:
        opened: list[FileTier] = []
        took = seconds(lambda: opened.append(FileTier(folder, max_bytes=1 << 40)))
        opened[0].close()
        return took

    def sqlite() -> float:
        def work() -> None:
            db = sqlite3.connect(folder / "manifest.sqlite3")
            db.execute("SELECT blocks, bytes FROM totals").fetchone()
            db.close()

        return seconds(work)

    runs = interleaved({"o": ours, "s": sqlite}, 9)
    bench.row("open-100000-blocks", "s", runs["o"], reach="<= 0.05")
    bench.row("open-100000-blocks-sqlite-alone", "s", runs["s"])
    tier = FileTier(folder, max_bytes=1 << 40)
    lookups = []
    for _ in range(15):
        found: list[bool] = []
        lookups.append(1e3 * seconds(lambda: found.extend(tier.contains(wanted))))  # noqa: B023 - runs at once
        if not all(found):
            raise SystemExit("bench: a stored key was not found")
    bench.row("lookup-2048-of-100000", "ms", lookups, reach="<= 10")
    tier.close()


def main() -> None:
    bench = Bench("store")
    torch.set_num_threads(1)  # the writer is one thread, and so is save_file
    print("bench/store.py: the store against plain references")
    with tempfile.TemporaryDirectory(prefix="stemkv-bench-", dir=os.environ.get("STEMKV_BENCH_DIR")) as name:
        folder = Path(name)
        bench_import(bench)
        bench_keys(bench)
        bench_write(bench, folder)
        bench_read(bench, folder / "read")
        shutil.rmtree(folder / "read")
        bench_index(bench, folder / "index")
    bench.write()


if __name__ == "__main__":
    main()
