"""What a well-formed request gets: whole or as a stream, the same text, usage and cache status."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from stemkv.engines.sampling import Lookup
from stemkv.misses import Cause, Miss
from stemkv.server import cache_status

from .harness import FakeEngine, Served, served

HI = [{"role": "user", "content": "Hi"}]
ANSWER = "Grüße aus 東京 🗼!"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(FakeEngine(lambda _: ANSWER), max_queue=64) as handle:
        yield handle


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_chat_answer_has_openai_shape(server: Served) -> None:
    response = server.chat()
    body = response.json()
    assert response.headers["content-type"] == "application/json"
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"]) == ("chat.completion", "tiny")
    message = {"role": "assistant", "content": ANSWER, "refusal": None}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    tokens = len(ANSWER.encode()) + 1  # and the end token
    assert body["usage"]["completion_tokens"] == tokens
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + tokens


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 7}, {"stop": "東京"}, {"stop": ["aus", "zzz"]}, {"n": 2}])
def test_a_stream_adds_up_to_the_whole_answer(server: Served, fields: dict[str, Any]) -> None:
    whole = server.chat(**fields).json()
    options = {"include_usage": True}
    response, chunks = server.stream("/v1/chat/completions", messages=HI, stream_options=options, **fields)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert all(c["object"] == "chat.completion.chunk" and c["id"] == chunks[0]["id"] for c in chunks)
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == choice["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in mine) == choice["message"]["content"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]
        assert mine[-1]["finish_reason"]


def test_a_completion_stream_adds_up_and_is_without_usage_unless_asked(server: Served) -> None:
    _, chunks = server.stream("/v1/completions", prompt="a", max_tokens=100)
    assert "".join(c["choices"][0]["text"] for c in chunks) == ANSWER
    assert all("usage" not in c for c in chunks)


def test_the_finish_reason_tells_stop_from_length(server: Served) -> None:
    assert server.chat(max_tokens=3).json()["choices"][0]["finish_reason"] == "length"
    assert server.chat(max_tokens=100).json()["choices"][0]["finish_reason"] == "stop"
    stopped = server.chat(stop=["aus"]).json()["choices"][0]
    assert (stopped["message"]["content"], stopped["finish_reason"]) == ("Grüße ", "stop")


def test_an_answer_cut_inside_a_character_has_no_half_character(server: Served) -> None:
    for size in range(1, len(ANSWER.encode()) + 1):
        text = server.chat(max_tokens=size).json()["choices"][0]["message"]["content"]
        assert ANSWER.encode().startswith(text.encode())
        assert "\ufffd" not in text


def test_several_prompts_and_choices_come_in_order(server: Served) -> None:
    body = server.complete(["one", "two"], n=2, echo=True, max_tokens=6).json()
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    assert [c["text"][:3] for c in body["choices"]] == ["one", "one", "two", "two"]
    assert body["usage"]["prompt_tokens"] == 6, "prompts count once"
    assert body["usage"]["completion_tokens"] == 24
    ids = server.complete([list(b"one"), list(b"two")], echo=True, max_tokens=6).json()
    assert [c["text"][:3] for c in ids["choices"]] == ["one", "two"]


def test_a_completion_has_sixteen_tokens_by_default(server: Served) -> None:
    assert server.complete("a").json()["usage"]["completion_tokens"] == 16


def test_messages_reach_the_template(server: Served) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}]
    server.client.post("/v1/chat/completions", json={"messages": messages})
    prompt = bytes(server.engine.seen[-1]).decode()
    assert prompt == "<system>be kind\n<user>a\nb\n<assistant>"


def test_sampling_reaches_the_engine(server: Served) -> None:
    server.chat(temperature=0, top_p=0.5, top_k=3, seed=7, presence_penalty=1, frequency_penalty=-1,
                repetition_penalty=1.1, logit_bias={"5": -100}, max_completion_tokens=9, n=2)  # fmt: skip
    first, second = server.engine.samplings[-2:]
    assert (first.temperature, first.top_p, first.top_k, first.max_tokens) == (0, 0.5, 3, 9)
    assert (first.presence_penalty, first.frequency_penalty, first.repetition_penalty) == (1, -1, 1.1)
    assert dict(first.logit_bias) == {5: -100}
    assert (first.seed, second.seed) == (7, 8)


def test_logprobs_cover_exactly_the_text(server: Served) -> None:
    for fields in ({}, {"stop": "東京"}, {"max_tokens": 5}):
        choice = server.chat(logprobs=True, top_logprobs=1, **fields).json()["choices"][0]
        content = choice["logprobs"]["content"]
        ascii_only = [c for c in choice["message"]["content"] if c.isascii()]
        assert [t["token"] for t in content if t["bytes"] is not None] == ascii_only
        assert all(t["logprob"] == -0.5 and len(t["top_logprobs"]) == 1 for t in content)
    _, chunks = server.stream("/v1/chat/completions", messages=HI, logprobs=True, stop="東京")
    tokens = [t["token"] for c in chunks if c["choices"][0]["logprobs"] for t in c["choices"][0]["logprobs"]["content"]]
    whole = server.chat(logprobs=True, stop="東京").json()["choices"][0]["logprobs"]["content"]
    assert tokens == [t["token"] for t in whole]
    text = server.complete("a", logprobs=2, max_tokens=2).json()["choices"][0]["logprobs"]
    assert (text["tokens"], text["token_logprobs"], text["text_offset"]) == (["G", "r"], [-0.5, -0.5], [0, 1])


def test_usage_and_cache_status_tell_the_same(server: Served) -> None:
    cold = server.chat("y" * 100)
    assert cold.headers["cache-status"] == 'stemkv; fwd=miss; detail="cached=0; prompt=118; miss=unseen"'
    assert cold.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    warm = server.chat("y" * 100)
    assert warm.headers["cache-status"] == 'stemkv; hit; detail="cached=112; prompt=118; tier=memory"'
    assert warm.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 112}
    part = server.chat("y" * 60 + "z" * 60)
    assert part.headers["cache-status"].startswith('stemkv; fwd=partial; detail="cached=64; ')
    assert "miss=diverged" in part.headers["cache-status"]
    response, chunks = server.stream(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "y" * 100}],
        stream_options={"include_usage": True},
    )
    assert response.headers["cache-status"] == warm.headers["cache-status"]
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 112}


def test_the_header_is_a_valid_structured_field_whatever_the_detail() -> None:
    lookup = Lookup(10, 5, Miss(Cause.IO_ERROR, 'a "b" \\ ü\n'), ("memory", "file"))
    value = cache_status.header(lookup)
    assert (
        value == 'stemkv; fwd=partial; detail="cached=5; prompt=10; tier=memory+file; miss=io-error:a \\"b\\" \\\\ ??"'
    )
    assert cache_status.header(Lookup(10, 5, None)) == 'stemkv; hit; detail="cached=5; prompt=10"'


def test_models_are_listed_and_found(server: Served, client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "stemkv"
    assert server.client.get("/v1/models/tiny").json()["context_length"] == 4096
    with pytest.raises(openai.NotFoundError, match="does not exist here"):
        client.models.retrieve("org/other")


def test_the_official_client_understands_everything(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}], logprobs=True)
    assert chat.choices[0].message.content == ANSWER
    assert chat.usage is not None
    assert chat.usage.prompt_tokens_details is not None
    stream = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}], stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == ANSWER
    text = client.completions.create(model="tiny", prompt="a", max_tokens=100)
    assert text.choices[0].text == ANSWER
    parts = client.completions.create(model="tiny", prompt="a", max_tokens=100, stream=True)
    assert "".join(chunk.choices[0].text for chunk in parts) == ANSWER
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}], temperature=9)
    assert caught.value.param == "temperature"
