"""A job's events on their way from the model thread to the event loop; a lost client cancels the job."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator

from starlette.requests import Request

from stemkv.engines.sampling import Lookup
from stemkv.server import cache_status
from stemkv.server.errors import ApiError
from stemkv.server.jobs import Ended, Event, Finished, FirstToken, Job, Started
from stemkv.server.metrics import ServerMetrics
from stemkv.server.responses import Usage

log = logging.getLogger("stemkv.server")

CLIENT_GONE = ApiError(499, "The client closed the connection.")
"""Nobody reads it; the status is what proxies log for this."""


class Channel:
    """Connects one job with one HTTP request. Create it on the event loop, before the job is submitted."""

    def __init__(self, job: Job, request: Request, metrics: ServerMetrics) -> None:
        self.job = job
        self.usage = Usage()
        self.lookup: Lookup | None = None
        """Of the first prompt; set before the first event is given out."""
        self._metrics = metrics
        self._first_token_s = 0.0
        self._over = False
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        job.emit = self._emit
        self._watcher = asyncio.create_task(self._watch(request))

    def close(self) -> None:
        """Stop watching the client, and the job if it still runs."""
        self._watcher.cancel()
        self.job.cancel()

    async def next(self) -> Event:
        """The next event; the last one is Finished."""
        event = await self._events.get()
        self._account(event)
        return event

    async def events(self) -> AsyncIterator[Event]:
        """All events up to and without Finished. Raises ApiError if the job failed or was cancelled."""
        while not isinstance(event := await self.next(), Finished):
            yield event
        if event.error is not None:
            raise event.error

    def _emit(self, event: Event) -> None:
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # the loop is closed: nobody is left to answer
            self.job.cancel()

    async def _watch(self, request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.job.cancel(CLIENT_GONE)
        # The model thread may reach the job much later; the request is over now.
        self._events.put_nowait(Finished(CLIENT_GONE))

    def _account(self, event: Event) -> None:
        if isinstance(event, Started):
            if self.lookup is None:
                self.lookup = event.lookup
            if event.index % self.job.n == 0:
                self.usage.prompt_tokens += event.lookup.prompt_tokens
                self.usage.cached_tokens += event.lookup.cached_tokens
        elif isinstance(event, FirstToken) and event.index == 0 and self.lookup is not None:
            self._first_token_s = time.perf_counter() - self.job.submitted
            self._metrics.first_token.labels(cache_status.outcome(self.lookup)).observe(self._first_token_s)
        elif isinstance(event, Ended):
            self.usage.completion_tokens += event.tokens
            self._metrics.generated.inc(event.tokens)
        elif isinstance(event, Finished) and not self._over:
            self._over = True
            self._watcher.cancel()
            self._log(event.error)

    def _log(self, error: ApiError | None) -> None:
        """One line a request: sizes, times and causes, never text."""
        took = time.perf_counter() - self.job.submitted
        if error is not None:
            log.info("%d after %.2f s: %s", error.status, took, error.message)
        elif self.lookup is not None:
            why = f" ({self.lookup.miss})" if self.lookup.miss else ""
            log.info(
                "%s prompt tokens, %s cached%s; first token after %.2f s, %d tokens in %.2f s",
                f"{self.usage.prompt_tokens:,}", f"{self.usage.cached_tokens:,}", why,
                self._first_token_s, self.usage.completion_tokens, took,
            )  # fmt: skip
