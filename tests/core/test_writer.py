"""The writer's queue drops rather than blocks, loses nothing silently, and always ends."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from stemkv.writer import Job, Writer


class Gate:
    """A job that waits until it is told to go on."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self.opened.wait(10)


def job(run: Callable[[], None] = lambda: None, nbytes: int = 1, *keys: bytes) -> Job:
    return Job(run, nbytes, keys)


def test_jobs_run_in_order_on_one_thread() -> None:
    writer, order, threads = Writer(1 << 20), list[int](), set[str]()

    def note(number: int) -> None:
        order.append(number)
        threads.add(threading.current_thread().name)

    for i in range(50):
        assert writer.submit(job(partial(note, i)))
    assert writer.flush(10)
    assert order == list(range(50))
    assert threads == {"stemkv-writer"}
    assert writer.close(10)


def test_no_thread_is_started_before_there_is_work() -> None:
    before = threading.active_count()
    writer = Writer(1)
    assert writer.flush(0)
    assert writer.close(0)
    assert threading.active_count() == before


def test_a_full_queue_refuses_at_once() -> None:
    writer, gate = Writer(100), Gate()
    assert writer.submit(job(gate, 60))
    assert gate.entered.wait(10)
    assert writer.submit(job(nbytes=40))
    began = time.monotonic()
    assert not writer.submit(job(nbytes=1))
    assert time.monotonic() - began < 1
    assert writer.queued_bytes == 100
    gate.opened.set()
    assert writer.flush(10)
    assert writer.queued_bytes == 0
    assert writer.submit(job(nbytes=100))
    assert writer.close(10)


def test_a_job_larger_than_the_queue_runs_alone() -> None:
    writer, gate = Writer(10), Gate()
    assert writer.submit(job(gate, 1000))
    assert gate.entered.wait(10)
    assert not writer.submit(job(nbytes=1000)), "the running one counts"
    gate.opened.set()
    assert writer.flush(10)
    assert writer.submit(job(nbytes=1000))
    assert writer.close(10)


def test_keys_are_pending_until_every_job_with_them_has_run() -> None:
    writer, gate, second = Writer(100), Gate(), Gate()
    writer.submit(job(gate, 1, b"a", b"b"))
    writer.submit(job(second, 1, b"a", b"a"))
    assert writer.pending(b"a")
    assert writer.pending(b"b")
    assert not writer.pending(b"c")
    assert not writer.wait_for(b"a", 0.01)
    gate.opened.set()
    assert writer.wait_for(b"b", 10)
    assert writer.pending(b"a")
    second.opened.set()
    assert writer.wait_for(b"a", 10)
    assert writer.close(10)


@pytest.mark.parametrize("error", [ValueError, MemoryError, SystemExit, KeyboardInterrupt])
def test_a_job_that_raises_costs_only_itself(error: type[BaseException], caplog: pytest.LogCaptureFixture) -> None:
    def bad() -> None:
        raise error

    writer, ran = Writer(100), threading.Event()
    with caplog.at_level(logging.CRITICAL, "stemkv"):
        writer.submit(job(bad, 5, b"a"))
        writer.submit(job(ran.set, 5))
        assert writer.flush(10)
    assert ran.is_set()
    assert not writer.pending(b"a")
    assert writer.queued_bytes == 0
    assert writer.close(10)


def test_flush_waits_for_what_was_queued_before_it_only() -> None:
    """Under a steady load it would otherwise never return."""
    writer, gate, later = Writer(1 << 20), Gate(), Gate()
    writer.submit(job(gate))
    done = threading.Event()

    def wait() -> None:
        writer.flush(10)
        done.set()

    flusher = threading.Thread(target=wait)
    flusher.start()
    time.sleep(0.05)
    writer.submit(job(later))
    gate.opened.set()
    assert done.wait(5), "flush waited for a job queued after it"
    later.opened.set()
    flusher.join()
    assert writer.close(10)


def test_flush_gives_up_after_its_timeout() -> None:
    writer, gate = Writer(100), Gate()
    writer.submit(job(gate))
    assert not writer.flush(0.01)
    gate.opened.set()
    assert writer.flush()
    assert writer.close(10)


def test_close_finishes_what_is_queued_and_takes_no_more() -> None:
    writer, ran = Writer(1 << 20), list[int]()
    for i in range(20):
        writer.submit(job(partial(ran.append, i)))
    assert writer.close(10)
    assert len(ran) == 20
    assert not writer.submit(job())
    assert writer.closing
    assert writer.close(0), "twice is fine"
    assert writer._thread is not None
    assert not writer._thread.is_alive()


def test_what_there_is_no_time_for_is_abandoned_and_told_so() -> None:
    writer, gate, told = Writer(1 << 20), Gate(), list[str]()
    writer.submit(job(gate, 7, b"a"))
    assert gate.entered.wait(10)
    for name in "bc":
        writer.submit(Job(lambda: told.append("ran"), 7, [name.encode()], partial(told.append, name)))
    flushed: list[bool] = []
    flusher = threading.Thread(target=lambda: flushed.append(writer.flush(10)))
    flusher.start()
    time.sleep(0.05)
    assert not writer.close(0.01)
    assert told == ["b", "c"]
    assert not writer.pending(b"b")
    assert writer.pending(b"a"), "it is still running"
    assert writer.queued_bytes == 7
    gate.opened.set()
    flusher.join(10)
    assert flushed == [False], "flush must not say that abandoned blocks are stored"
    assert not writer.close(10)
    assert writer.queued_bytes == 0
    assert not writer.pending(b"a")


def test_closing_from_several_threads_ends() -> None:
    writer = Writer(1 << 20)
    for _ in range(10):
        writer.submit(job(lambda: time.sleep(0.001)))
    closers = [threading.Thread(target=writer.close, args=(10,)) for _ in range(4)]
    for thread in closers:
        thread.start()
    for thread in closers:
        thread.join(10)
        assert not thread.is_alive()


def test_without_a_thread_to_be_had_blocks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    writer = Writer(100)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        assert not writer.submit(job(nbytes=5))
    assert writer.queued_bytes == 0
    assert writer.submit(job(nbytes=5))
    assert writer.close(10)


def test_a_job_that_ran_is_let_go_of() -> None:
    """It holds the tensors of a request."""
    import gc  # noqa: PLC0415
    import weakref  # noqa: PLC0415

    class Tensors:
        def __call__(self) -> None:
            pass

    writer, held = Writer(100), Tensors()
    alive = weakref.ref(held)
    writer.submit(job(held))
    assert writer.flush(10)
    del held
    gc.collect()
    assert alive() is None
    assert writer.close(10)
