"""What the zoo holds: steps with one fault each, and unusual ones without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from graphcache import Batch
from graphcache.models import StepFunction
from tests.toy import VOCAB, ToyDecoder

__all__ = ["FAULTS", "UNUSUAL", "Specimen", "Step", "fault", "scratched", "served", "unusual"]

Patch = pytest.MonkeyPatch
Step = Callable[[Batch], Tensor]
Make = Callable[[torch.device, Patch], tuple[Any, dict[str, Any]]]


@dataclass(frozen=True)
class Specimen:
    """A step of the zoo.

    Attributes:
        name: of the function that makes it.
        about: what is wrong with it, or unusual.
        make: gives a model, and options of `verify`; may patch the library.
        hazard: as which it must be found; "" for none.
        numbers: entries of `tests.zoo.entries.ENTRIES` that it is of the kind of.
        line: text of the user's line that the finding must name; "" where there is none.
        backends: where the fault can exist.
    """

    name: str
    about: str
    make: Make
    hazard: str = ""
    numbers: tuple[int, ...] = ()
    line: str = ""
    backends: tuple[str, ...] = ("tape", "cuda_graph")


FAULTS: list[Specimen] = []
UNUSUAL: list[Specimen] = []


def fault(
    hazard: str, *numbers: int, line: str = "", backends: tuple[str, ...] = ("tape", "cuda_graph")
) -> Callable[[Make], Make]:
    """Puts a maker's step among the faults; its docstring says what is wrong."""

    def put(make: Make) -> Make:
        about = (make.__doc__ or "").strip().rstrip(".")
        FAULTS.append(Specimen(make.__name__, about, make, hazard, numbers, line, backends))
        return make

    return put


def unusual(make: Make) -> Make:
    """Puts a maker's step among those that are right; its docstring says what is unusual."""
    about = (make.__doc__ or "").strip().rstrip(".")
    UNUSUAL.append(Specimen(make.__name__, about, make))
    return make


def served(toy: ToyDecoder, step: Step | None = None, **options: Any) -> StepFunction:
    """A toy decoder whose steps do something besides, and whose prefill does not."""
    return StepFunction(
        step or toy, VOCAB, schemas=toy.schemas, device=toy.device, chunk=toy, **options
    )


def scratched(batch: Batch) -> Tensor:
    """[T] int64, slots with padding turned into the scratch row."""
    return torch.where(batch.slots < 0, batch.state.max_requests, batch.slots).long()
