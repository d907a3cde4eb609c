"""Who is using a folder: each process holds a lock in ``sessions/`` and keeps its unfinished files beside it.

The kernel drops the lock when the process ends, however it ends, so the next one to open the folder can tell
the dead from the living without timeouts or process numbers.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path


class Session:
    """This process's place in ``root/sessions``; removed on :meth:`close`."""

    def __init__(self, root: Path) -> None:
        sessions = root / "sessions"
        sessions.mkdir(exist_ok=True)
        self.path = sessions / f"{os.getpid()}-{secrets.token_hex(8)}"
        # The lock is taken under another name, so that no session is ever visible without its lock.
        hidden = sessions / f".{self.path.name}"
        hidden.mkdir(mode=0o700)
        self._lock = os.open(hidden / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        hidden.rename(self.path)

    def temporary(self) -> Path:
        """A name for an unfinished file of this process; unique, not yet there."""
        return self.path / f"{secrets.token_hex(12)}.tmp"

    def close(self) -> None:
        with suppress(OSError):
            shutil.rmtree(self.path)
            os.close(self._lock)


def take_over_dead(root: Path) -> list[Path]:
    """Sessions whose process is gone; the caller repairs the folder and then calls :func:`forget`.

    A session that died before its rename (dot name) wrote nothing and counts as dead too.
    """
    dead = []
    for path in sorted((root / "sessions").glob("*")) + sorted((root / "sessions").glob(".*-*")):
        try:
            lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            if not (path / "lock").exists() and path.is_dir() and not path.name.startswith("."):
                dead.append(path)
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            dead.append(path)
        except OSError:
            pass  # alive
        finally:
            os.close(lock)
    return dead


def forget(sessions: list[Path]) -> None:
    """Remove dead sessions with everything unfinished in them."""
    for path in sessions:
        shutil.rmtree(path, ignore_errors=True)
