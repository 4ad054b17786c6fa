"""The machine: record a decode step once per batch size, and replay it.

Knows state only as tensors and slots; `graphcache` is that state.
"""

from graphcache.probes import probe

from .errors import CaptureError
from .ladder import Bucket, Ladder, Refusal
from .memory_plan import MemoryPlan, plan_memory
from .ranges import scope
from .report import CaptureReport
from .result import StepResult
from .runtime import DecodeRuntime
from .spans import SpanMap
from .verify import verify

__all__ = [
    "Bucket",
    "CaptureError",
    "CaptureReport",
    "DecodeRuntime",
    "Ladder",
    "MemoryPlan",
    "Refusal",
    "SpanMap",
    "StepResult",
    "plan_memory",
    "probe",
    "scope",
    "verify",
]
