"""Who is using a folder: each process holds a lock in ``sessions/`` and keeps its unfinished files beside it.

The kernel drops the lock when the process ends, however it ends, so the next one to open the folder can tell
the dead from the living without timeouts or process numbers. Sessions are made and cleared away only under the
folder's own lock (:func:`opening`), so a session without a held lock is always a dead one.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

OPENING_WAIT_S = 30.0
"""How long an opener waits for another that is opening or repairing the same folder."""


@contextmanager
def opening(root: Path) -> Iterator[None]:
    """Be the only one that opens or repairs ``root``. Raises TimeoutError, an OSError, after ``OPENING_WAIT_S``."""
    until = time.monotonic() + OPENING_WAIT_S
    while True:
        lock = os.open(root / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _same_file(lock, root / "lock"):
                break
        except BlockingIOError:
            if time.monotonic() >= until:
                os.close(lock)
                raise TimeoutError(f"another process has been opening it for {OPENING_WAIT_S:.0f} s") from None
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)
        time.sleep(0.005)
    try:
        yield
    finally:
        # Unlocked by name: a child forked meanwhile shares the descriptor and would keep the lock.
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


class Session:
    """This process's place in ``root/sessions``; made under :func:`opening`, removed on :meth:`close`."""

    def __init__(self, root: Path) -> None:
        self.path = root / "sessions" / f"{os.getpid()}-{secrets.token_hex(8)}"
        self._numbers = itertools.count()
        self.path.mkdir(mode=0o700, parents=True)
        try:
            self._lock = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError:
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def temporary(self) -> Path:
        """A name for an unfinished file of this process; unique, not yet there."""
        return self.path / f"{next(self._numbers)}.tmp"

    def there(self) -> bool:
        """Whether its folder is still where it was made; False after someone removed or replaced it."""
        return _same_file(self._lock, self.path / "lock")

    def close(self) -> None:
        """Remove the folder and drop the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.drop()

    def drop(self) -> None:
        """Close the descriptor alone: for a forked child, whose parent still uses the session."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


class Others(NamedTuple):
    """The other sessions of a folder."""

    dead: list[Path]
    alive: int


def others(root: Path, mine: Session) -> Others:
    """Sessions whose process is gone, and how many are alive. Call it under :func:`opening`."""
    dead, alive = [], 0
    with os.scandir(root / "sessions") as entries:
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False) or entry.path == str(mine.path):
                continue
            if _held(Path(entry.path, "lock")):
                alive += 1
            else:
                dead.append(Path(entry.path))
    return Others(dead, alive)


def forget(sessions: list[Path]) -> None:
    """Remove dead sessions with everything unfinished in them."""
    for path in sessions:
        shutil.rmtree(path, ignore_errors=True)


def _held(path: Path) -> bool:
    try:
        lock = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False  # it died before it had made its lock
    except OSError:
        return True  # another user's: whoever may open it will see to it
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(lock)


def _same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except OSError:
        return False
