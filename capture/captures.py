"""The ladder's captures: each bucket rehearsed, captured, and held together with what it points to.

Rehearsals run on padding rows, under the lint, and what they wrote is put back. The largest bucket
comes first: its memory serves the smaller ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from torch import Tensor
from tqdm import tqdm

from .backend import Backend, CapturedStep
from .errors import CaptureError, DeviceLost, NotCaptured
from .ladder import Bucket, Ladder
from .lint import Lint
from .pointers import PointerLedger
from .ranges import PREPARE, REPLAY, Ranges
from .report import MIB, BucketCost, BucketUse, Counters
from .source import line_of_error
from .spans import BucketSpans, SpanMap
from .watch import StepWatch

__all__ = ["BucketStep", "Captures"]


class BucketStep:
    """One rung of the ladder: the step as a function, its capture, and what is known of both.

    Attributes:
        key: rows and tokens a row.
        step: the step's Python.
        captured: its capture, or None.
        use: how often it ran.
        duration_ns: how long it takes, as far as waiting for it has shown; 0 while unknown.
        prepare, replay: NVTX attributes of the host's ranges.
    """

    __slots__ = ("captured", "duration_ns", "key", "prepare", "replay", "step", "use")

    def __init__(
        self, key: Bucket, step: Callable[[], None], use: BucketUse, ranges: Ranges
    ) -> None:
        self.key = key
        self.step = step
        self.use = use
        self.captured: CapturedStep | None = None
        self.duration_ns = 0
        self.prepare = ranges.attributes(PREPARE, key.rows)
        self.replay = ranges.attributes(REPLAY, key.rows)


class Captures:
    """Captures a ladder, and lets go of it.

    Args:
        ladder: which buckets.
        step_of: the step of a bucket.
        backend: rehearses and records.
        ranges: hears the scopes of a step while it is captured.
        counters: gets an entry for each bucket.
        named: tensors whose addresses captures hold, by name, as they are whenever it is called.

    Attributes:
        buckets: by key.
        pointers: whether what the captures point to is where it was.
    """

    def __init__(
        self,
        ladder: Ladder,
        step_of: Callable[[Bucket], Callable[[], None]],
        backend: Backend,
        ranges: Ranges,
        counters: Counters,
        named: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        self._backend = backend
        self._ranges = ranges
        self.pointers = PointerLedger(named)
        self.buckets: dict[Bucket, BucketStep] = {}
        for key in ladder.buckets:
            use = counters.buckets[key] = BucketUse()
            self.buckets[key] = BucketStep(key, step_of(key), use, ranges)

    def capture(self, *, progress: bool) -> tuple[BucketCost, ...]:
        """Capture every bucket, in place of what was captured before.

        Raises:
            CaptureError, PointerMoved: nothing stays captured then.
            DeviceLost: when that is why it failed.
        """
        self.drop()
        self.pointers.record()
        costs: list[BucketCost] = []
        try:
            keys = sorted(self.buckets, reverse=True)
            with tqdm(keys, desc="capture", unit="bucket", disable=not progress) as bar:
                for key in bar:
                    costs.append(self._capture(self.buckets[key]))
                    taken = sum(cost.device_bytes for cost in costs) / MIB
                    bar.set_postfix_str(f"{key} rows, {taken:.0f} MiB")
            self.pointers.check()
        except BaseException:
            self.drop()
            # A step that met a lost device says so in words of its own, and can't be tried again.
            self._backend.synchronize()
            raise
        return tuple(costs)

    def spans(self) -> SpanMap:
        """Which nodes of each captured bucket belong to which scope.

        Raises:
            NotCaptured: when nothing is captured.
        """
        found = []
        for key, bucket in sorted(self.buckets.items()):
            if bucket.captured is None:
                raise NotCaptured("nothing is captured; call capture() first")
            nodes, linear = bucket.captured.describe()
            found.append(BucketSpans(key, nodes, bucket.captured.spans, linear))
        return SpanMap(self._backend.name, tuple(found))

    def drop(self) -> None:
        """Free every capture, then let go of what they pointed to. Nothing may be running them."""
        for bucket in self.buckets.values():
            if bucket.captured is not None:
                # What a lost device refuses to free goes with the process.
                with suppress(RuntimeError):
                    bucket.captured.close()
                bucket.captured = None
        self.pointers.clear()

    def _capture(self, bucket: BucketStep) -> BucketCost:
        start = time.perf_counter()
        for _ in range(self._backend.rehearsals):
            self._rehearse(bucket.step)
        with self._ranges.capturing(bucket.key):
            captured = self._backend.capture(bucket.step)
        bucket.captured = captured
        bucket.duration_ns = 0
        self.pointers.hold(captured.external)
        return BucketCost(
            bucket=bucket.key,
            nodes=captured.nodes,
            capture_ms=(time.perf_counter() - start) * 1e3,
            device_bytes=captured.device_bytes,
        )

    def _rehearse(self, step: Callable[[], None]) -> None:
        watch = StepWatch(preserve=True)
        try:
            with watch, Lint(values=True):
                step()
        except (CaptureError, DeviceLost):
            raise
        except Exception as error:
            raise CaptureError(
                f"the step raised {type(error).__name__}: {error}", source=line_of_error(error)
            ) from error
        finally:
            # Host memory among what is restored is written by kernels that must have run by now.
            self._backend.synchronize()
            watch.restore()
        self.pointers.hold(watch.external)
