"""Registration of an operation with torch: one schema, a reference for CPU, a kernel for CUDA.

A registered operation is opaque to tracing and recording: what runs inside it is never seen, only
its arguments, and which of them it writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["register"]

_LIBRARY = torch.library.Library("graphcache", "DEF")


def register(
    schema: str,
    *,
    reference: Callable[..., Any],
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
) -> Callable[..., Any]:
    """Define `graphcache::<schema>` and return its callable.

    Args:
        schema: in torch's schema language; written arguments marked `Tensor(a!)`.
        reference: runs on CPU tensors.
        kernel: runs on CUDA tensors, on the current stream, without synchronizing.
        fake: gives the outputs' shapes and dtypes.
    """
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, reference, "CPU")
    _LIBRARY.impl(name, kernel, "CUDA")
    torch.library.register_fake(f"graphcache::{name}", fake, lib=_LIBRARY)
    overload: Callable[..., Any] = getattr(torch.ops.graphcache, name).default
    return overload
