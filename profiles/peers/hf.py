"""transformers' own loops: `generate` over a static cache, and continuous batching."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from .peer import Decoded, Peer, PeerUnavailable, periods
from .weights import plain_model

__all__ = ["ContinuousBatching", "Generate"]

TIMEOUT_S = 120.0


class _Stamps:
    """A streamer: it is handed the prompt, then the tokens of each step, on the host."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = []
        self.stamps: list[int] = []
        self._prompt = True

    def put(self, tokens: Any) -> None:
        if self._prompt:
            self._prompt = False
            return
        self.tokens.append(tokens.tolist())
        self.stamps.append(time.perf_counter_ns())

    def end(self) -> None:
        pass


class Generate(Peer):
    """`generate` with a static cache, which it compiles its forward for on a GPU."""

    name = "HF generate"
    host = "prepares inputs, copies logits, runs Python processors; static cache, compiled"
    compiles = True

    def prepare(self, prompts: Sequence[Sequence[int]], steps: int) -> None:
        self._model: Any = plain_model(self.hosted)
        self._prompts = torch.tensor(list(prompts), device=self.device)
        self._steps = steps
        # The first run compiles, the second captures; the cache keeps its size and place.
        # A batch of another size, seen before, is no reason to compile for all sizes.
        with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
            for _ in range(2):
                self.decode(steps)

    @torch.no_grad()
    def decode(self, steps: int) -> Decoded:
        if steps > self._steps:
            raise ValueError(f"prepared for {self._steps} steps, asked for {steps}")
        stamps = _Stamps()
        self._model.generate(
            self._prompts,
            attention_mask=torch.ones_like(self._prompts),
            max_new_tokens=steps,
            min_new_tokens=steps,
            do_sample=False,
            pad_token_id=0,
            cache_implementation="static",
            streamer=stamps,
        )
        return Decoded(stamps.tokens, periods(stamps.stamps))

    def close(self) -> None:
        self._model = None
        torch.compiler.reset()


class ContinuousBatching(Peer):
    """Continuous batching with its graphs on and sized to the work, its manager kept."""

    name = "HF continuous batching"
    host = "schedules, bulk copies of block tables; sampling in the graph, double buffered"

    _manager: Any = None

    def prepare(self, prompts: Sequence[Sequence[int]], steps: int) -> None:
        try:
            from transformers import ContinuousBatchingConfig, GenerationConfig
        except ImportError as error:
            raise PeerUnavailable(
                f"this transformers has no continuous batching: {error}"
            ) from None
        if self.device.type != "cuda":
            raise PeerUnavailable("its cache and its graphs need a GPU")
        self._prompts = [list(prompt) for prompt in prompts]
        model = plain_model(self.hosted)
        block = 256
        blocks = len(prompts) * (-(-(len(prompts[0]) + steps + 1) // block) + 1)
        self._manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(
                block_size=block,
                num_blocks=blocks,
                # Its warm-up asks for a batch as large as this and for as much in the cache.
                max_batch_tokens=max(len(prompts), min(2048, blocks * block // 2)),
                max_requests_per_batch=len(prompts),
                # Every run decodes the same prompts; blocks kept of the last would skip a prefill.
                allow_block_sharing=False,
                use_cuda_graph=True,
                use_async_batching=True,
            ),
        )
        self._manager.warmup()
        self._manager.start()
        self.decode(steps)

    def decode(self, steps: int) -> Decoded:
        requests = [
            self._manager.add_request(prompt, max_new_tokens=steps, record_timestamps=True)
            for prompt in self._prompts
        ]
        waiting: dict[str, Any] = dict.fromkeys(requests)
        deadline = time.monotonic() + TIMEOUT_S
        while any(output is None for output in waiting.values()):
            if time.monotonic() > deadline:
                raise PeerUnavailable(f"gave no answer within {TIMEOUT_S:.0f} s")
            output = self._manager.get_result(timeout=1.0)
            if output is None:
                if not self._manager.is_running():
                    raise PeerUnavailable("its thread ended; what it logged says why")
                continue
            if output.error:
                raise PeerUnavailable(f"a request failed: {output.error}")
            if output.is_finished():
                waiting[output.request_id] = output
        outputs = [waiting[request] for request in requests]
        tokens = [list(row) for row in zip(*(o.generated_tokens for o in outputs), strict=True)]
        # Prefills of later prompts run between steps of earlier ones: from where all decode.
        last = outputs[-1].timestamps
        return Decoded(tokens, periods([round(stamp * 1e9) for stamp in last]))

    def close(self) -> None:
        if self._manager is not None:
            self._manager.stop(block=True, timeout=10.0)
            self._manager.destroy()
