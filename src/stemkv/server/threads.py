"""Blocking work beside the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run ``work`` on a daemon thread of its own: one that hangs must neither block others nor the process's end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(set_: Callable[[], None]) -> None:
        if not future.cancelled():
            set_()

    def run() -> None:
        done: Callable[[], None]
        try:
            result = work()
            done = lambda: future.set_result(result)  # noqa: E731
        except Exception as error:  # noqa: BLE001 - handed to whoever waits
            caught = error
            done = lambda: future.set_exception(caught)  # noqa: E731
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, done)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
