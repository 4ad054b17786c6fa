"""Keeps other libraries from talking between the lines of a command."""

from __future__ import annotations

import logging
import warnings

__all__ = ["silence_libraries"]


def silence_libraries() -> None:
    """Progress and advice of the loaders is not part of the answer."""
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
