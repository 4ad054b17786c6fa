"""What the toy decoder must say, from a request's whole history in float64: no pools, no slots."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from tests.toy import ToyDecoder

__all__ = ["TIE", "FullHistory", "RingRows", "Story"]

TIE = 2e-3
"""Logits nearer than this may change places in float32."""


class FullHistory:
    """Attends every token to all that it may see, anew for each question.

    Args:
        toy: whose weights are used, as float64.
    """

    def __init__(self, toy: ToyDecoder) -> None:
        def weight(tensor: torch.Tensor) -> np.ndarray:
            return tensor.cpu().double().numpy()

        self.embedding, self.places, self.head = map(weight, (toy.embedding, toy.places, toy.head))
        self.layers = [{name: weight(w) for name, w in layer.items()} for layer in toy.layers]
        self.windows, self.vocab = toy.windows, toy.vocab
        self.heads, self.kv_heads, self.dim = toy.heads, toy.kv_heads, toy.head_dim

    def logits(self, tokens: list[int]) -> np.ndarray:
        """[len(tokens), vocab]: what follows each token."""
        count = len(tokens)
        place = np.arange(count)
        hidden = self.embedding[tokens] + self.places[:count]
        for weights, window in zip(self.layers, self.windows, strict=True):
            seen = place[None, :] <= place[:, None]
            if window is not None:
                seen &= place[None, :] > place[:, None] - window
            q, k, v = (hidden @ weights[name].T for name in "qkv")
            parts = []
            for head in range(self.heads):
                shared = head // (self.heads // self.kv_heads)
                key, value = (x[:, shared * self.dim : (shared + 1) * self.dim] for x in (k, v))
                query = q[:, head * self.dim : (head + 1) * self.dim]
                score = np.where(seen, query @ key.T / np.sqrt(self.dim), -np.inf)
                weight = np.exp(score - score.max(1, keepdims=True))
                parts.append(weight / weight.sum(1, keepdims=True) @ value)
            hidden = hidden + np.concatenate(parts, axis=1) @ weights["o"].T
        return hidden @ self.head.T

    def next_logits(self, tokens: list[int]) -> np.ndarray:
        """[vocab]: what follows the last token."""
        return self.logits(tokens)[-1]

    def check_greedy(self, tokens: list[int], got: int) -> None:
        """`got` must be the likeliest token after `tokens`; of near-ties, one of them."""
        logits = self.next_logits(tokens)
        best = int(logits.argmax())
        assert 0 <= got < self.vocab and (got == best or logits[got] > logits[best] - TIE), (
            f"after {tokens} came {got}, expected {best}"
        )

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        """The next `count` tokens, each the likeliest."""
        told = list(tokens)
        for _ in range(count):
            told.append(int(self.next_logits(told).argmax()))
        return told[len(tokens) :]


@dataclass
class RingRows:
    """Which position lies in each row of a ring, written down one by one.

    Args:
        rows: of the ring.
        window: tokens that a read sees.
    """

    rows: int
    window: int
    holds: dict[int, int] = field(default_factory=dict)

    def write(self, position: int) -> None:
        """A position takes its row from whatever was there."""
        self.holds[position % self.rows] = position

    def can_go_on_at(self, length: int) -> bool:
        """Whether all that the token at `length` looks back at is there."""
        needed = range(max(0, length - self.window + 1), length)
        return all(self.holds.get(position % self.rows) == position for position in needed)

    def grants(self, length: int, high: int) -> bool:
        """Whether the rule allows a rewind; what it allows must be there."""
        first = max(0, length - self.window + 1)
        granted = first >= length or first >= high - self.rows
        assert not granted or self.can_go_on_at(length), "the rule allows a wrong rewind"
        return granted

    def copy(self) -> RingRows:
        """Rows of their own."""
        return RingRows(self.rows, self.window, dict(self.holds))


@dataclass
class Story:
    """A request as its caller knows it: plain numbers, no state."""

    tokens: list[int] = field(default_factory=list)
    """All of them, the pending one last."""
    length: int = 0
    """Tokens absorbed."""
    high: int = 0
    """One past the highest position ever absorbed."""
    limit: int = 0
    reason: int = 0
    live: bool = False
    max_tokens: int | None = None
    stop: tuple[int, ...] = ()
    rings: list[RingRows] = field(default_factory=list)

    def absorb(self, upto: int) -> None:
        """Take in the tokens before position `upto`."""
        for position in range(self.length, upto):
            for ring in self.rings:
                ring.write(position)
        self.length, self.high = upto, max(self.high, upto)

    def copy(self) -> Story:
        """The same story, to go on differently."""
        return Story(
            list(self.tokens), self.length, self.high, self.limit, self.reason, self.live,
            self.max_tokens, self.stop, [ring.copy() for ring in self.rings],
        )  # fmt: skip
