"""One model thread, a bounded queue, lost clients, and an orderly end."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from stemkv.errors import RequestError

from .harness import FakeEngine, Served, eventually, served

CHAT = "/v1/chat/completions"


def chat_body(text: str = "Hi", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def accepts(address: str) -> bool:
    """Whether a new connection is taken."""
    try:
        httpx.get(f"{address}/health", timeout=1)
    except httpx.HTTPError:
        return False
    return True


def in_background(count: int, handle: Served, **fields: Any) -> tuple[ThreadPoolExecutor, list[Any]]:
    pool = ThreadPoolExecutor(count)
    return pool, [pool.submit(handle.chat, f"job {i}", **fields) for i in range(count)]


def test_beyond_the_queue_is_429_with_a_retry_after() -> None:
    engine = FakeEngine(lambda _: "ok")
    with served(engine, max_queue=2) as handle:
        engine.gate.clear()
        pool, jobs = in_background(3, handle)
        assert eventually(lambda: handle.worker.running == 1 and handle.worker.waiting == 2)
        refused = handle.chat("one too many")
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit", "rate_limit_exceeded")
        assert "2 requests are waiting" in error["message"]
        assert int(refused.headers["retry-after"]) >= 1
        assert handle.metric("stemkv_queue_requests") == 2
        assert handle.metric("stemkv_requests_total", code="429") == 1
        engine.gate.set()
        assert [job.result().status_code for job in jobs] == [200] * 3
        assert engine.most_busy == 1, "one request at a time on the model"
        pool.shutdown()


def test_the_official_client_retries_a_429_by_itself() -> None:
    engine = FakeEngine(lambda _: "ok")
    with served(engine, max_queue=0) as handle:
        engine.gate.clear()
        pool, jobs = in_background(1, handle)
        assert eventually(lambda: handle.worker.running == 1)
        threading.Timer(0.3, engine.gate.set).start()
        with openai.OpenAI(base_url=f"{handle.address}/v1", api_key="none", max_retries=3) as client:
            answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}])
        assert answer.choices[0].message.content == "ok"
        assert jobs[0].result().status_code == 200
        pool.shutdown()


@pytest.mark.parametrize("stream", [False, True])
def test_a_lost_client_cancels_the_running_request(stream: bool) -> None:
    engine = FakeEngine(lambda _: "x" * 4000)
    engine.token_s = 0.002
    with served(engine) as handle:
        with httpx.Client(base_url=handle.address, timeout=20) as client:
            if stream:
                with client.stream("POST", CHAT, json=chat_body(stream=True)) as response:
                    next(response.iter_lines())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    client.post(CHAT, json=chat_body(), timeout=0.3)
        assert eventually(lambda: engine.busy == 0)
        made = engine.generated
        assert made < 2000
        assert handle.chat(max_tokens=1).status_code == 200
        assert engine.generated == made + 1
        assert handle.metric("stemkv_requests_total", endpoint=CHAT) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_lost_client_cancels_a_long_prompt(stream: bool) -> None:
    engine = FakeEngine(lambda _: "ok")
    engine.prefill_s = 60.0
    with served(engine) as handle:
        with httpx.Client(base_url=handle.address) as client, pytest.raises(httpx.ReadTimeout):
            client.post(CHAT, json=chat_body(stream=stream), timeout=0.3).read()
        assert eventually(lambda: engine.busy == 0)
        assert engine.generated == 0


def test_a_lost_client_gives_its_place_in_the_queue_back() -> None:
    engine = FakeEngine(lambda _: "ok")
    with served(engine, max_queue=1) as handle:
        engine.gate.clear()
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(handle.chat, "first")
            assert eventually(lambda: handle.worker.running == 1)
            with httpx.Client(base_url=handle.address) as client, pytest.raises(httpx.ReadTimeout):
                client.post(CHAT, json=chat_body("lost"), timeout=0.3)
            assert eventually(lambda: handle.worker.waiting == 0)
            second = pool.submit(handle.chat, "second")
            assert eventually(lambda: handle.worker.waiting == 1)
            engine.gate.set()
            assert first.result().status_code == second.result().status_code == 200
        assert len(engine.samplings) == 2, "the lost request was never computed"


def test_parallel_requests_get_their_own_answers() -> None:
    engine = FakeEngine(lambda prompt: f"echo {prompt}")
    with served(engine, max_queue=64) as handle, ThreadPoolExecutor(16) as pool:

        def ask(number: int) -> bool:
            text = f"number {number} " + "é" * (number % 7)
            if number % 2:
                body = handle.complete(text, max_tokens=200).json()
                return bool(body["choices"][0]["text"] == f"echo {text}")
            with httpx.Client(base_url=handle.address) as client:
                lines = client.post("/v1/completions", json={"prompt": text, "max_tokens": 200, "stream": True}).text
            parts = [json.loads(line[6:]) for line in lines.splitlines() if line.startswith("data: {")]
            return "".join(p["choices"][0]["text"] for p in parts) == f"echo {text}"

        assert all(pool.map(ask, range(48)))
        assert engine.most_busy == 1


def test_a_fault_of_the_model_is_one_500_and_the_server_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(lambda _: "ok")
    with served(engine) as handle:
        engine.fail = RuntimeError("secret detail")
        response = handle.chat()
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        assert "secret detail" not in response.text
        assert "RuntimeError" in response.text
        engine.fail = RequestError("the prompt is odd; mend it")
        refused = handle.chat(stream=True)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == "The prompt is odd; mend it."
        engine.fail = None
        assert handle.chat().status_code == 200
    assert "secret detail" in caplog.text, "the log has what the answer hides"


def test_a_fault_in_the_middle_of_a_stream_is_an_error_event() -> None:
    def reply(_: str) -> str:
        raise RuntimeError("broken")

    with served(FakeEngine(reply)) as handle, openai.OpenAI(base_url=f"{handle.address}/v1", api_key="x") as client:
        stream = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}], stream=True)
        with pytest.raises(openai.APIError, match="failed on this request"):
            list(stream)


def test_stopping_finishes_what_runs_and_takes_no_more() -> None:
    engine = FakeEngine(lambda _: "x" * 50)
    engine.token_s = 0.01
    with served(engine) as handle:
        pool, jobs = in_background(2, handle)
        assert eventually(lambda: handle.worker.running == 1 and handle.worker.waiting == 1)
        handle.server.stop()
        assert eventually(lambda: not handle.worker.healthy)
        assert eventually(lambda: not accepts(handle.address)), "the listening socket closes within a moment"
        assert [job.result().status_code for job in jobs] == [200, 200]
        pool.shutdown()
    assert handle.stored is True


def test_stopping_a_server_that_has_ended_does_nothing() -> None:
    with served(FakeEngine(lambda _: "x")) as handle:
        handle.server.stop()
        assert eventually(lambda: not accepts(handle.address))
    handle.server.stop()


def test_what_does_not_finish_in_time_is_cancelled_with_a_503() -> None:
    engine = FakeEngine(lambda _: "x" * 4000)
    engine.token_s = 0.01
    with served(engine, drain_s=0.2) as handle:
        pool, jobs = in_background(2, handle)
        assert eventually(lambda: handle.worker.running == 1 and handle.worker.waiting == 1)
        began = time.monotonic()
        handle.server.stop()
        responses = [job.result() for job in jobs]
        assert time.monotonic() - began < 4
        assert [r.status_code for r in responses] == [503, 503]
        assert responses[0].json()["error"]["code"] == "server_stopping"
        pool.shutdown()
