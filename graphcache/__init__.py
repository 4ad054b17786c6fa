"""State of decode steps at fixed addresses: pools of static shape, requests as slots.

Knows nothing of graphs; `capture` records and replays steps on this state.
"""

from .batch import PAD_SLOT, Batch
from .block_store import BlockStore
from .checkpoint import Checkpoint
from .decode_state import DecodeState
from .errors import GraphCacheError
from .finish import FinishReason
from .pool import Field, StatePool
from .schema import AttentionType, KVLayerSchema, LayerCacheSchema
from .slots import SlotManager
from .state_cache import StateCachePool

__version__ = "0.1.0"

__all__ = [
    "PAD_SLOT",
    "AttentionType",
    "Batch",
    "BlockStore",
    "Checkpoint",
    "DecodeState",
    "Field",
    "FinishReason",
    "GraphCacheError",
    "KVLayerSchema",
    "LayerCacheSchema",
    "SlotManager",
    "StateCachePool",
    "StatePool",
]
