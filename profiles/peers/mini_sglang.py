"""mini-sglang's pattern: the next batch is prepared while the device runs the last.

Four copies of metadata, a gather from the token pool and one from the page table, three copies into
static inputs, a replay, an eager sampler; tokens come back through a copy and an event, and the
scheduler looks at them a step late.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .graph import captured
from .paged import BLOCK_TOKENS, PagedDecoder
from .peer import SteppedPeer, TokenReader, sent

__all__ = ["MiniSglang"]


class MiniSglang(SteppedPeer):
    """Re-implemented from its description, on this library's kernels."""

    name = "mini-sglang's pattern"
    host = "four copies, gathers, three copies, replay, eager sampler, overlapped"
    ahead = 1

    def prepare(self, prompts: Sequence[Sequence[int]], steps: int) -> None:
        rows, length = len(prompts), len(prompts[0]) + steps + 1
        self._start = len(prompts[0]) - 1
        self._decoder: Any = PagedDecoder(self.hosted, rows, length)
        self._decoder.prefill([prompt[:-1] for prompt in prompts])
        with torch.device(self.device):
            self._token_pool = torch.zeros((rows, length + 1), dtype=torch.int32)
            self._input_ids = torch.zeros(rows, dtype=torch.int32)
            self._positions = torch.zeros(rows, dtype=torch.int32)
            # Its kernels store by this; ours find the place by position and table.
            self._out_loc = torch.zeros(rows, dtype=torch.int32)
            within = torch.arange(self._decoder.width * BLOCK_TOKENS, dtype=torch.int32)
        self._token_pool[:, : len(prompts[0])] = torch.tensor(list(prompts), dtype=torch.int32)
        blocks = self._decoder.table[:rows].repeat_interleave(BLOCK_TOKENS, dim=1)
        self._page_table = blocks * BLOCK_TOKENS + within % BLOCK_TOKENS
        vocabulary = self._decoder.model.config.vocab_size
        weight = self._decoder.model.get_input_embeddings().weight
        self._logits = torch.zeros((rows, vocabulary), dtype=weight.dtype, device=self.device)
        self._reader = TokenReader(rows, self.device)
        self.rewind()
        with torch.no_grad():
            self._replay: Any = captured(self._body, self.device)
            for _ in range(2):
                self.step()
                self.tokens()
        self.rewind()

    def _body(self) -> None:
        hidden = self._decoder.hidden(self._input_ids, self._positions)
        self._logits.copy_(self._decoder.logits(hidden))

    def rewind(self) -> None:
        self._lengths = [self._start] * len(self._decoder.blocks)

    @torch.inference_mode()
    def step(self) -> None:
        lengths = self._lengths
        rows = sent(list(range(len(lengths))), torch.int64, self.device)
        places = sent(lengths, torch.int64, self.device)
        positions = sent(lengths, torch.int32, self.device)
        written = sent([length + 1 for length in lengths], torch.int64, self.device)
        ids = self._token_pool[rows, places]
        out_loc = self._page_table[rows, places]
        count = len(lengths)
        self._input_ids[:count].copy_(ids)
        self._positions[:count].copy_(positions)
        self._out_loc[:count].copy_(out_loc)
        self._replay()
        chosen = self._logits[:count].argmax(dim=-1)
        self._token_pool[rows, written] = chosen.to(torch.int32)
        self._reader.send(chosen)
        self._lengths = [length + 1 for length in lengths]

    def tokens(self) -> list[int]:
        return self._reader.read()

    def logits(self) -> Tensor:
        return self._logits

    def close(self) -> None:
        self._decoder = self._replay = self._logits = None  # type: ignore[assignment]
