"""Failures put into a step at a chosen operation of a chosen stage of its capture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from capture import DecodeRuntime
from capture.ladder import Bucket

__all__ = ["Injector", "stages_of"]


def stages_of(runtime: DecodeRuntime) -> list[str]:
    """What a capture does with each bucket's step, in order: it runs once in each stage."""
    rehearsals = ["lint", "warm-up"][: runtime._backend.rehearsals]
    return [*rehearsals, "capture"]


class _Operations(TorchDispatchMode):
    """Counts operations, and raises in place of one of them."""

    def __init__(self, at: int | None, raises: Callable[[], BaseException]) -> None:
        TorchDispatchMode.__init__(self)
        self.count = 0
        self._at = at
        self._raises = raises

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if self.count == self._at:
            raise self._raises()
        self.count += 1
        return func(*args, **(kwargs or {}))


class Injector:
    """Stands between a runtime's captures and its steps.

    Args:
        runtime: whose `capture()` is to fail.

    Attributes:
        reached: whether the failure was raised, since `failing` was entered last.
    """

    def __init__(self, runtime: DecodeRuntime) -> None:
        self.reached = False
        self._buckets = runtime._captures.buckets
        self._stages = stages_of(runtime)

    def operations(self, capture: Callable[[], object]) -> dict[tuple[Bucket, str], int]:
        """How many operations each bucket's step runs in each stage of a capture that succeeds."""
        counts: dict[tuple[Bucket, str], int] = {}

        def run(key: Bucket, stage: str, step: Callable[[], None]) -> None:
            with _Operations(None, Exception) as operations:
                step()
            counts[key, stage] = operations.count

        with self._between(run):
            capture()
        return counts

    @contextmanager
    def failing(
        self, key: Bucket, stage: str, at: int, raises: Callable[[], BaseException]
    ) -> Iterator[None]:
        """Within it, a capture meets an exception in place of one operation.

        Args:
            key: of the bucket.
            stage: one of `stages_of(runtime)`.
            at: which operation of the step, from 0.
            raises: makes the exception.
        """
        self.reached = False

        def made() -> BaseException:
            self.reached = True
            return raises()

        def run(now: Bucket, then: str, step: Callable[[], None]) -> None:
            with _Operations(at if (now, then) == (key, stage) else None, made):
                step()

        with self._between(run):
            yield

    @contextmanager
    def _between(self, run: Callable[[Bucket, str, Callable[[], None]], None]) -> Iterator[None]:
        steps = {key: bucket.step for key, bucket in self._buckets.items()}
        for key, bucket in self._buckets.items():
            stages = iter(self._stages)

            def step(key: Bucket = key, stages: Iterator[str] = stages) -> None:
                run(key, next(stages), steps[key])

            bucket.step = step
        try:
            yield
        finally:
            for key, bucket in self._buckets.items():
                bucket.step = steps[key]
