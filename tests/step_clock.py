"""A clock of steps that a test moves by hand, for state without a runtime."""

from __future__ import annotations

__all__ = ["HandClock"]


class HandClock:
    """Steps are submitted and completed only as told; waiting completes what is waited for.

    Attributes:
        submitted: the newest step given to the device.
        done: the newest that has completed.
        waited: every step that was waited for although it had not completed.
    """

    def __init__(self) -> None:
        self.submitted = 0
        self.done = 0
        self.waited: list[int] = []

    def submit(self, steps: int = 1) -> None:
        """Give the device steps to do."""
        self.submitted += steps

    def complete(self, step: int | None = None) -> None:
        """Let the device be done with steps up to `step`, or with all."""
        self.done = max(self.done, self.submitted if step is None else step)

    def completed(self) -> int:
        return self.done

    def wait(self, step: int) -> None:
        assert step <= self.submitted, f"waits for step {step}, which nobody has submitted"
        if step > self.done:
            self.waited.append(step)
            self.done = step
