"""Scenarios with several processes on one folder, run by test_processes.py as ``python -m tiers.processes NAME ...``.

They fork from this small process without threads, so that a worker starts in a millisecond. Prints a JSON object.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from stemkv.misses import Cause, Miss
from stemkv.testing import samples
from stemkv.testing.samples import Collector
from stemkv.tiers.file import FileTier

from .harness import block_files, check_consistent, leftovers

SPACES = [samples.namespace(), samples.namespace(tenant="other", generation=3)]
REFS = list({
    ref.key: ref
    for space in SPACES
    for seed in range(6)
    for ref in samples.refs(samples.chain(5, seed=seed, of=space, shared=2))
}.values())  # fmt: skip
RECORDS = dict(zip((r.key for r in REFS), samples.records(REFS), strict=True))
BLOCK = 8192
"""Bytes of a sample block on disk."""


def open_tier(root: Path, blocks: int = 20) -> FileTier:
    return FileTier(root, max_bytes=blocks * BLOCK, reserve_bytes=0)


def forked(work: Callable[[], None], complaints: Path) -> int:
    """Run ``work`` in a forked process; what it raises is added to ``complaints``."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
        os._exit(0)
    except BaseException:
        with complaints.open("a") as file:
            file.write(traceback.format_exc())
        os._exit(3)


def read(tier: FileTier, some: list[int]) -> int:
    """Get blocks; every byte is compared with what was stored. Returns the hits."""
    refs = [REFS[i] for i in some]
    sink = Collector()
    results = tier.get(refs, sink, sealer=samples.PLAIN)
    for i, miss in enumerate(results):
        assert miss in (None, Miss(Cause.EVICTED)), miss
        assert miss is not None or sink.payloads[i] == samples.payload(refs[i]), "wrong bytes"
    return results.count(None)


def load(root: Path, seed: int, until: float = float("inf")) -> None:
    """Puts, gets, deletes and touches, as fast as it goes."""
    chance = random.Random(seed)
    tier = open_tier(root)
    while time.monotonic() < until:
        some = chance.sample(range(len(REFS)), 4)
        what = chance.random()
        if what < 0.5:
            results = tier.put([RECORDS[REFS[i].key] for i in some])
            assert all(miss in (None, Miss(Cause.NO_SPACE)) for miss in results), results
            assert tier.stats().bytes <= 20 * BLOCK, "above the cap"
        elif what < 0.85:
            read(tier, some)
        elif what < 0.93:
            tier.delete([REFS[some[0]].key])
        else:
            tier.touch([REFS[i].key for i in some])
    tier.close()


def rough_load(root: Path, seed: int, until: float) -> None:
    """As :func:`load`, in a folder that somebody damages meanwhile: any miss is fine, wrong bytes are not."""
    chance = random.Random(seed)
    tier = FileTier(root, max_bytes=20 * BLOCK, reserve_bytes=0, retry_s=0.0)
    while time.monotonic() < until:
        refs = [REFS[i] for i in chance.sample(range(len(REFS)), 4)]
        tier.put([RECORDS[r.key] for r in refs])
        sink = Collector()
        results = tier.get(refs, sink, sealer=samples.PLAIN)
        assert all(sink.payloads[i] == samples.payload(refs[i]) for i, miss in enumerate(results) if miss is None)
        tier.touch([r.key for r in refs])
        tier.contains([r.key for r in refs])
        tier.explain(refs[0])
        tier.stats()
    tier.close()


def inspect(root: Path, found: Path) -> None:
    """Open the folder after everybody died: files, rows, counts and bytes agree, and nothing is left over."""
    started = time.monotonic()
    tier = open_tier(root)
    opened = time.monotonic() - started
    check_consistent(tier)
    assert not leftovers(root)
    assert len(list((root / "sessions").iterdir())) == 1, "dead sessions are cleared away"
    assert tier.stats().bytes <= 20 * BLOCK
    assert tier.stats().quarantined == 0, "no torn file was ever found"
    evicted, hits = tier.stats().evicted, read(tier, list(range(len(REFS))))
    assert hits == tier.stats().blocks
    tier.close()
    with found.open("a") as file:
        file.write(json.dumps({"hits": hits, "open_s": opened, "evicted": evicted}) + "\n")


