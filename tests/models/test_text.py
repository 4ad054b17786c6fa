"""Streamed text equals the whole text, and is never cut within a character."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphcache.models import TextStream


def _bytes_to_text(ids: list[int]) -> str:
    """Byte-level decoding: every id is a byte, ids from 256 on are special and have no text."""
    return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


def _fallback_to_text(ids: list[int]) -> str:
    """Byte fallback: a run of bytes that isn't UTF-8 as a whole becomes a mark for each byte."""
    run = bytes(ids)
    try:
        return run.decode("utf-8")
    except UnicodeDecodeError:
        return "\N{REPLACEMENT CHARACTER}" * len(run)


def _words_to_text(ids: list[int]) -> str:
    """A tokenizer that writes a space before each word but the first."""
    return " ".join(f"w{i}" for i in ids)


@given(st.text(), st.lists(st.integers(0, 40)))
def test_pieces_are_whole_and_add_up(text: str, specials: list[int]) -> None:
    ids: list[int] = list(text.encode())
    for place in specials:
        ids.insert(min(place, len(ids)), 300)
    stream = TextStream(_bytes_to_text)
    pieces = [stream.put(token) for token in ids]
    assert "".join(pieces) + stream.end() == text
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@pytest.mark.parametrize("decode", [_bytes_to_text, _fallback_to_text])
def test_an_emoji_comes_with_its_last_byte(decode: object) -> None:
    stream = TextStream(decode)  # type: ignore[arg-type]
    pieces = [stream.put(byte) for byte in "a😀😁é".encode()]
    assert pieces == ["a", "", "", "", "😀", "", "", "", "😁", "", "é"]
    assert stream.end() == ""


def test_context_before_a_token_is_kept() -> None:
    stream = TextStream(_words_to_text)
    assert [stream.put(token) for token in (1, 2, 3)] == ["w1", " w2", " w3"]


def test_the_end_gives_what_was_held_and_starts_anew() -> None:
    stream = TextStream(_bytes_to_text)
    assert stream.put(0xF0) == ""
    assert stream.end() == "\N{REPLACEMENT CHARACTER}"
    assert stream.put(ord("x")) == "x"


def test_a_finished_request_adds_nothing() -> None:
    stream = TextStream(_bytes_to_text)
    assert stream.put(-1) == ""
    assert stream.put(ord("x")) == "x"


def test_only_a_few_tokens_are_decoded_at_once() -> None:
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return _bytes_to_text(ids)

    stream = TextStream(decode)
    for byte in ("ab😀" * 200).encode():
        stream.put(byte)
    assert longest <= 8
