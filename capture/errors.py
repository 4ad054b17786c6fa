"""Errors of capturing and replaying; all derive from `graphcache.GraphCacheError`."""

from __future__ import annotations

from dataclasses import dataclass

from graphcache.errors import GraphCacheError

from .rules import Rule

__all__ = [
    "BatchTooLarge",
    "CaptureError",
    "DebugFault",
    "DeviceLost",
    "LadderError",
    "NotCaptured",
    "PointerMoved",
    "ProbeError",
    "RuntimeBusy",
    "RuntimeClosed",
    "SourceLine",
    "SpansError",
    "StepsOutstanding",
    "UnsupportedDriver",
]


@dataclass(frozen=True)
class SourceLine:
    """A line of a user's file."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


class CaptureError(GraphCacheError, RuntimeError):
    """A step can't be captured, or its capture failed.

    Attributes:
        operation: what can't be captured, or None when the step itself raised.
        source: the user's line, or None where it is not known.
        rule: the lint's, or None when something else was wrong.
    """

    def __init__(
        self,
        message: str,
        *,
        operation: str | None = None,
        source: SourceLine | None = None,
        rule: Rule | None = None,
    ) -> None:
        super().__init__(message if source is None else f"{message}\n  at {source}")
        self.operation = operation
        self.source = source
        self.rule = rule


class LadderError(GraphCacheError, ValueError):
    """A ladder that serves nothing, or not its own ceiling."""


class PointerMoved(GraphCacheError, RuntimeError):
    """A tensor that captured steps hold by address lies elsewhere, or has another size, now."""


class DebugFault(GraphCacheError, RuntimeError):
    """Debug mode found that a step did what no step may do.

    Attributes:
        check: which check found it: "guards", "finite", "foreign" or "shadow".
        step: the step's number; its tokens have been read.
        slots: handles it concerns.
    """

    def __init__(self, message: str, *, check: str, step: int, slots: tuple[int, ...]) -> None:
        super().__init__(message)
        self.check = check
        self.step = step
        self.slots = slots


class BatchTooLarge(GraphCacheError, ValueError):
    """More slots in one step than the ladder's ceiling."""


class StepsOutstanding(GraphCacheError, RuntimeError):
    """A step was asked for while the tokens of two were still unread."""


class NotCaptured(GraphCacheError, RuntimeError):
    """A step was asked for before `capture()`."""


class ProbeError(GraphCacheError, ValueError):
    """Probed values that can't be kept, read or compared as asked."""


class SpansError(GraphCacheError, ValueError):
    """A file of a capture's spans is missing, torn, or of another kind."""


class RuntimeBusy(GraphCacheError, RuntimeError):
    """A runtime was called from a second thread while it was at work."""


class RuntimeClosed(GraphCacheError, RuntimeError):
    """A runtime was used after `close()`."""


class DeviceLost(GraphCacheError, RuntimeError):
    """The device failed under a step: nothing on it can be trusted or freed any more."""


class UnsupportedDriver(GraphCacheError, RuntimeError):
    """The driver or its bindings lack what a feature needs."""
