"""NVTX ranges in a domain of their own: what the host does around a replay, and scopes at capture.

A range opened inside captured code fires when the code is captured, never when it is replayed: at
replay only the host's own range around the launch is live. So a step's `scope`s open ranges while
the step is captured, inside one that names the bucket, and `capture.spans` keeps which nodes they
recorded; a profile of replays gets its names from either.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import nvtx
from nvtx import _lib as nvtx_lib

from graphcache.scopes import listening, scope

from .ladder import Bucket

__all__ = ["CAPTURE", "DOMAIN", "DRAIN", "PREPARE", "REPLAY", "Ranges", "scope"]

DOMAIN = "graphcache"

# What the host does; the bucket's rows are the payload of those around a step.
PREPARE, REPLAY, DRAIN = "prepare", "replay", "drain"
# Before a bucket's name: "capture 8". The scopes of a step lie inside.
CAPTURE = "capture"


class Ranges:
    """Ranges of the domain `graphcache`; a scope listener too.

    Attributes:
        listening: whether a tool is attached. Without one nothing is to be called.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        domain: Any = nvtx.get_domain(DOMAIN) if enabled else None
        self.listening = domain is not None and not isinstance(domain, nvtx_lib.DummyDomain)
        self._domain = domain
        self._by_name: dict[tuple[str, int | None], Any] = {}

    def attributes(self, name: str, payload: int | None = None) -> Any:
        """A range's message and payload, made once and kept; None when nobody listens."""
        if not self.listening:
            return None
        key = (name, payload)
        if key not in self._by_name:
            options: dict[str, Any] = {} if payload is None else {"payload": payload}
            self._by_name[key] = self._domain.get_event_attributes(message=name, **options)
        return self._by_name[key]

    def open(self, attributes: Any) -> None:
        """Open a range on this thread; `attributes` as made by `attributes()`."""
        if self.listening:
            self._domain.push_range(attributes)

    def close(self) -> None:
        """Close this thread's innermost range."""
        if self.listening:
            self._domain.pop_range()

    @contextmanager
    def capturing(self, bucket: Bucket) -> Iterator[None]:
        """Around the capture of a bucket: a range with its name, and a range for each scope."""
        self.open(self.attributes(f"{CAPTURE} {bucket}"))
        try:
            with listening(self):
                yield
        finally:
            self.close()

    def push(self, name: str) -> None:
        """A scope of a step was opened, at capture."""
        self.open(self.attributes(name))

    def pop(self) -> None:
        """A scope of a step was closed, at capture."""
        self.close()
