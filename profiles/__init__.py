"""Measurement: benchmarks of this library, and their results."""
