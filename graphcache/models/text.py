"""Text out of tokens as they come, never half a character."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["TextStream"]

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Turns one request's tokens into text that can be printed as it comes.

    A character may be spread over tokens, and a tokenizer may write a token otherwise at the start
    of a text than inside it. So tokens are decoded together with the last ones already given, and
    held while the text ends in the mark of an incomplete character.

    Args:
        decode: ids to text, such as a model's `decode_text`.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._given: list[int] = []
        self._held: list[int] = []

    def put(self, token: int) -> str:
        """Add a token; return the text that it completes, often none.

        Args:
            token: an id, or -1 where the request had finished, which adds nothing.
        """
        if token < 0:
            return ""
        self._held.append(token)
        fresh = self._fresh()
        if fresh.endswith(INCOMPLETE):
            return ""
        return self._give(fresh)

    def end(self) -> str:
        """Return what is still held, complete or not; the stream starts anew."""
        rest = self._fresh()
        self._given, self._held = [], []
        return rest

    def _fresh(self) -> str:
        before = self._decode(self._given) if self._given else ""
        return self._decode(self._given + self._held)[len(before) :]

    def _give(self, fresh: str) -> str:
        # A token without text, such as a special one, stays held: it may be the first part of a
        # character, and dropping the tokens before it would lose their context.
        if fresh:
            self._given, self._held = self._held, []
        return fresh
