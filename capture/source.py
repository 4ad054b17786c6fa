"""The user's line: the innermost frame that is not of torch, of this library or of Python."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from types import FrameType, TracebackType

import torch

import graphcache

from .errors import SourceLine

__all__ = ["line_of_error", "line_of_frames", "user_line"]

_OURS = tuple(
    str(Path(place).resolve()) + os.sep
    for place in (
        Path(torch.__file__).parent,
        Path(graphcache.__file__).parent,
        Path(__file__).parent,
        sysconfig.get_path("stdlib"),
    )
)
_PACKAGES = os.sep + "site-packages" + os.sep


def user_line() -> SourceLine | None:
    """The line of user code that is running now."""
    frames = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return _innermost(frames)


def line_of_error(error: BaseException) -> SourceLine | None:
    """The line of user code from which `error` was raised."""
    frames = []
    step: TracebackType | None = error.__traceback__
    while step is not None:
        frames.append((step.tb_frame.f_code.co_filename, step.tb_lineno))
        step = step.tb_next
    return _innermost(reversed(frames))


def line_of_frames(frames: Iterable[tuple[str, int]]) -> SourceLine | None:
    """The line of user code among frames, each a file and a line, innermost first."""
    return _innermost(frames)


def _innermost(frames: Iterable[tuple[str, int]]) -> SourceLine | None:
    for file, line in frames:
        if file.startswith("<"):
            continue
        resolved = os.path.realpath(file)
        # The stdlib's folder holds site-packages too, where a model's own library may live.
        if resolved.startswith(_OURS[:3]):
            continue
        if resolved.startswith(_OURS[3]) and _PACKAGES not in resolved:
            continue
        return SourceLine(file, line, linecache.getline(file, line).strip())
    return None
