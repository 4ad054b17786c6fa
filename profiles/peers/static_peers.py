"""Peers over a static cache: eager, make_graphed_callables, and gpt-fast's pattern."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .peer import PeerUnavailable, SteppedPeer, TokenReader
from .static import StaticDecoder

__all__ = ["Eager", "GptFast", "GraphedCallables"]

Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

WARM_UPS = 4


class _StaticPeer(SteppedPeer):
    """Tokens are carried on the device and read a step late, as in all that run ahead."""

    ahead = 1

    def prepare(self, prompts: Sequence[Sequence[int]], steps: int) -> None:
        absorbed = [list(prompt[:-1]) for prompt in prompts]
        self._start = len(absorbed[0])
        # As long as the work asks for: every step reads all of it.
        length = -(-(self._start + steps + WARM_UPS + 1) // 64) * 64
        self._decoder: Any = StaticDecoder(self.hosted, len(prompts), length)
        self._decoder.prefill(absorbed)
        self._pending = torch.tensor([[prompt[-1]] for prompt in prompts], device=self.device)
        self._reader = TokenReader(len(prompts), self.device)
        self.rewind()
        with torch.no_grad():
            self._run: Step = self._made(self._decoder.step)
        for _ in range(WARM_UPS):
            self.step()
            self.tokens()
        self.rewind()

    @abstractmethod
    def _made(self, step: Step) -> Step:
        """The step as this peer runs it."""

    def rewind(self) -> None:
        self._tokens = self._pending.clone()
        self._position = torch.tensor([self._start], device=self.device)

    @torch.no_grad()
    def step(self) -> None:
        chosen, self._logits = self._run(self._tokens, self._position)
        # What a graph returned is overwritten by its next run.
        self._tokens = chosen.clone()
        self._position += 1
        self._reader.send(self._tokens[:, 0])

    def tokens(self) -> list[int]:
        return self._reader.read()

    def logits(self) -> Tensor:
        return self._logits

    def close(self) -> None:
        self._decoder = self._run = self._logits = None  # type: ignore[assignment]


class Eager(_StaticPeer):
    """Every operation launched by Python."""

    name = "eager torch"
    host = "dispatches every operation"

    def _made(self, step: Step) -> Step:
        return step


class GraphedCallables(_StaticPeer):
    """The step through `torch.cuda.make_graphed_callables`."""

    name = "make_graphed_callables"
    host = "flattens, compares pointers, copies each argument, wraps autograd"

    def _made(self, step: Step) -> Step:
        if self.device.type != "cuda":
            return step
        made: Any = torch.cuda.make_graphed_callables(
            step, (self._tokens.clone(), self._position.clone())
        )
        run: Step = made
        return run


class GptFast(_StaticPeer):
    """gpt-fast's pattern: forward and sampling in one compiled function, its graph torch's own."""

    name = "gpt-fast's pattern"
    host = "guards, tree checks, clones; sampling compiled in"
    compiles = True

    def _made(self, step: Step) -> Step:
        if self.device.type != "cuda":
            return step
        try:
            made: Any = torch.compile(step, mode="reduce-overhead", fullgraph=True, dynamic=False)
            made(self._tokens, self._position)
        except Exception as error:  # the compiler's errors have no common base
            raise PeerUnavailable(
                f"torch.compile failed: {type(error).__name__}: {error}"
            ) from error

        def run(tokens: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
            torch.compiler.cudagraph_mark_step_begin()
            result: tuple[Tensor, Tensor] = made(tokens, position)
            return result

        return run

    def close(self) -> None:
        super().close()
        torch.compiler.reset()
