"""What is measured: a decoder of SmolLM2-135M's shape, its runtime, and the raw graph beside it."""

from __future__ import annotations

import time
from typing import Any

import torch

from capture import DecodeRuntime, Ladder
from graphcache.models import load_model

__all__ = ["CONTEXT", "RawTwin", "llama_shape", "make_runtime", "smollm2_shape", "two_layers"]

CONTEXT = 1024
"""Tokens that every slot has when a measurement begins."""
MAX_CONTEXT = 4096


def smollm2_shape(device: str) -> Any:
    """A model of SmolLM2-135M's shape with random weights in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    built = LlamaForCausalLM(config).to(device=device, dtype=torch.bfloat16)
    built.generation_config.eos_token_id = None
    built.config.eos_token_id = None
    return load_model(built)


def llama_shape(size: str) -> Any:
    """A model of Llama 3's "1B" or "8B" shape on the GPU, random weights in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shapes: dict[str, dict[str, Any]] = {
        "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
               "num_attention_heads": 32, "head_dim": 64, "tie_word_embeddings": True},
        "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
               "num_attention_heads": 32, "head_dim": 128, "tie_word_embeddings": False},
    }  # fmt: skip
    config = LlamaConfig(
        vocab_size=128256,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_theta=500000.0,
        dtype=torch.bfloat16,
        **shapes[size],
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        # Made where it stays: 16 GB of random numbers take minutes on a CPU.
        with torch.device("cuda"):
            built = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    built.generation_config.eos_token_id = None
    built.config.eos_token_id = None
    return load_model(built)


def two_layers(device: str) -> Any:
    """A model of two small layers with random weights in float32; no token ends an answer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    torch.manual_seed(0)
    built = LlamaForCausalLM(config).to(device)
    built.generation_config.eos_token_id = None
    built.config.eos_token_id = None
    return load_model(built)


def make_runtime(
    model: Any, rows: int, *, context: int = CONTEXT, **options: Any
) -> tuple[DecodeRuntime, list[int]]:
    """A captured runtime of one bucket, with `rows` requests of `context` tokens."""
    runtime = DecodeRuntime(
        model,
        max_requests=rows,
        max_context=min(MAX_CONTEXT, model.max_context),
        ladder=Ladder([rows]),
        block_tokens=64,
        prefill_chunk=context,
        **options,
    )
    runtime.capture(progress=False)
    generator = torch.Generator().manual_seed(rows)
    prompt = torch.randint(0, model.vocab_size, (rows, context + 1), generator=generator).tolist()
    return runtime, [runtime.admit(tokens) for tokens in prompt]


class RawTwin:
    """The same captured step, launched bare through cuda-python: the floor.

    A runtime of its own whose graph is launched behind its back; nothing else uses it.
    """

    def __init__(self, runtime: DecodeRuntime, slots: list[int]) -> None:
        from cuda.bindings import driver

        runtime.step(slots).tokens()
        (bucket,) = runtime._buckets.values()
        captured: Any = bucket.captured
        self._runtime = runtime
        self._slots = slots
        self._exec = captured.exec
        self._stream = driver.CUstream(runtime._backend.stream.cuda_stream)  # type: ignore[attr-defined]
        self._launch = driver.cuGraphLaunch
        self._word = runtime._mailbox._word_view
        self._synchronize = runtime._backend.synchronize

    def launch_ns(self) -> int:
        """Host time of one launch; waits for it outside of the time taken."""
        start = time.perf_counter_ns()
        self._launch(self._exec, self._stream)
        took = time.perf_counter_ns() - start
        self._synchronize()
        return took

    def to_token_ns(self) -> int:
        """From launch to the step's number seen by a polling host."""
        word, before = self._word, self._word[0]
        start = time.perf_counter_ns()
        self._launch(self._exec, self._stream)
        while word[0] == before:
            pass
        return time.perf_counter_ns() - start

    def period_ns(self, count: int) -> int:
        """Back-to-back launches, time for each."""
        self._synchronize()
        start = time.perf_counter_ns()
        for _ in range(count):
            self._launch(self._exec, self._stream)
        self._synchronize()
        return (time.perf_counter_ns() - start) // count

    def rewind(self) -> None:
        """Back to `CONTEXT` tokens, so that every measurement attends to as many."""
        self._synchronize()
        for slot in self._slots:
            self._runtime.rewind(slot, CONTEXT)
