"""Where two runs of a model's steps part: what each scope gave, compared in the order they ran."""

from .compare import Comparison, ProbeDifference, compare
from .run import ProbeRun, record

__all__ = ["Comparison", "ProbeDifference", "ProbeRun", "compare", "record"]
