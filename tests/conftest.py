"""GPU tests are skipped, visibly, where there is no GPU."""

from __future__ import annotations

import pytest
import torch

HAVE_GPU = torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAVE_GPU:
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    # On a machine whose cores are busy, torch's threads wait for each other far longer than a
    # small step takes.
    torch.set_num_threads(1)
