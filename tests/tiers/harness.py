"""The two tiers of the box, as the conformance suite and the other tests use them."""

import errno
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import pytest

from stemkv import block
from stemkv.block import BlockError, Record
from stemkv.keys import BlockRef
from stemkv.testing import TierConformance, samples
from stemkv.testing.samples import Collector
from stemkv.tiers import _disk
from stemkv.tiers.base import Tier
from stemkv.tiers.file import FileTier
from stemkv.tiers.memory import MemoryTier


def file_of(tier: FileTier, ref: BlockRef) -> Path:
    return Path(tier._folder.file(ref.key))


def alter_file(tier: FileTier, ref: BlockRef, change: Callable[[bytes], bytes]) -> None:
    path = file_of(tier, ref)
    raw = change(path.read_bytes())
    path.unlink()  # a new file, as a copy or another writer would make it
    path.write_bytes(raw)


def alter_memory(tier: MemoryTier, ref: BlockRef, change: Callable[[bytes], bytes]) -> None:
    entry = tier._entries[ref.key]
    data = memoryview(bytearray(change(samples.stored_form(entry.record))))
    try:
        tag = block.take_tag(data)
    except BlockError:
        tag = bytes(16)
    old = entry.record
    entry.record = Record(old.ref, data.toreadonly(), tag, old.cost_s, old.created)


def block_files(root: Path) -> dict[str, int]:
    """Bytes on disk by name of everything under ``root/blocks``, as ``du`` counts."""
    return {p.name: p.stat().st_blocks * 512 for p in (root / "blocks").rglob("*") if not p.is_dir()}


def leftovers(root: Path) -> list[str]:
    """Unfinished files of any session."""
    return [str(p) for p in (root / "sessions").rglob("*.tmp")]


def check_consistent(tier: FileTier) -> None:
    """Rows equal files, bytes equal du, and every count that triggers keep is right."""
    reader = tier._store.opened.reader
    assert reader is not None
    files = block_files(tier.path)
    rows = {f"{key.hex()}.safetensors": size for key, size in reader.query("SELECT key, size FROM blocks")}
    assert rows == files
    totals = reader.totals()
    assert (totals.blocks, totals.bytes) == (len(files), sum(files.values()))
    wrong = reader.query(
        "SELECT key FROM blocks WHERE children != (SELECT count(*) FROM blocks AS c WHERE c.needs = blocks.key)"
    )
    assert not wrong
    counted = dict(reader.query("SELECT number, blocks FROM namespaces WHERE blocks > 0"))
    assert counted == dict(reader.query("SELECT namespace, count(*) FROM blocks GROUP BY namespace"))


@contextmanager
def failing_disk(error: OSError) -> Iterator[None]:
    """Every write of block files fails; the manifest works."""

    def fail(*_: object, **__: object) -> None:
        raise error

    with mock.patch.object(_disk, "write_file", fail):
        yield


class MemorySuite(TierConformance):
    def make_tier(self, max_bytes: int) -> Tier:
        return MemoryTier(max_bytes)

    def alter(self, tier: Tier, ref: BlockRef, change: Callable[[bytes], bytes]) -> None:
        assert isinstance(tier, MemoryTier)
        alter_memory(tier, ref, change)

    def failing(self, tier: Tier, error: OSError) -> AbstractContextManager[object]:
        return nullcontext()


class FileSuite(TierConformance):
    parent = tempfile.gettempdir()

    @pytest.fixture(autouse=True)
    def _clean_up(self) -> Iterator[None]:
        self.root = Path(tempfile.mkdtemp(prefix="stemkv-test-", dir=self.parent))
        self.open: list[Tier] = []
        yield
        for tier in self.open:
            tier.close()
        shutil.rmtree(self.root)

    def make_tier(self, max_bytes: int) -> Tier:
        tier = FileTier(self.root / secrets.token_hex(8), max_bytes=max_bytes, reserve_bytes=0, retry_s=0.0)
        self.open.append(tier)
        return tier

    def alter(self, tier: Tier, ref: BlockRef, change: Callable[[bytes], bytes]) -> None:
        assert isinstance(tier, FileTier)
        alter_file(tier, ref, change)

    def failing(self, tier: Tier, error: OSError) -> AbstractContextManager[object]:
        return failing_disk(error)


def enospc(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


CHAIN = samples.chain(6)
REFS = samples.refs(CHAIN)
KEYS = [r.key for r in REFS]
"""What the stores of the folder tests hold."""


def opened(root: Path, **options: float) -> FileTier:
    return FileTier(root, max_bytes=1 << 24, reserve_bytes=0, retry_s=options.get("retry_s", 0.0))


def stored(root: Path) -> None:
    """A closed store with all of REFS."""
    tier = opened(root)
    assert tier.put(samples.records(REFS)) == [None] * 6
    tier.close()


def hits(tier: FileTier) -> int:
    return tier.get(REFS, Collector(), sealer=samples.PLAIN).count(None)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
