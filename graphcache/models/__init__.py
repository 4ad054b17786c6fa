"""Decode steps written on the operations: models whose state is by slot.

`transformers` is imported only when a model is loaded.
"""

from __future__ import annotations

from .compiled import compiled
from .contract import DecodeModel
from .deepseek_v4 import DeepseekV4Decoder
from .entry_schemas import read_entry_schemas
from .load import load_model
from .step_function import StepFunction
from .text import TextStream

__all__ = [
    "DecodeModel",
    "DeepseekV4Decoder",
    "StepFunction",
    "TextStream",
    "compiled",
    "load_model",
    "read_entry_schemas",
]
