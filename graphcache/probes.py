"""Values of a step to look at from outside: `probe("hidden", hidden)`.

A probe is named by the scopes around it. With no listener it does nothing, and a captured step
holds nothing of it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from . import scopes

__all__ = ["SEPARATOR", "ProbeListener", "probe", "probing", "unheard"]

SEPARATOR = " / "


class ProbeListener(Protocol):
    """Takes the values of every probe on the thread it subscribed on."""

    def take(self, name: str, tensor: Tensor) -> None:
        """A probe was reached; `name` is that of its scopes and its own, outermost first."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.listeners: tuple[ProbeListener, ...] = ()


_thread = _Thread()


def probe(name: str, tensor: Tensor) -> None:
    """Show a tensor to whoever listens; nothing happens when nobody does.

    Usable in steps. In `scope("layer 3")` the probe "hidden" is "layer 3 / hidden".
    """
    for listener in _thread.listeners:
        listener.take(SEPARATOR.join((*scopes.path(), name)), tensor)


@contextmanager
def probing(listener: ProbeListener) -> Iterator[None]:
    """Subscribe `listener` to this thread's probes for the time of the block."""
    _thread.listeners += (listener,)
    try:
        yield
    finally:
        _thread.listeners = tuple(other for other in _thread.listeners if other is not listener)


@contextmanager
def unheard() -> Iterator[None]:
    """Show this thread's probes to nobody for the time of the block."""
    heard, _thread.listeners = _thread.listeners, ()
    try:
        yield
    finally:
        _thread.listeners = heard
