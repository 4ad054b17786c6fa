"""Steps of toy models are too small to share between threads, which wait for one another."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread(_few_threads: None) -> None:
    torch.set_num_threads(1)
