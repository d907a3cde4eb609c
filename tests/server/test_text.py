"""Whole characters only, and nothing of a stop string, however the text arrives."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemkv.server.text import Detokenizer, StopMatcher

from .harness import byte_tokenizer

TOKENIZER = byte_tokenizer()


def decode(ids: object) -> str:
    return str(TOKENIZER.decode(list(ids), skip_special_tokens=True))  # type: ignore[call-overload]


def expected(text: str, stops: list[str]) -> str:
    """The text up to the stop string that is complete first, found the slow way."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stops if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)]
    return text


def pieces(text: str, cuts: list[int]) -> list[str]:
    at = sorted({0, len(text), *(c % (len(text) + 1) for c in cuts)})
    return [text[a:b] for a, b in pairwise(at)]


small = st.text(alphabet="ab\n", max_size=24)


@given(small, st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=4), st.lists(st.integers(0, 99)))
@settings(max_examples=400, deadline=None)
def test_the_cut_does_not_depend_on_how_the_text_arrives(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher, shown = StopMatcher(stops), ""
    for piece in pieces(text, cuts):
        shown += matcher.feed(piece)
        assert expected(text, stops).startswith(shown), "something was shown that may be part of a stop string"
    shown += matcher.flush()
    assert shown == expected(text, stops)
    assert matcher.stopped == any(s in text for s in stops)


def test_text_that_cannot_be_a_stop_is_shown_at_once() -> None:
    matcher = StopMatcher(["END"])
    assert [matcher.feed(c) for c in "aEbEN"] == ["a", "", "Eb", "", ""]
    assert matcher.feed("!") == "EN!"


@given(st.text(max_size=30), st.text(max_size=6))
@settings(max_examples=200, deadline=None)
def test_streamed_text_equals_decoding_everything_at_once(text: str, prompt: str) -> None:
    ids = list(text.encode())
    stream = Detokenizer(decode, list(prompt.encode()))
    out = [stream.feed(token) for token in ids]
    assert "".join(out) + stream.flush() == text
    assert all("\ufffd" not in piece for piece in out) or "\ufffd" in text


@given(st.lists(st.integers(0, 256), max_size=60))
@settings(max_examples=200, deadline=None)
def test_bytes_that_are_no_text_never_fail_and_never_end_in_half_a_character(ids: list[int]) -> None:
    stream = Detokenizer(decode)
    out = "".join(stream.feed(token) for token in ids) + stream.flush()
    out.encode()  # no lone surrogates
    assert len(out) <= len(ids)


def test_an_unfinished_character_is_held_back_and_then_dropped() -> None:
    stream = Detokenizer(decode)
    assert [stream.feed(b) for b in "a€".encode()[:-1]] == ["a", "", ""]
    assert stream.flush() == ""


def test_a_character_that_the_prompt_left_unfinished_is_shown_with_the_answer() -> None:
    whole = "€".encode()
    stream = Detokenizer(decode, [*b"x", *whole[:1]])
    assert [stream.feed(b) for b in whole[1:]] == ["", "€"]


def test_a_run_of_special_tokens_costs_no_more_than_a_window() -> None:
    lengths = []

    def counted(ids: object) -> str:
        lengths.append(len(list(ids)))  # type: ignore[call-overload]
        return decode(ids)

    stream = Detokenizer(counted)
    for _ in range(500):
        assert stream.feed(256) == ""
    assert max(lengths) < 64
    assert stream.feed(ord("x")) == "x"


@pytest.mark.parametrize("stops", [[], ["\n\n"], ["</s>", "User:"]])
def test_nothing_is_lost_without_a_stop(stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    text = "One line\nanother </ line Use"
    assert "".join(matcher.feed(c) for c in text) + matcher.flush() == text
