"""What the probes of one request's steps saw, and the file that keeps it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphcache import Batch, FinishReason
from graphcache.errors import InvalidRequest, UnsupportedPlatform

from ..errors import ProbeError
from ..ladder import Ladder
from ..runtime import DecodeRuntime
from ..step import Sampler

__all__ = ["ProbeRun", "record"]

VERSION = "1"


@dataclass(frozen=True)
class ProbeRun:
    """Probed steps of one request, alone in a bucket of one row.

    Attributes:
        name: what ran, for people.
        how: "eager" or "replay".
        device: "cpu", or the GPU's name.
        dtype: of the model, "bfloat16" and so on.
        prompt: token ids.
        taken: the token that each step took as the answer's next.
        steps: of each step what its probes saw, by name in the order in which they ran; on the
            host.
    """

    name: str
    how: str
    device: str
    dtype: str
    prompt: tuple[int, ...]
    taken: tuple[int, ...]
    steps: tuple[dict[str, Tensor], ...]

    def describe(self) -> dict[str, Any]:
        """All but the tensors, for JSON."""
        return {
            "name": self.name,
            "run": self.how,
            "device": self.device,
            "dtype": self.dtype,
            "prompt": list(self.prompt),
            "taken": list(self.taken),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file; `load` reads it.

        Raises:
            ProbeError: when it can't be written.
            UnsupportedPlatform: without the package safetensors.
        """
        _need_safetensors()
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        header = {
            "graphcache_probes": VERSION,
            "run": json.dumps(self.describe()),
            # Safetensors keep no order.
            "steps": json.dumps([list(step) for step in self.steps]),
        }
        tensors = {
            f"{number}/{name}": value.contiguous()
            for number, step in enumerate(self.steps)
            for name, value in step.items()
        }
        try:
            save_file(tensors, path, header)
        except (OSError, SafetensorError) as error:
            raise ProbeError(f"can't write probes to {path}: {error}") from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ProbeRun:
        """Read what `save` wrote.

        Raises:
            ProbeError: for a file that is missing, torn, or holds something else.
            UnsupportedPlatform: without the package safetensors.
        """
        _need_safetensors()
        from safetensors import SafetensorError, safe_open

        if not Path(path).is_file():
            raise ProbeError(f"there is no file {path}")
        try:
            with safe_open(path, framework="pt") as file:
                header = file.metadata() or {}
                if header.get("graphcache_probes") != VERSION:
                    raise ProbeError(
                        f"{path} holds no probes of version {VERSION}; `graphcache diff --save` "
                        "writes such files"
                    )
                steps = tuple(
                    {name: file.get_tensor(f"{number}/{name}") for name in names}
                    for number, names in enumerate(json.loads(header["steps"]))
                )
                run = json.loads(header["run"])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            if isinstance(error, ProbeError):
                raise
            raise ProbeError(f"can't read probes from {path}: {error}") from None
        return cls(
            run["name"], run["run"], run["device"], run["dtype"],
            tuple(run["prompt"]), tuple(run["taken"]), steps,
        )  # fmt: skip


def record(
    model: Any,
    prompt: Sequence[int],
    *,
    steps: int,
    eager: bool = False,
    taken: Sequence[int] | None = None,
    name: str = "",
    backend: str = "auto",
) -> ProbeRun:
    """Run a request's first steps and keep what every probe sees.

    Makes a runtime of its own and closes it. The request draws greedily and minds no stop token.

    Args:
        model: see `DecodeRuntime`.
        prompt: at least one id.
        steps: how many; fewer come where a step's logits are not finite.
        eager: run the steps' Python, not their captures.
        taken: the tokens that the steps take, whatever they would draw: those of a run to compare
            with, so that both see the same inputs. `steps` of them, or more.
        name: for people.
        backend: as `DecodeRuntime`'s.

    Raises:
        InvalidRequest: for fewer tokens than steps, and as `DecodeRuntime.admit`.
        CaptureError: when the step can't be captured.
    """
    if steps < 1:
        raise InvalidRequest(f"at least one step is needed, got {steps}")
    if taken is not None and len(taken) < steps:
        raise InvalidRequest(f"{len(taken)} tokens to take for {steps} steps")
    options: dict[str, Any] = {"max_requests": 1, "max_context": len(prompt) + steps}
    if taken is not None:
        options["sampler"] = _reciting([*prompt, *taken], getattr(model, "device", "cpu"))
    seen: list[dict[str, Tensor]] = []
    took: list[int] = []
    with DecodeRuntime(
        model, ladder=Ladder([1]), backend=backend, probes=True, nvtx=False, **options
    ) as runtime:
        if not eager:
            runtime.capture(progress=False)
        slot = runtime.admit(prompt, max_tokens=steps, stop=())
        for _ in range(steps):
            result = runtime.step([slot], eager=eager)
            took += result.tokens()
            seen.append(runtime.probed())
            if result.reasons[0] is not FinishReason.NONE:
                break
        device = runtime.device
    return ProbeRun(
        name or type(model).__name__,
        "eager" if eager else "replay",
        torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        str(getattr(model, "dtype", "")).removeprefix("torch."),
        tuple(prompt),
        tuple(took),
        tuple(seen),
    )


def _reciting(script: Sequence[int], device: torch.device | str) -> Sampler:
    """A sampler that gives each position the token that a request had there."""
    tokens = torch.tensor(script, dtype=torch.int32, device=device)

    def recite(logits: Tensor, batch: Batch) -> Tensor:
        following = tokens[(batch.positions + 1).clamp(max=len(script) - 1).long()]
        return torch.where(batch.slots < 0, -1, following)

    return recite


def _need_safetensors() -> None:
    try:
        import safetensors  # noqa: F401
    except ImportError:
        raise UnsupportedPlatform(
            "probes are kept with safetensors: pip install 'graphcache-runtime[models]'"
        ) from None
