"""The ring that a polling host reads: places, numbers, and order of what becomes visible."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from graphcache.errors import SchemaError
from graphcache.ops.publish import _launch, _publish_kernel, publish
from tests.kernel_build import build_for_sm90

DEPTH = 4


def ring(tokens: int, rows: int, device: str = "cpu") -> dict[str, Tensor]:
    pinned = device == "cuda"
    return {
        "counter": torch.zeros(1, dtype=torch.int64, device=device),
        "ring_tokens": torch.full((DEPTH, tokens), -7, dtype=torch.int32, pin_memory=pinned),
        "ring_reasons": torch.full((DEPTH, rows), -7, dtype=torch.int32, pin_memory=pinned),
        "word": torch.zeros(1, dtype=torch.int64, pin_memory=pinned),
    }


def check_steps(write: object, device: str = "cpu") -> None:
    """Ten steps of changing size, each against what a list says the ring must hold."""
    tokens, rows = 6, 3
    made = ring(tokens, rows, device)
    expected = [[-7] * tokens for _ in range(DEPTH)]
    reasons = [[-7] * rows for _ in range(DEPTH)]
    for step in range(1, 11):
        width = 1 + step % tokens
        height = 1 + step % rows
        emitted = [100 * step + i for i in range(width)]
        why = [step % 5] * height
        write(  # type: ignore[operator]
            torch.tensor(emitted, dtype=torch.int32, device=device),
            torch.tensor(why, dtype=torch.int32, device=device),
            *made.values(),
        )
        if device == "cuda":
            torch.cuda.synchronize()
        expected[step % DEPTH][:width] = emitted
        reasons[step % DEPTH][:height] = why
        assert made["ring_tokens"].tolist() == expected
        assert made["ring_reasons"].tolist() == reasons
        assert made["word"].item() == made["counter"].item() == step


def test_each_step_has_its_place() -> None:
    check_steps(publish)


def interpreted_cases() -> None:
    check_steps(_launch)


def test_kernel_under_the_interpreter() -> None:
    code = "from tests.ops.test_publish import interpreted_cases as run; run(); print('done')"
    child = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env={"TRITON_INTERPRET": "1", "PATH": "", "PYTHONPATH": ":".join(sys.path)},
        check=False,
    )
    assert child.stdout.strip() == "done", child.stderr


def test_kernel_builds_for_sm90() -> None:
    signature = {
        "emitted": "*i32", "reasons": "*i32", "counter": "*i64", "ring_tokens": "*i32",
        "ring_reasons": "*i32", "word": "*i64", "tokens": "i32", "rows": "i32",
        "token_stride": "i32", "reason_stride": "i32",
    }  # fmt: skip
    for block, warps in ((32, 1), (256, 4)):
        constants = {"DEPTH": DEPTH, "BLOCK": block, "FENCE": True}
        assert build_for_sm90(_publish_kernel, signature, constants, num_warps=warps)


def test_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    made = ring(2, 1)
    before = [tensor.clone() for tensor in made.values()]
    one = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(SchemaError, match="no room for 3"):
        publish(torch.zeros(3, dtype=torch.int32), one, *made.values())
    with pytest.raises(SchemaError, match="emitted must be"):
        publish(torch.zeros(1, dtype=torch.int64), one, *made.values())
    assert all(torch.equal(a, b) for a, b in zip(before, made.values(), strict=True))


@pytest.mark.gpu
def test_kernel_writes_pinned_memory() -> None:
    check_steps(publish, "cuda")


@pytest.mark.gpu
def test_a_host_that_sees_the_number_sees_the_tokens() -> None:
    """Replays race a polling host; every number seen must come with its own tokens."""
    rows = 200
    made = ring(rows, rows, "cuda")
    emitted = torch.zeros(rows, dtype=torch.int32, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        publish(emitted, emitted, *made.values())
        stream.synchronize()
        for tensor in (made["counter"], made["word"]):
            tensor.zero_()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        emitted.add_(1)
        publish(emitted, emitted, *made.values())
        graph.capture_end()
        word = memoryview(made["word"].numpy())
        tokens = made["ring_tokens"].numpy()
        reasons = made["ring_reasons"].numpy()
        for step in range(1, 2001):
            graph.replay()
            while word[0] < step:
                pass
            assert (tokens[step % DEPTH] == step).all(), step
            assert (reasons[step % DEPTH] == step).all(), step
    graph.reset()
