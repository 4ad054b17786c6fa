"""Which operation of a step wrote where it must not, and so on which line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from graphcache import DecodeState

from ..errors import SourceLine
from ..source import user_line
from .case import Case
from .compare import Difference, changed
from .fill import fill
from .stage import Stage

__all__ = ["line_of_write"]


def line_of_write(stage: Stage, case: Case, found: Difference) -> SourceLine | None:
    """The user's line that wrote what a case's step must not write, or None."""
    scene = stage.scene(case)
    fill(stage.state, case, ())
    last = found.step or 0
    for step in range(last):
        stage.step(scene, step, eager=True).tokens()
    with _Culprit(stage.state, found.ran) as culprit:
        stage.step(scene, last, eager=True).tokens()
    source: SourceLine | None = culprit.source
    return source


class _Culprit(TorchDispatchMode):
    """Looks after each operation that writes whether foreign state is as it was."""

    def __init__(self, state: DecodeState, owned: Iterable[int]) -> None:
        TorchDispatchMode.__init__(self)
        self._state = state
        self._owned = list(owned)
        self._before = {name: t.clone() for name, t in state.named_tensors().items()}
        self._found = False
        self.source: SourceLine | None = None

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable and not self._found:
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                now = self._state.named_tensors()
                if changed(self._state, self._before, now, self._owned) is not None:
                    self._found = True
                    self.source = user_line()
        return result
