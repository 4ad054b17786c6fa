"""State of decode steps at fixed addresses: pools of static shape, requests as slots.

Knows nothing of graphs; `capture` records and replays steps on this state.
"""

from .batch import PAD_SLOT, Batch
from .block_store import BlockStore
from .checkpoint import Checkpoint
from .decode_state import DecodeState
from .entry_layer import CompressorInputs, EntryInputs, IndexInputs
from .errors import GraphCacheError
from .finish import FinishReason
from .ops.absorb import Rotation
from .pool import Field, StatePool
from .rows import RowFormat
from .schema import AttentionType, IndexerSchema, KVLayerSchema, LayerCacheSchema
from .slots import SlotManager
from .state_cache import StateCachePool

__version__ = "0.1.0"

__all__ = [
    "PAD_SLOT",
    "AttentionType",
    "Batch",
    "BlockStore",
    "Checkpoint",
    "CompressorInputs",
    "DecodeState",
    "EntryInputs",
    "Field",
    "FinishReason",
    "GraphCacheError",
    "IndexInputs",
    "IndexerSchema",
    "KVLayerSchema",
    "LayerCacheSchema",
    "Rotation",
    "RowFormat",
    "SlotManager",
    "StateCachePool",
    "StatePool",
]
