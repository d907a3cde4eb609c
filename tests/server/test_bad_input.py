"""Bad input gets one sentence in OpenAI's shape, and never a 500."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stemkv.server import app
from stemkv.server.openai_api import ChatRequest, CompletionRequest

from .harness import FakeEngine, Served, byte_tokenizer, served

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(FakeEngine(lambda _: "ok", context_length=200), max_queue=64) as handle:
        yield handle


def problem(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object, checked for its shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].rstrip()[-1] in ".?", "one sentence"
    assert "Traceback" not in error["message"]
    assert len(error["message"]) < 400
    return error


FIELDS: list[tuple[dict[str, Any], str, str]] = [
    # chat body, param, what the sentence names
    ({"messages": HI, "temperatur": 1}, "temperatur", "Unknown parameter 'temperatur'"),
    ({"messages": HI, "maxTokens": 1}, "maxTokens", "did you mean 'max_tokens'?"),
    ({"messages": HI, "x" * 500: 1}, "x" * 80, "Unknown parameter"),
    ({"messages": HI, "tools": [{"type": "function"}]}, "tools", "'tools' is not supported"),
    ({"messages": HI, "tool_choice": "required"}, "tool_choice", "not supported"),
    ({"messages": HI, "cache_salt": "x" * 257}, "cache_salt", "256"),
    ({"messages": HI, "reasoning_effort": "low"}, "reasoning_effort", "not supported"),
    ({"messages": HI, "response_format": {"type": "json_object"}}, "response_format.type", "json_object"),
    ({"messages": HI, "response_format": {"type": "text", "x": 1}}, "response_format.x", "response_format.x"),
    ({"messages": HI, "temperature": "hot"}, "temperature", "'hot'"),
    ({"messages": HI, "temperature": 2.5}, "temperature", "2.5"),
    ({"messages": HI, "temperature": -1}, "temperature", "-1"),
    ({"messages": HI, "temperature": True}, "temperature", "got `bool`"),
    ({"messages": HI, "top_p": 0}, "top_p", "> 0"),
    ({"messages": HI, "top_k": -1}, "top_k", ">= 0"),
    ({"messages": HI, "max_tokens": 0}, "max_tokens", ">= 1"),
    ({"messages": HI, "max_tokens": 1.5}, "max_tokens", "got `float`"),
    ({"messages": HI, "max_tokens": 10**30}, "max_tokens", "<="),
    ({"messages": HI, "max_tokens": 5, "max_completion_tokens": 5}, "max_tokens", "one of them"),
    ({"messages": HI, "n": 0}, "n", ">= 1"),
    ({"messages": HI, "n": 1000}, "n", "<= 128"),
    ({"messages": HI, "seed": "x"}, "seed", "got `str`"),
    ({"messages": HI, "seed": 2**64}, "seed", "<="),
    ({"messages": HI, "stop": ["a", "b", "c", "d", "e"]}, "stop", "length <= 4"),
    ({"messages": HI, "stop": [1]}, "stop[0]", "got `int`"),
    ({"messages": HI, "stop": ""}, "stop", "empty"),
    ({"messages": HI, "stop": ["a", ""]}, "stop", "empty"),
    ({"messages": HI, "stop": "x" * 513}, "stop", "512"),
    ({"messages": HI, "presence_penalty": 3}, "presence_penalty", "<= 2"),
    ({"messages": HI, "repetition_penalty": 0}, "repetition_penalty", "> 0"),
    ({"messages": HI, "logit_bias": {"5": 101}}, "logit_bias[...]", "<= 100"),
    ({"messages": HI, "logit_bias": {"257": 1}}, "logit_bias", "'257' is not a token id of 0 to 256"),
    ({"messages": HI, "logit_bias": {"-1": 1}}, "logit_bias", "'-1'"),
    ({"messages": HI, "logit_bias": [1]}, "logit_bias", "object"),
    ({"messages": HI, "logprobs": 2}, "logprobs", "bool"),
    ({"messages": HI, "top_logprobs": 2}, "top_logprobs", "needs 'logprobs'"),
    ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "<= 20"),
    ({"messages": HI, "stream": "yes"}, "stream", "bool"),
    ({"messages": HI, "stream_options": {"include_usage": True}}, "stream_options", "needs 'stream'"),
    ({"messages": HI, "stream": True, "stream_options": {"x": 1}}, "stream_options.x", "stream_options.x"),
    ({}, "messages", "Missing required parameter 'messages'"),
    ({"messages": None}, "messages", "Missing required parameter 'messages'"),
    ({"messages": []}, "messages", "length >= 1"),
    ({"messages": "Hi"}, "messages", "expected `array`"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "messages[0].role"),
    ({"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role", "bot"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "got `int`"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type", "image_url"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "string"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls", "tool_calls"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "no tools here"),
]


@pytest.mark.parametrize(
    ("body", "param", "named"), FIELDS, ids=[f"{p[:20]}-{i}" for i, (_, p, _) in enumerate(FIELDS)]
)
def test_a_bad_field_of_a_chat_is_named(server: Served, body: dict[str, Any], param: str, named: str) -> None:
    error = problem(server.client.post(CHAT, json=body), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert named in error["message"]


@pytest.mark.parametrize(
    ("body", "param", "named"),
    [
        ({}, "prompt", "Missing required parameter 'prompt'"),
        ({"prompt": 5}, "prompt", "got `int`"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": ["a", 1]}, "prompt", "mixes"),
        ({"prompt": [1, 999]}, "prompt", "999"),
        ({"prompt": [[1], [-1]]}, "prompt[1]", "-1"),
        ({"prompt": [[1, "a"]]}, "prompt[0][1]", "got `str`"),
        ({"prompt": ["a"] * 100, "n": 2}, "n", "128"),
        ({"prompt": "a", "messages": HI}, "messages", "Unknown parameter 'messages'"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
        ({"prompt": "a", "best_of": 2}, "best_of", "not supported"),
        ({"prompt": "a", "logprobs": 6}, "logprobs", "<= 5"),
        ({"prompt": "a", "logprobs": True}, "logprobs", "bool"),
        ({"prompt": "a", "logprobs": 1, "echo": True}, "logprobs", "echo"),
    ],
)
def test_a_bad_field_of_a_completion_is_named(server: Served, body: dict[str, Any], param: str, named: str) -> None:
    error = problem(server.client.post(TEXT, json=body), 400)
    assert error["param"] == param
    assert named in error["message"]


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[1]", b'"x"', b"null", b"\xff\xfe", b'{"prompt": "\\ud800"}', b'{"prompt": NaN}', b"[" * 100_000,
     b'{"temperature": 1e999}', b'{"prompt": "a"} x', b'{"temperature": 1' + b"0" * 5000 + b"}"],
    ids=range(12),
)  # fmt: skip
def test_a_body_that_is_no_json_object_is_400(server: Served, raw: bytes) -> None:
    headers = {"content-type": "application/json"}
    problem(server.client.post(TEXT, content=raw, headers=headers), 400)


def test_a_prompt_longer_than_the_context_names_both_numbers(server: Served) -> None:
    error = problem(server.complete("x" * 300), 400)
    assert error["code"] == "context_length_exceeded"
    assert "300 tokens" in error["message"]
    assert "200" in error["message"]
    error = problem(server.complete("x" * 200_000), 400)
    assert error["code"] == "context_length_exceeded"
    assert "200000 characters" in error["message"]
    error = problem(server.complete("x" * 150, max_tokens=51), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert "at most 50" in error["message"]
    assert server.complete("x" * 150, max_tokens=50).status_code == 200
    error = problem(server.chat("x" * 150, max_completion_tokens=100), 400)
    assert error["param"] == "max_completion_tokens"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("OPTIONS", TEXT, 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1", 404, "not_found"),
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("GET", "/v1/chat/completions/", 404, "not_found"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
    ],
)
def test_wrong_methods_and_paths(server: Served, method: str, path: str, status: int, code: str) -> None:
    response = server.client.request(method, path)
    assert problem(response, status)["code"] == code
    if status == 405:
        assert response.headers["allow"]


def test_an_unknown_model_is_404(server: Served) -> None:
    error = problem(server.chat(model="gpt-9"), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "'gpt-9'" in error["message"]
    assert "'tiny'" in error["message"]
    assert server.chat(model="tiny").status_code == 200


def test_only_json_is_taken(server: Served) -> None:
    """Other content types can be sent by any web page, without the browser asking first."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        error = problem(server.client.post(TEXT, content=b'{"prompt": "a"}', headers={"content-type": kind}), 415)
        assert "application/json" in error["message"]
    good = server.client.post(
        TEXT, content=b'{"prompt": "a"}', headers={"content-type": "Application/JSON; charset=utf-8"}
    )
    assert good.status_code == 200


