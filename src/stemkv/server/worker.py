"""The model thread and the queue in front of it.

All work on the model happens on one thread: models and their caches are not thread-safe, and two prompts
computed at once on the same cores both take twice as long. What cannot start soon is refused, not piled up.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque

import msgspec

from stemkv.engines.sampling import Engine, Lookup, TokenLogprob
from stemkv.errors import RequestError
from stemkv.server.errors import ApiError, server_error, stopping
from stemkv.server.jobs import Choice, Finished, Job, Started
from stemkv.server.text import Decode

log = logging.getLogger("stemkv.server")

_LONGEST_RETRY_S = 60


class Worker:
    """One daemon thread generating for one job at a time. Methods may be called from any thread."""

    def __init__(self, engine: Engine, decode: Decode, *, max_queue: int) -> None:
        self.engine = engine
        self._decode = decode
        self._max_queue = max_queue
        self._jobs: deque[Job] = deque()
        self._running: Job | None = None
        self._stopping = False
        self._typical_s = 1.0
        """Moving average of how long a job takes."""
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="stemkv-model", daemon=True)
        self._thread.start()

    # -- what the event loop calls ---------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Queue ``job``. Raises ApiError: 429 when the queue is full, 503 when stopping."""
        with self._changed:
            self.check_room()
            self._jobs.append(job)
            self._changed.notify_all()

    def check_room(self) -> None:
        """Raise what :meth:`submit` would raise now."""
        with self._changed:
            if self._stopping:
                raise stopping()
            self._jobs = deque(j for j in self._jobs if not j.cancelled.is_set())
            # An idle model takes the next job at once; that one does not wait.
            if len(self._jobs) >= self._max_queue + (self._running is None):
                raise self._too_many()

    def stop(self) -> None:
        """Take no new jobs; finish those that are here."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def cancel_all(self) -> None:
        """Cancel what runs and what waits; their callers get a 503."""
        with self._changed:
            for job in [*self._jobs, *([self._running] if self._running else [])]:
                job.cancel(stopping())

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end after :meth:`stop`; False on timeout."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """Jobs in the queue."""
        return sum(not job.cancelled.is_set() for job in list(self._jobs))

    @property
    def running(self) -> int:
        """1 while a job is being generated, else 0."""
        return int(self._running is not None)

    @property
    def healthy(self) -> bool:
        """Whether the thread lives and takes jobs."""
        return self._thread.is_alive() and not self._stopping

    def _too_many(self) -> ApiError:
        seconds = min(_LONGEST_RETRY_S, max(1, math.ceil(self._typical_s)))
        return ApiError(
            429,
            f"The queue is full ({self._max_queue} requests are waiting); try again in {seconds} s.",
            kind="rate_limit",
            code="rate_limit_exceeded",
            headers={"Retry-After": str(seconds)},
        )

    # -- the model thread ------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (job := self._next()) is not None:
            started = time.perf_counter()
            error = self._run(job)
            with self._changed:
                self._running = None
                self._typical_s += 0.2 * (time.perf_counter() - started - self._typical_s)
            job.emit(Finished(error))

    def _next(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._stopping)
            self._running = self._jobs.popleft() if self._jobs else None
            return self._running

    def _run(self, job: Job) -> ApiError | None:
        try:
            for index in range(job.choices):
                if not job.cancelled.is_set():
                    self._generate(job, index)
        except RequestError as error:
            text = str(error).rstrip(".")
            return ApiError(400, f"{text[:1].upper()}{text[1:]}.")
        except Exception as error:  # the engine boundary: one bad request must not end the server
            log.exception("a request failed; the server goes on")
            return server_error(f"The model failed on this request ({type(error).__name__}); see the server's log.")
        return job.reason if job.cancelled.is_set() else None

    def _generate(self, job: Job, index: int) -> None:
        prompt, sampling = job.prompts[index // job.n], job.sampling[index // job.n]
        if sampling.seed is not None:  # choices of one request differ, and the same request gives the same ones
            sampling = msgspec.structs.replace(sampling, seed=sampling.seed + index % job.n)
        choice: Choice | None = None

        def on_lookup(lookup: Lookup) -> None:
            nonlocal choice
            job.emit(Started(index, lookup))
            choice = Choice(job, index, self._decode, self.engine.eos_ids)

        def on_token(token: int, logprob: TokenLogprob | None) -> bool:
            return job.cancelled.is_set() or (choice is not None and choice.feed(token, logprob))

        self.engine.generate(
            prompt,
            sampling,
            scope=job.scope,
            on_lookup=on_lookup,
            on_token=on_token,
            cancelled=job.cancelled.is_set,
        )
        if choice is not None and not job.cancelled.is_set():
            choice.end()
