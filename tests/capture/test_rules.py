"""Every rule has a section in the docs: its wrong code is refused by it, its right code passes."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from capture import CaptureError
from capture.backend import choose_backend
from capture.lint import Lint
from capture.rules import PAGE, Rule
from graphcache import Batch, DecodeState, KVLayerSchema
from graphcache.ops._triton import jit, tl

TEXT = (Path(__file__).parents[2] / PAGE).read_text()
SECTION = re.compile(
    r"^## ([a-z-]+)\n.*?Wrong:\n\n```python\n(.*?)```\n\nRight:\n\n```python\n(.*?)```",
    re.MULTILINE | re.DOTALL,
)
SECTIONS = {name: (wrong, right) for name, wrong, right in SECTION.findall(TEXT)}
# Right code that only a GPU can run.
ON_GPU = (Rule.OTHER_STREAM, Rule.UNSEEN_KERNEL)


@jit
def _add(y, x, n: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, n)
    tl.store(y + at, tl.load(y + at) + tl.load(x + at))


def names(device: str) -> dict[str, Any]:
    """What the page says its examples have."""
    given: dict[str, Any] = {
        "x": torch.ones(4, 8),
        "y": torch.zeros(4, 8),
        "m": torch.ones(4, 8, dtype=torch.bool),
        "i": torch.arange(4),
        "slots": torch.full((4,), -1, dtype=torch.int32),
    }
    given = {name: tensor.to(device) for name, tensor in given.items()}
    side = torch.cuda.Stream() if device == "cuda" else None
    schema = KVLayerSchema(2, 16, 16, dtype=torch.float32)
    state = DecodeState([schema], max_requests=4, max_context=8, vocab_size=9, device=device)
    zeros = torch.zeros(4, dtype=torch.int32, device=device)
    given |= {
        "batch": Batch(given["slots"], zeros, zeros, 1, state),
        "layer": state.layers[0],
        "replace": replace,
        **{name: torch.ones(4, 2, 16, device=device) for name in "qkv"},
    }
    return {**given, "torch": torch, "random": random, "kernel": _add, "side": side}


def run(code: str, **options: Any) -> None:
    compiled = compile(code, "docs", "exec")
    given = names("cpu")
    with torch.no_grad(), Lint(values=True, **options):
        exec(compiled, given)


def anchor(rule: Rule) -> str:
    return rule.section.split("#")[1]


def test_every_rule_has_a_section_and_every_section_a_rule() -> None:
    assert {anchor(rule) for rule in Rule} == set(SECTIONS) == set(re.findall(r"## (\S+)", TEXT))


@pytest.mark.parametrize("rule", Rule)
def test_wrong_code_is_refused_by_the_rule_and_names_its_section(rule: Rule) -> None:
    options = {"recorded": lambda: False} if rule is Rule.OTHER_STREAM else {}
    with pytest.raises(CaptureError, match=re.escape(rule.section)) as caught:
        run(SECTIONS[anchor(rule)][0], **options)
    assert caught.value.rule is rule
    assert caught.value.source is not None and caught.value.source.file == "docs"


@pytest.mark.parametrize("rule", [rule for rule in Rule if rule not in ON_GPU])
def test_right_code_passes(rule: Rule) -> None:
    run(SECTIONS[anchor(rule)][1])


@pytest.mark.gpu
@pytest.mark.parametrize("rule", Rule)
def test_right_code_is_captured_and_replays(rule: Rule) -> None:
    """As a runtime does it: rehearsed on the stream, captured, replayed."""
    given = names("cuda")
    code = compile(SECTIONS[anchor(rule)][1], "docs", "exec")
    exec(code, given)  # what it defines, and a first result
    torch.cuda.synchronize()
    first = given["y"].clone()
    step_code = compile(_without_definitions(SECTIONS[anchor(rule)][1]), "docs", "exec")
    machine = choose_backend("cuda_graph", torch.device("cuda"))
    with torch.no_grad(), machine.context():
        for _ in range(machine.rehearsals):
            with Lint(values=True):
                exec(step_code, given)
        captured = machine.capture(lambda: exec(step_code, given))
        given["y"].zero_()
        captured.replay()
        machine.synchronize()
        assert torch.equal(given["y"], first)
    captured.close()


def _without_definitions(code: str) -> str:
    """An operation is made once, not at every run."""
    return code.rsplit("\n\n", 1)[-1]


@pytest.mark.gpu
def test_work_on_another_stream_is_refused_by_the_capture() -> None:
    given = names("cuda")
    code = compile(SECTIONS[anchor(Rule.OTHER_STREAM)][0], "docs", "exec")
    machine = choose_backend("cuda_graph", torch.device("cuda"))
    with pytest.raises(CaptureError) as caught:
        machine.capture(lambda: exec(code, given))
    assert caught.value.rule is Rule.OTHER_STREAM
    torch.cuda.synchronize()
    machine.capture(lambda: given["y"].add_(1)).close()
