"""The promise, end to end: ``stemkv serve smollm2``, killed and restarted, answers from what it had computed."""

from __future__ import annotations

import signal
from pathlib import Path

import openai
import pytest

from .process import Process

pytestmark = pytest.mark.model

RULES = " ".join(f"Rule {i}: a parcel of class {i} is delivered within {i + 2} days." for i in range(60))
QUESTION = "How long does a parcel of class 7 take?"


def ask(server: Process, rules: str = RULES, question: str = QUESTION) -> tuple[str, int, int, str]:
    """The answer, prompt tokens, cached tokens and the Cache-Status header, by OpenAI's own client."""
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none") as client:
        raw = client.chat.completions.with_raw_response.create(
            model="smollm2",
            messages=[{"role": "system", "content": rules}, {"role": "user", "content": question}],
            max_tokens=16,
            temperature=0,
        )
    answer = raw.parse()
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    cached = answer.usage.prompt_tokens_details.cached_tokens or 0
    return answer.choices[0].message.content or "", answer.usage.prompt_tokens, cached, raw.headers["cache-status"]


def streamed(server: Process) -> tuple[str, int]:
    """The answer of a stream, and its cached tokens."""
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none") as client:
        chunks = list(
            client.chat.completions.create(
                model="smollm2",
                messages=[{"role": "system", "content": RULES}, {"role": "user", "content": QUESTION}],
                max_tokens=16,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    return text, usage.prompt_tokens_details.cached_tokens or 0


def test_a_prompt_is_computed_once_and_survives_kill_and_restart(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Process("smollm2", store) as server:
        answer, prompt, cached, status = ask(server)
        assert (cached, status.split(";")[1].strip()) == (0, "fwd=miss")
        whole = (prompt - 1) // 64 * 64
        assert whole > 1000
        warm, _, cached, status = ask(server)
        assert cached == whole
        assert "tier=memory" in status
        assert streamed(server) == (warm, whole)
        _, _, cached, status = ask(server, question="And class 9?")
        assert whole - 192 <= cached <= whole
        assert server.stored()
        server.signal(signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL

    with Process("smollm2", store) as server:
        again, _, cached, status = ask(server)
        assert (again, cached) == (warm, whole)
        assert "tier=file" in status
        assert answer, "cold and warm may differ in a near-tie, but there is an answer"
        other = RULES.replace("parcel", "letter")
        _, prompt, cached, _ = ask(server, other)
        assert cached < 64
        server.signal(signal.SIGTERM)  # at once: nothing of the prompt may be lost
        assert server.wait() == 0
        assert "everything computed is stored" in server.output()[1]

    with Process("smollm2", store) as server:
        _, prompt, cached, status = ask(server, other)
        assert cached == (prompt - 1) // 64 * 64
        assert "tier=file" in status
