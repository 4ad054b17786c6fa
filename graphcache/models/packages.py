"""Packages that only some models need, asked for when one of them does."""

from __future__ import annotations

import importlib.util

from ..errors import UnsupportedPlatform

__all__ = ["need_packages"]


def need_packages(*names: str) -> None:
    """Raise UnsupportedPlatform, with the command that helps, unless all packages are installed."""
    lacking = [name for name in names if importlib.util.find_spec(name) is None]
    if lacking:
        raise UnsupportedPlatform(
            f"this needs {', '.join(lacking)}: pip install 'graphcache-runtime[models]'"
        )
