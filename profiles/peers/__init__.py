"""Other ways to decode with the same weights, each a small class with one interface.

Serving patterns are re-implemented from their description; transformers' loops are its own.
"""

from __future__ import annotations

from .hf import ContinuousBatching, Generate
from .mini_sglang import MiniSglang
from .nano_vllm import NanoVllm
from .ours import Ours
from .peer import Decoded, Peer, PeerUnavailable, SteppedPeer
from .raw_launch import RawLaunch
from .static_peers import Eager, GptFast, GraphedCallables

__all__ = ["PEERS", "Decoded", "Ours", "Peer", "PeerUnavailable", "SteppedPeer"]

PEERS: tuple[type[Peer], ...] = (
    Eager,
    GraphedCallables,
    GptFast,
    Generate,
    ContinuousBatching,
    NanoVllm,
    MiniSglang,
    RawLaunch,
)
"""All of them, the floor last."""
