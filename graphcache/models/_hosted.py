"""What adapters of transformers models have in common: text, and where an answer ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..batch import Batch
from ..errors import UnsupportedModel
from ..layout import LayerSchema
from ..pool import Field

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Hosted", "stop_tokens_of"]


class Hosted(ABC):
    """A transformers model as the runtime's, see `DecodeModel`, with a tokenizer or without.

    Args:
        tokenizer: turns text into ids and back; None for token ids only.

    Attributes:
        model: the transformers model.
        schemas, fields, vocab_size, stop_tokens, max_context, device, dtype: see `DecodeModel`.
        tokenizer: the one given, or None.
    """

    model: Any
    schemas: tuple[LayerSchema, ...]
    fields: tuple[Field, ...] = ()
    vocab_size: int
    stop_tokens: tuple[int, ...]
    max_context: int
    device: torch.device
    dtype: torch.dtype

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.tokenizer = tokenizer

    @abstractmethod
    def named_tensors(self) -> dict[str, Tensor]:
        """Every tensor whose address a captured step holds, by name."""

    @abstractmethod
    def prefill(self, batch: Batch) -> None:
        """Absorb the batch's tokens into the state; no head."""

    @abstractmethod
    def decode(self, batch: Batch) -> Tensor:
        """Absorb the batch's tokens into the state and return logits [T, V]."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with the tokens that the tokenizer puts around one."""
        ids: list[int] = self._need_tokenizer().encode(text)
        return ids

    def encode_chat(self, text: str) -> list[int]:
        """Ids of a user's turn with the opening of the answer; `encode` without a chat template."""
        tokenizer = self._need_tokenizer()
        if not tokenizer.chat_template:
            return self.encode(text)
        ids: list[int] = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            tokenize=True,
            add_generation_prompt=True,
            return_dict=False,
        )
        return ids

    def decode_text(self, ids: list[int]) -> str:
        """Text of ids, special tokens left out."""
        text: str = self._need_tokenizer().decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _need_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise UnsupportedModel("this model came without a tokenizer; work with token ids")
        return self.tokenizer


def stop_tokens_of(model: PreTrainedModel) -> tuple[int, ...]:
    """Ids that end an answer, from the generation config or the config."""
    generation = getattr(model, "generation_config", None)
    stop = getattr(generation, "eos_token_id", None)
    if stop is None:
        stop = getattr(model.config, "eos_token_id", None)
    if stop is None:
        return ()
    return tuple(int(token) for token in stop) if isinstance(stop, list) else (int(stop),)
