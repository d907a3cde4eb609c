"""Running the server: the socket first, then the app, then an orderly end.

On SIGTERM or SIGINT no connection is accepted any more, requests that are here get ``drain_s`` seconds, what was
computed is stored, and the process ends with 0. A second signal ends it at once: the store is crash-safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from stemkv.errors import ConfigError
from stemkv.pool import Pool
from stemkv.server.worker import Worker

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_AFTER_CANCEL_S = 5.0
"""How long cancelled requests get to notice: one token or one chunk of a prompt."""


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet, so that a taken port is known before the model is loaded.

    Raises ConfigError naming the address and the remedy.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error.strerror}; give another --host") from None
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _cannot_listen(host, port, error) from None
    return sock


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"port {port} on {host} is in use; stop what listens there or choose another with --port")
    if error.errno == errno.EACCES:
        return ConfigError(f"port {port} on {host} needs more rights; choose one above 1023 with --port")
    return ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another with --host or --port")


def url(sock: socket.socket) -> str:
    """Where the server is reached."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server:
    """Serves ``app`` on ``sock`` until a signal or :meth:`stop`, then drains. Use it once, from one thread."""

    def __init__(
        self,
        app: ASGIApp,
        sock: socket.socket,
        worker: Worker,
        pool: Pool,
        *,
        drain_s: float,
        say: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self._sock, self._worker, self._pool, self._drain_s, self._say = sock, worker, pool, drain_s, say
        self._loop: asyncio.AbstractEventLoop | None = None
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=int(drain_s + _AFTER_CANCEL_S) + 1,
        )
        self._uvicorn = _Uvicorn(config)

    @property
    def started(self) -> bool:
        """Whether connections are accepted."""
        return self._uvicorn.started

    def run(self, *, signals: bool = True, ready: Callable[[], None] = lambda: None) -> bool:
        """Serve until told to stop; True if all that was computed is stored. ``ready`` is called when listening.

        Raises ConfigError if the port was taken meanwhile. ``signals`` needs the main thread.
        """
        asyncio.run(self._serve(signals=signals, ready=ready))
        self._worker.stop()
        self._worker.join(_AFTER_CANCEL_S)
        return self._pool.close()

    def stop(self) -> None:
        """Begin to drain; from any thread, also when the server has ended already."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._drain)

    async def _serve(self, *, signals: bool, ready: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        if signals:
            for number in _SIGNALS:
                self._loop.add_signal_handler(number, self._on_signal, number)
        waiting = asyncio.create_task(self._when_started(ready))
        try:
            await self._uvicorn.serve(sockets=[self._sock])
        except OSError as error:
            host, port = self._sock.getsockname()[:2]
            raise _cannot_listen(host, port, error) from None
        finally:
            waiting.cancel()

    async def _when_started(self, ready: Callable[[], None]) -> None:
        while not self.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        ready()

    def _on_signal(self, number: int) -> None:
        if self._uvicorn.should_exit:
            os._exit(128 + number)
        count = self._worker.running + self._worker.waiting
        left = f"finishing {count} request{'s' if count > 1 else ''} (at most {self._drain_s:g} s)" if count else ""
        self._say(f"stopping: {left + ', then ' if left else ''}finishing writes; a second signal stops at once")
        self._drain()

    def _drain(self) -> None:
        self._worker.stop()
        self._uvicorn.should_exit = True
        loop = asyncio.get_running_loop()
        loop.call_later(self._drain_s, self._worker.cancel_all)


class _Uvicorn(uvicorn.Server):
    """Without uvicorn's own signal handling, which ends the process by the signal rather than with 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