def kill(root: Path, seed: int, kills: int) -> dict[str, object]:
    """Kill random workers at random moments, some while they open or repair the folder."""
    chance = random.Random(seed)
    complaints, found = root.parent / "complaints", root.parent / "found"
    workers: list[int] = []

    def start() -> None:
        number = chance.randrange(2**30)
        workers.append(forked(lambda: load(root, number), complaints))

    for killed in range(kills):
        while len(workers) < 3:
            start()
        # Every third victim is the one that was just started: it is opening, and repairing what the last one left.
        fresh = killed % 3 == 0
        time.sleep(chance.uniform(0.0, 0.012 if fresh else 0.05))
        _kill(workers.pop(-1 if fresh else chance.randrange(len(workers))))
        if killed % 20 == 19:
            while workers:
                _kill(workers.pop())
            _, status = os.waitpid(forked(lambda: inspect(root, found), complaints), 0)
            if status:
                break
    reports = [json.loads(line) for line in (found.read_text() if found.exists() else "").splitlines()]
    return {
        "kills": killed + 1,
        "complaints": complaints.read_text() if complaints.exists() else "",
        "inspections": len(reports),
        "hits": sum(r["hits"] for r in reports),
        "slowest_open_s": max((r["open_s"] for r in reports), default=0.0),
    }


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def same(root: Path, seed: int, writers: int) -> dict[str, object]:
    """Several processes store the same keys at once, again and again from an empty folder."""
    complaints = root.parent / "complaints"
    stores = 0
    for turn in range(6):
        at = root / str(turn)
        begin = time.monotonic() + 0.1

        def work(at: Path = at, begin: float = begin) -> None:
            tier = open_tier(at, 200)
            time.sleep(max(0.0, begin - time.monotonic()))
            for ref in REFS:
                assert tier.put([RECORDS[ref.key]]) == [None]
            assert read(tier, list(range(len(REFS)))) == len(REFS)
            tier.close()

        pids = [forked(work, complaints) for _ in range(writers)]
        for pid in pids:
            os.waitpid(pid, 0)
        stores += writers * len(REFS)
        assert len(block_files(at)) == len(REFS)
        assert not list((at / "sessions").iterdir())
    return {"stores": stores, "complaints": complaints.read_text() if complaints.exists() else ""}


def crowd(root: Path, seed: int, writers: int) -> dict[str, object]:
    """Several processes store and evict at once."""
    complaints = root.parent / "complaints"
    until = time.monotonic() + 3.0
    pids = [forked(lambda n=n: load(root, seed + n, until), complaints) for n in range(writers)]  # type: ignore[misc]
    for pid in pids:
        os.waitpid(pid, 0)
    os.waitpid(forked(lambda: inspect(root, root.parent / "found"), complaints), 0)
    report = json.loads((root.parent / "found").read_text())
    return {**report, "complaints": complaints.read_text() if complaints.exists() else ""}


def vandal(root: Path, seed: int, acts: int) -> dict[str, object]:
    """Somebody damages and removes parts of the folder while several processes use it."""
    chance, complaints = random.Random(seed), root.parent / "complaints"
    until = time.monotonic() + acts * 0.05
    pids = [forked(lambda n=n: rough_load(root, seed + n, until), complaints) for n in range(3)]  # type: ignore[misc]
    manifest, done = root / "manifest.sqlite3", 0
    while time.monotonic() < until - 0.2:
        time.sleep(0.04)
        try:
            match chance.randrange(6):
                case 0:
                    manifest.unlink()
                case 1:
                    with manifest.open("r+b") as file:
                        file.seek(chance.randrange(0, 8192))
                        file.write(os.urandom(2000))
                case 2:
                    shutil.rmtree(root)
                case 3:
                    shutil.rmtree(root / chance.choice(["blocks", "sessions"]))
                case 4:
                    chance.choice(list((root / "blocks").rglob("*.safetensors"))).unlink()
                case _:
                    Path(f"{manifest}-wal").unlink()
            done += 1
        except (OSError, IndexError):
            pass  # somebody was faster
    for pid in pids:
        os.waitpid(pid, 0)
    open_tier(root).close()
    os.waitpid(forked(lambda: settled(root), complaints), 0)
    return {"acts": done, "complaints": complaints.read_text() if complaints.exists() else ""}


def settled(root: Path) -> None:
    """After the damage has ended everything is in order, and stores work."""
    tier = open_tier(root)
    check_consistent(tier)
    assert not leftovers(root)
    assert tier.put([RECORDS[REFS[0].key]]) == [None]
    assert read(tier, [0]) == 1
    check_consistent(tier)
    tier.close()


if __name__ == "__main__":
    name, folder, seed, count = sys.argv[1:]
    scenario = {"kill": kill, "same": same, "crowd": crowd, "vandal": vandal}[name]
    print(json.dumps(scenario(Path(folder), int(seed), int(count))))
