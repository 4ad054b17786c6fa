"""nano-vllm's pattern: metadata built from Python lists and copied anew for every step.

Six pinned tensors and copies, slices of them copied into static inputs after fills, a replay of the
model's body, head and sampler eager, a blocking `.tolist()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .graph import captured
from .paged import BLOCK_TOKENS, PagedDecoder
from .peer import SteppedPeer, sent

__all__ = ["NanoVllm"]


@dataclass
class _Sequence:
    """What the scheduler knows of a request."""

    last_token: int
    length: int
    blocks: list[int]
    temperature: float = 0.0


def _sample(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Greedy where the temperature is 0, else by the exponential trick."""
    logits = logits.float()
    greedy = logits.argmax(dim=-1)
    scaled = logits / temperatures.clamp_min(1e-10).unsqueeze(1)
    weights = torch.softmax(scaled, dim=-1)
    drawn = (weights / torch.empty_like(weights).exponential_(1).clamp_min_(1e-10)).argmax(dim=-1)
    return torch.where(temperatures == 0, greedy, drawn)


class NanoVllm(SteppedPeer):
    """Re-implemented from its description, on this library's kernels."""

    name = "nano-vllm's pattern"
    host = "six pinned tensors and copies, slice copies, fills, replay, eager head and sampler"

    def prepare(self, prompts: Sequence[Sequence[int]], steps: int) -> None:
        rows = len(prompts)
        self._prompts = prompts
        self._decoder: Any = PagedDecoder(self.hosted, rows, len(prompts[0]) + steps + 1)
        self._decoder.prefill([prompt[:-1] for prompt in prompts])
        with torch.device(self.device):
            self._input_ids = torch.zeros(rows, dtype=torch.int64)
            self._positions = torch.zeros(rows, dtype=torch.int32)
            # Its kernels find a token's place by these two; ours find it by position and table.
            self._slot_mapping = torch.zeros(rows, dtype=torch.int32)
            self._context_lens = torch.zeros(rows, dtype=torch.int32)
        self._hidden = torch.zeros_like(
            self._decoder.model.get_input_embeddings().weight[:1]
        ).repeat(rows, 1)
        compiles = self.device.type == "cuda"
        self._draw: Any = torch.compile(_sample, dynamic=False) if compiles else _sample
        self.rewind()
        with torch.no_grad():
            self._replay: Any = captured(self._body, self.device)
            for _ in range(2):
                self.step()
                self.tokens()
        self.rewind()

    def _body(self) -> None:
        self._hidden.copy_(self._decoder.hidden(self._input_ids, self._positions))

    def rewind(self) -> None:
        blocks = self._decoder.blocks
        self._sequences = [
            _Sequence(prompt[-1], len(prompt), blocks[row])
            for row, prompt in enumerate(self._prompts)
        ]

    @torch.inference_mode()
    def step(self) -> None:
        sequences = self._sequences
        input_ids, positions, slot_mapping, context_lens = [], [], [], []
        for sequence in sequences:
            last = sequence.length - 1
            input_ids.append(sequence.last_token)
            positions.append(last)
            context_lens.append(sequence.length)
            block = sequence.blocks[last // BLOCK_TOKENS]
            slot_mapping.append(block * BLOCK_TOKENS + last % BLOCK_TOKENS)
        used = max(-(-sequence.length // BLOCK_TOKENS) for sequence in sequences)
        tables = [sequence.blocks[:used] for sequence in sequences]
        ids = sent(input_ids, torch.int64, self.device)
        places = sent(positions, torch.int32, self.device)
        slots = sent(slot_mapping, torch.int32, self.device)
        lengths = sent(context_lens, torch.int32, self.device)
        blocks = sent(tables, torch.int32, self.device)
        rows = len(sequences)
        self._input_ids[:rows] = ids
        self._positions[:rows] = places
        self._slot_mapping.fill_(-1)
        self._slot_mapping[:rows] = slots
        self._context_lens.zero_()
        self._context_lens[:rows] = lengths
        self._decoder.table[:rows, :used] = blocks
        self._replay()
        self._logits = self._decoder.logits(self._hidden[:rows])
        asked = [sequence.temperature for sequence in sequences]
        temperatures = sent(asked, torch.float32, self.device)
        self._sampled = self._draw(self._logits, temperatures)

    def tokens(self) -> list[int]:
        tokens: list[int] = self._sampled.tolist()
        for sequence, token in zip(self._sequences, tokens, strict=True):
            sequence.last_token = token
            sequence.length += 1
        return tokens

    def logits(self) -> Tensor:
        logits: Tensor = self._logits
        return logits

    def close(self) -> None:
        self._decoder = self._replay = self._hidden = None  # type: ignore[assignment]
