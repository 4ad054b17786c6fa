"""Every rule of the lint has a section in the docs, whose wrong code it refuses and right passes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from capture import CaptureError
from capture.lint import Lint
from capture.rules import PAGE, Rule

TEXT = (Path(__file__).parents[2] / PAGE).read_text()
SECTION = re.compile(
    r"^## ([a-z-]+)\n.*?Wrong:\n\n```python\n(.*?)```\n\nRight:\n\n```python\n(.*?)```",
    re.MULTILINE | re.DOTALL,
)
SECTIONS = {name: (wrong, right) for name, wrong, right in SECTION.findall(TEXT)}


def run(code: str) -> None:
    names = {
        "torch": torch,
        "x": torch.ones(4, 8),
        "y": torch.zeros(4, 8),
        "m": torch.ones(4, 8, dtype=torch.bool),
        "i": torch.arange(4),
    }
    compiled = compile(code, "docs", "exec")
    with Lint():
        exec(compiled, names)


def anchor(rule: Rule) -> str:
    return rule.section.split("#")[1]


def test_every_rule_has_a_section_and_every_section_a_rule() -> None:
    assert {anchor(rule) for rule in Rule} == set(SECTIONS) == set(re.findall(r"## (\S+)", TEXT))


@pytest.mark.parametrize("rule", Rule)
def test_wrong_code_is_refused_by_the_rule_and_names_its_section(rule: Rule) -> None:
    with pytest.raises(CaptureError, match=re.escape(rule.section)) as caught:
        run(SECTIONS[anchor(rule)][0])
    assert caught.value.rule is rule


@pytest.mark.parametrize("rule", Rule)
def test_right_code_passes(rule: Rule) -> None:
    run(SECTIONS[anchor(rule)][1])
