"""An icicle of a replay: scopes from the top, what ran in them below, as wide as the time it took.

One SVG file, readable in a browser; a pointer held over a box shows its numbers.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from .attribute import Attribution, Replay
from .summary import UNKNOWN, bucket_order

__all__ = ["icicle"]

WIDTH = 1400
ROW = 20
MARGIN = 12
HEADING = 26
LETTER = 7.0  # a wide one of the text's 11 pixels


@dataclass
class _Box:
    """A scope, or a kernel in one: nanoseconds with all inside it, over all replays."""

    name: str
    time: int = 0
    launches: int = 0
    is_scope: bool = True
    inside: dict[str, _Box] = field(default_factory=dict)

    def add(self, path: Iterable[str], leaf: str, time: int) -> None:
        box = self
        box._count(time)
        for name in path:
            box = box.inside.setdefault(name, _Box(name))
            box._count(time)
        # Apart from a scope that has a kernel's name.
        box = box.inside.setdefault(f"{leaf}()", _Box(leaf, is_scope=False))
        box._count(time)

    def _count(self, time: int) -> None:
        self.time += time
        self.launches += 1

    @property
    def depth(self) -> int:
        return 1 + max((box.depth for box in self.inside.values()), default=0)


def icicle(attribution: Attribution, bucket: str | None = None) -> str:
    """The picture as SVG, one panel a bucket.

    Args:
        attribution: of a profile in node mode.
        bucket: the only one to show; None for all.
    """
    panels: dict[str, list[Replay]] = {}
    for replay in attribution.replays:
        if bucket in (None, replay.bucket):
            panels.setdefault(replay.bucket, []).append(replay)
    parts, top = [], MARGIN
    for name in sorted(panels, key=bucket_order):
        drawn, height = _panel(name, panels[name], top)
        parts.append(drawn)
        top += height
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top}" '
        f'viewBox="0 0 {WIDTH} {top}" font-family="Helvetica, Arial, DejaVu Sans, sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _panel(bucket: str, replays: list[Replay], top: float) -> tuple[str, int]:
    root = _Box("replay")
    for replay in replays:
        for activity, path in zip(replay.activities, replay.paths, strict=True):
            root.add(path or UNKNOWN, activity.name, activity.duration)
    took = root.time / len(replays) / 1e3
    idle = sum(sum(replay.gaps()) for replay in replays) / len(replays) / 1e3
    count = f"{len(replays)} replay{'s' if len(replays) > 1 else ''}"
    heading = (
        f"bucket {bucket}: {took:.1f} us of device time a replay, {idle:.1f} us of gaps, "
        f"{root.launches / len(replays):.4g} nodes; average of {count}"
    )
    scale = (WIDTH - 2 * MARGIN) / root.time if root.time else 0.0
    boxes = "".join(_boxes(root, MARGIN, top + HEADING, scale, root.time, len(replays)))
    text = f'<text x="{MARGIN}" y="{top + 16}" font-weight="bold">{escape(heading)}</text>'
    return text + boxes, HEADING + root.depth * ROW + MARGIN


def _boxes(
    box: _Box, left: float, top: float, scale: float, whole: int, replays: int
) -> Iterator[str]:
    width = box.time * scale
    if width < 0.2:
        return
    label = _shortened(box.name, width)
    title = (
        f"{box.name}: {box.time / replays / 1e3:.2f} us a replay "
        f"({100 * box.time / whole:.1f}%), {box.launches / replays:.4g} nodes"
    )
    yield (
        f'<g><title>{escape(title)}</title><rect x="{left:.2f}" y="{top}" width="{width:.2f}" '
        f'height="{ROW - 1}" fill="{_colour(box)}" stroke="white" stroke-width="0.4"/>'
        f'<text x="{left + 3:.2f}" y="{top + 13}">{escape(label)}</text></g>'
    )
    for inner in box.inside.values():
        yield from _boxes(inner, left, top + ROW, scale, whole, replays)
        left += inner.time * scale


def _shortened(name: str, width: float) -> str:
    letters = int((width - 6) / LETTER)
    if len(name) <= letters:
        return name
    return f"{name[: letters - 1]}…" if letters > 2 else ""


def _colour(box: _Box) -> str:
    """The same for the same scope in every layer; what runs in scopes is grey."""
    if not box.is_scope:
        return "#dcdcdc"
    if (box.name,) == UNKNOWN:
        return "#ff9d9d"
    hue = zlib.crc32(re.sub(r"\d+", "", box.name).encode()) % 360
    return f"hsl({hue}, 55%, 78%)"
