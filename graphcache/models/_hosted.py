"""What adapters of transformers models share: text, where weights lie, where an answer ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..batch import Batch
from ..errors import UnsupportedModel
from ..layout import LayerSchema
from ..pool import Field
from .packages import need_packages

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Hosted", "place_of", "stop_tokens_of"]


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
    max_context: int | None
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
        """Ids of a user's turn with the opening of the answer; `encode` without a chat template.

        Raises:
            UnsupportedModel: when there is no tokenizer, or its template refuses the turn.
            UnsupportedPlatform: when the package that renders templates is missing.
        """
        tokenizer = self._need_tokenizer()
        if not tokenizer.chat_template:
            return self.encode(text)
        need_packages("jinja2")
        from jinja2 import TemplateError

        try:
            ids: list[int] = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}],
                tokenize=True,
                add_generation_prompt=True,
                return_dict=False,
            )
        except TemplateError as error:
            raise UnsupportedModel(
                f"the tokenizer's chat template can't be applied to a user's turn ({error}); "
                "give the text as it is, by encode() or --raw"
            ) from error
        return ids

    def decode_text(self, ids: list[int]) -> str:
        """Text of ids, special tokens left out."""
        text: str = self._need_tokenizer().decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _need_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise UnsupportedModel(
                "this model came without a tokenizer, so there is no text for it: work with token "
                "ids, or put its tokenizer.json beside the weights"
            )
        return self.tokenizer


def place_of(model: PreTrainedModel) -> tuple[torch.device, torch.dtype]:
    """The one device of a model's weights, and their dtype but for what stays in float32.

    Raises:
        UnsupportedModel: for several, for weights not built, or quantised.
    """
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if parameter.is_meta:
            raise UnsupportedModel(f"the model is not built: {name} has no memory (device meta)")
        if not parameter.is_floating_point() or parameter.dtype.itemsize < 2:
            raise UnsupportedModel(f"quantised weights are not served: {name} is {parameter.dtype}")
    devices = {parameter.device for parameter in parameters.values()}
    # A few parameters stay in float32 whatever the others are: transformers names them.
    kept = (*(model._keep_in_fp32_modules_strict or ()), *(model._keep_in_fp32_modules or ()))
    dtypes = {
        parameter.dtype
        for name, parameter in parameters.items()
        if parameter.dtype != torch.float32 or not any(part in name for part in kept)
    }
    if len(devices) != 1:
        raise UnsupportedModel(f"weights lie on {_listed(devices)}; one device is served")
    if len(dtypes) != 1:
        raise UnsupportedModel(f"weights are of {_listed(dtypes)}; one dtype is served")
    return devices.pop(), dtypes.pop()


def _listed(things: set[Any]) -> str:
    return " and ".join(sorted(map(str, things))) or "nothing"


def stop_tokens_of(model: PreTrainedModel) -> tuple[int, ...]:
    """Ids that end an answer, from the generation config or the config."""
    generation = getattr(model, "generation_config", None)
    stop = getattr(generation, "eos_token_id", None)
    if stop is None:
        stop = getattr(model.config, "eos_token_id", None)
    if stop is None:
        return ()
    return tuple(int(token) for token in stop) if isinstance(stop, list) else (int(stop),)
