"""Decode steps written on the operations: models whose state is by slot.

`transformers` is imported only when a model is loaded.
"""

from __future__ import annotations

from .contract import DecodeModel
from .load import load_model
from .step_function import StepFunction
from .text import TextStream

__all__ = ["DecodeModel", "StepFunction", "TextStream", "load_model"]
