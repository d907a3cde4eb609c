"""Both tiers pass the suite that third parties get: in memory, on disk, on /dev/shm; sealed and not."""

from stemkv.testing import samples

from .harness import FileSuite, MemorySuite


class TestMemory(MemorySuite):
    pass


class TestMemorySealed(MemorySuite):
    sealer = samples.SEALED


class TestFile(FileSuite):
    pass


class TestFileSealed(FileSuite):
    sealer = samples.SEALED


class TestSharedMemory(FileSuite):
    parent = "/dev/shm"


class TestSharedMemorySealed(FileSuite):
    parent = "/dev/shm"
    sealer = samples.SEALED
