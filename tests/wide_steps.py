"""Steps of several tokens a slot, drafted and partly accepted, on state without a runtime."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from graphcache import DecodeState, KVLayerSchema
from graphcache.errors import RewindTooFar
from tests.books import poison
from tests.history_oracle import TIE, FullHistory, RingRows, Story
from tests.toy import VOCAB, ToyDecoder

__all__ = ["WideSteps"]

CONTEXT = 96


class WideSteps:
    """A toy decoder's requests, checked after every step against their whole histories.

    Args:
        windows: of the layers.
        q: most tokens of a slot in a step.
        k: how far back a rewind is promised.
        device: of the state.
        schema: makes the layers' schemas.
    """

    def __init__(
        self,
        windows: Sequence[int | None],
        q: int,
        k: int,
        device: torch.device,
        schema: type[KVLayerSchema] = KVLayerSchema,
    ) -> None:
        self.q, self.k = q, k
        self.toy = ToyDecoder(tuple(windows), device)
        self.oracle = FullHistory(self.toy)
        schemas = [
            schema(2, 16, 16, window=window, dtype=torch.float32, step_width=q, rewind=k)
            for window in windows
        ]
        self.state = DecodeState(
            schemas,
            max_requests=3,
            max_context=CONTEXT,
            vocab_size=VOCAB,
            device=device,
            block_tokens=4,
        )
        poison(self.state)
        self.rows = {s.window: s.ring_rows(CONTEXT) for s in schemas if s.window is not None}
        self.stories: dict[int, Story] = {}
        self.promised: dict[int, int | None] = {}

    def admit(self, prompt: list[int]) -> int:
        """A request with its prompt."""
        slot = self.state.open(stop=())
        self.stories[slot] = Story(rings=[RingRows(r, w) for w, r in self.rows.items()])
        self.extend(slot, prompt)
        return slot

    def extend(self, slot: int, tokens: list[int]) -> None:
        """Absorb what is pending and all new tokens but the last, in one chunk."""
        state, story = self.state, self.stories[slot]
        positions = state.append_tokens(slot, tokens)
        if positions:
            self.toy(state.prefill_batch(slot, positions))
            state.absorbed(slot, positions)
        state.complete_prefill(slot)
        story.tokens += tokens
        story.absorb(len(story.tokens) - 1)
        self.promised[slot] = None

    def step(
        self, runs: dict[int, tuple[int, int]], q_len: int, padding: Sequence[int] = ()
    ) -> None:
        """One step of `(tokens, accepted)` by slot; `padding` are indices of empty rows."""
        state = self.state
        requested: list[list[int]] = []
        for slot, (count, accept) in runs.items():
            row, story = state.slots.row_of(slot), self.stories[slot]
            drafts = self.oracle.greedy(story.tokens, count)[: count - 1]
            for wrong in range(max(0, accept - 1), count - 1):
                drafts[wrong] = (drafts[wrong] + 1 + wrong) % VOCAB
            start = story.length + 1
            state.tokens[row, start : start + len(drafts)] = self._ints(drafts)
            story.tokens += drafts
            requested.append([row] * count + [-1] * (q_len - count))
        accepts = [accept for _, accept in runs.values()]
        for index in padding:
            requested.insert(index, [-1] * q_len)
            accepts.insert(index, q_len)
        asked = self._ints([slot for row in requested for slot in row])
        batch = state.begin(asked, q_len)
        logits = self.toy(batch)
        sampled = logits.argmax(-1).int()
        emitted, _ = state.advance(sampled, batch, asked, self._ints(accepts))
        lines = [index for index, row in enumerate(requested) if row[0] >= 0]
        for line, (slot, (count, accept)) in zip(lines, runs.items(), strict=True):
            here = slice(line * q_len, line * q_len + count)
            self._hear(slot, count, accept, logits[here], emitted[here].tolist())
        silent = [t for t, slot in enumerate(asked.tolist()) if slot < 0]
        assert emitted[silent].tolist() == [-1] * len(silent)

    def rewind(self, slot: int, length: int) -> bool:
        """Granted or refused by the rule; what was promised must be granted."""
        story, promised = self.stories[slot], self.promised[slot]
        grants = [ring.grants(length, story.high) for ring in story.rings]
        granted = all(grants)
        if promised is not None and length >= promised:
            assert granted, "a promised rewind was refused"
        try:
            self.state.rewind(slot, length)
        except RewindTooFar:
            assert not granted, "a rewind was refused that the rule allows"
            return False
        assert granted, "a rewind was granted that the rule refuses"
        story.length, story.tokens = length, story.tokens[: length + 1]
        self.promised[slot] = None
        return True

    def _hear(self, slot: int, count: int, accept: int, logits: Tensor, emitted: list[int]) -> None:
        story = self.stories[slot]
        start = story.length
        expected = self.oracle.logits(story.tokens)[start:]
        close = np.allclose(logits.cpu().numpy(), expected, atol=TIE / 4)
        assert close, f"a read was wrong at position {start} or the {count - 1} after it"
        told = story.tokens[: start + 1]
        for column, token in enumerate(emitted):
            if column < accept:
                self.oracle.check_greedy(told, token)
                told.append(token)
            else:
                assert token == -1
        higher = start + count > story.high
        story.absorb(start + count)
        story.length, story.tokens = start + accept, told
        self.promised[slot] = max(0, story.length - self.k) if higher and accept else None
        row = self.state.slots.row_of(slot)
        assert int(self.state.len[row]) == story.length
        assert int(self.state.high[row]) == story.high

    def _ints(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.state.device)
