"""Proof by trial that a step may be captured, and that its replays are right."""

from .hazards import HAZARDS, Hazard
from .report import Finding, VerifyReport
from .run import verify

__all__ = ["HAZARDS", "Finding", "Hazard", "VerifyReport", "verify"]
