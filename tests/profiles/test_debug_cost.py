"""What debug mode costs is measured by mode, and a shadow is seen in it."""

from __future__ import annotations

from profiles.debug_cost import MODES, measure
from profiles.subjects import two_layers


def test_every_mode_is_timed() -> None:
    samples = measure(two_layers("cpu"), rows=2, count=3)
    assert list(samples) == list(MODES)
    assert all(sample.count == 3 and sample.median_us > 0 for sample in samples.values())
    assert samples["a shadow each step"].median_us > 1.5 * samples["off"].median_us
