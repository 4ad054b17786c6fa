"""A soak: a runtime lives through a great many replays, and is held to what it was at the start.

`python -m profiles.soak` runs one. Requests come, go, fork and rewind at random; some steps run
eagerly beside their replay, some requests are read again from their tokens alone, and memory of
device and host is read at even distances.
"""

from __future__ import annotations

from .run import Soak, SoakReport, soak

__all__ = ["Soak", "SoakReport", "soak"]
