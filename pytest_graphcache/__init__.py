"""A pytest plugin: one line in a test says that a step may be captured and its replays are right.

Loading it imports nothing of the library: torch comes with the first use of the fixture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from capture.verify import VerifyReport

__all__ = ["BACKENDS", "ReplayVerify", "replay_verify"]

BACKENDS: Final = ("auto", "tape", "cuda_graph")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--graph-backend`."""
    group = parser.getgroup("graphcache", "replays of captured steps")
    group.addoption(
        "--graph-backend",
        choices=BACKENDS,
        default="auto",
        help=(
            "where `replay_verify` replays steps: cuda_graph (skips without a GPU), tape (on the "
            "CPU, anywhere), or auto: cuda_graph where there is a GPU, else tape"
        ),
    )


class ReplayVerify:
    """Verifies steps in a test; what the fixture `replay_verify` gives.

    Args:
        asked: a name of `BACKENDS`.

    Attributes:
        backend: "cuda_graph" or "tape".
        device: where a model to be verified must lie: "cuda" or "cpu".
    """

    def __init__(self, asked: str) -> None:
        import torch

        have_gpu = torch.cuda.is_available()
        if asked == "cuda_graph" and not have_gpu:
            pytest.skip("--graph-backend=cuda_graph needs a CUDA GPU")
        self.backend = ("cuda_graph" if have_gpu else "tape") if asked == "auto" else asked
        self.device = "cuda" if self.backend == "cuda_graph" else "cpu"

    def __call__(self, step_or_runtime: Any, **options: Any) -> VerifyReport:
        """Verify a model or runtime; the test fails, with the report, if anything is found.

        Args:
            step_or_runtime: as `capture.verify` takes it.
            options: of `capture.verify`: `trials`, `seed`, `without`, `fields`, and those of a
                runtime for a model.

        Returns:
            The report, in which nothing was found.

        Raises:
            pytest.fail.Exception: with the report, when something was found.
        """
        __tracebackhide__ = True
        from capture import DecodeRuntime, verify

        if not isinstance(step_or_runtime, DecodeRuntime):
            options = {"backend": self.backend, **options}
        report = verify(step_or_runtime, **options)
        if not report.ok:
            pytest.fail(str(report), pytrace=False)
        return report


@pytest.fixture
def replay_verify(request: pytest.FixtureRequest) -> ReplayVerify:
    """Verifies that a step may be captured and that its replays are right; see `ReplayVerify`."""
    return ReplayVerify(request.config.getoption("--graph-backend"))