def test_a_body_too_large_is_413(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MAX_BODY_BYTES", 1000)
    assert "1000 bytes" in problem(server.complete("x" * 1001), 413)["message"]

    def pieces() -> Iterator[bytes]:
        for _ in range(20):
            yield b"x" * 100

    with httpx.Client(base_url=server.address) as client:
        problem(client.post(TEXT, content=pieces(), headers={"content-type": "application/json"}), 413)


def test_null_means_left_out_and_harmless_values_pass(server: Served) -> None:
    nulls: dict[str, Any] = dict.fromkeys(("temperature", "stop", "seed", "tools", "response_format", "stream_options"))
    harmless: dict[str, Any] = {
        "tools": [], "store": False, "service_tier": "auto", "parallel_tool_calls": True, "tool_choice": "none",
        "user": "u", "metadata": {"a": "b"}, "prompt_cache_key": "k", "cache_salt": "",
    }  # fmt: skip
    assert server.chat(**nulls).status_code == 200
    assert server.chat(**harmless).status_code == 200


def test_a_model_without_a_chat_template_says_so() -> None:
    with served(FakeEngine(lambda _: "ok"), tokenizer=byte_tokenizer(template=None)) as handle:
        error = problem(handle.chat(), 400)
        assert error["code"] == "no_chat_template"
        assert "/v1/completions" in error["message"]


# -- fuzz ------------------------------------------------------------------------------------------------------

NAMES = sorted(
    {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, "tools", "role", "type", "zzz"} - {"stream"}
)
leaf = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-3, 5), st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8), st.sampled_from(["user", "text", "tiny", "system", "0", "1", "\x00", "\U0001f600"]),
)  # fmt: skip
value = st.recursive(
    leaf,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.one_of(st.sampled_from([*NAMES, "content", "text"]), st.text(max_size=4)), inner, max_size=3
        ),
    ),
    max_leaves=8,
)
message = st.fixed_dictionaries(
    {"role": st.one_of(st.sampled_from(["user", "system", "assistant", "tool"]), leaf), "content": value},
    optional={"name": leaf, "tool_calls": value},
)
body = st.one_of(
    value,
    st.dictionaries(st.sampled_from(NAMES), value, max_size=4),
    st.builds(
        lambda prompt, messages, rest: {**rest, **prompt, **messages},
        st.one_of(st.just({}), st.fixed_dictionaries({"prompt": value}), st.just({"prompt": "a"})),
        st.one_of(st.just({}), st.fixed_dictionaries({"messages": st.lists(message, max_size=3)})),
        st.dictionaries(st.sampled_from(NAMES), leaf, max_size=3),
    ),
)


@given(st.sampled_from([CHAT, TEXT]), body)
@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_json_body_is_ever_a_500(server: Served, path: str, content: Any) -> None:
    raw = json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogatepass")
    response = server.client.post(path, content=raw, headers={"content-type": "application/json"})
    assert response.status_code in {200, 400, 404}, response.text
    if response.status_code != 200:
        problem(response, response.status_code)


@given(st.sampled_from([CHAT, TEXT]), st.binary(max_size=60))
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_bytes_are_ever_a_500(server: Served, path: str, raw: bytes) -> None:
    response = server.client.post(path, content=raw, headers={"content-type": "application/json"})
    assert response.status_code == 400
