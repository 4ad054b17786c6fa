"""What a Mamba-2 keeps for a request, read from its config, and which configs are served."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..errors import UnsupportedModel
from ..pool import Field

__all__ = ["check_mamba2", "conv_field", "mamba2_fields", "state_field"]


def conv_field(layer: int) -> str:
    """Name of the field with a layer's last inputs of its convolution."""
    return f"layer{layer}.conv"


def state_field(layer: int) -> str:
    """Name of the field with a layer's recurrent state."""
    return f"layer{layer}.state"


def mamba2_fields(config: Any, dtype: torch.dtype) -> tuple[Field, ...]:
    """Two fields a layer: `layer<i>.conv` [K - 1, C] in the weights' dtype, `layer<i>.state`
    [H, P, N] float32.

    Args:
        config: a `Mamba2Config`, one that `check_mamba2` has passed.
        dtype: of the weights.
    """
    groups = 2 * config.n_groups * config.state_size
    kept = (config.conv_kernel - 1, config.num_heads * config.head_dim + groups)
    state = (config.num_heads, config.head_dim, config.state_size)
    return tuple(
        field
        for layer in range(config.num_hidden_layers)
        for field in (
            Field(conv_field(layer), kept, dtype, accumulates=True),
            Field(state_field(layer), state, torch.float32, accumulates=True),
        )
    )


def check_mamba2(config: Any) -> None:
    """See to it that a config asks for nothing that the operations lack; takes no memory.

    Raises:
        UnsupportedModel: naming the setting.
    """
    low, high = config.time_step_limit
    if low > 0 or high != math.inf:
        raise UnsupportedModel(
            f"time steps limited to {low}..{high} are not served (config.time_step_limit); served "
            "is 0..inf"
        )
    if config.hidden_act not in ("silu", "swish"):
        raise UnsupportedModel(
            f"a convolution followed by {config.hidden_act!r} is not served (config.hidden_act); "
            "served is silu"
        )
    if config.conv_kernel < 2:
        raise UnsupportedModel(
            f"a convolution of {config.conv_kernel} taps is not served (config.conv_kernel); "
            "served are 2 and more"
        )
    if config.n_groups < 1 or config.num_heads % config.n_groups:
        raise UnsupportedModel(
            f"{config.num_heads} heads don't make n_groups={config.n_groups} even groups"
        )
