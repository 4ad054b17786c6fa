"""Any served decoder of `transformers`, stepped on state that requests own.

The modelling code stays theirs. It calls attention through an interface that takes functions by
name; ours is registered there, and hands Q, K and V of a layer to the batch's state, which appends
and attends. The tokens of all requests are packed into one row `[1, T]`, told apart by the batch.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from .. import scopes
from ..batch import Batch
from ..errors import UnsupportedModel
from ..pool import Field
from ..probes import probe
from ._hosted import Hosted, place_of, stop_tokens_of
from .families import Family, check_config, read_schemas

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["TransformersDecoder"]

ATTENTION = "graphcache"
ATTENTION_OVER_EAGER = "graphcache_over_eager"
"""The same for a model that was built with eager attention, as soft caps and sinks ask for."""
EXPERTS = "batched_mm"
"""Experts as products of static shape: the others read on the host how many tokens each takes."""


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    graphcache_batch: Batch | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of every layer: query [1, H, T, D], key and value [1, Hkv, T, D], rotated."""
    if graphcache_batch is None:
        # The model's owner runs it by themselves, `generate` for one: it works as before.
        as_before = kwargs.pop("graphcache_as_before", sdpa_attention_forward)
        plain: tuple[Tensor, None] = as_before(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return plain
    index: Any = module.layer_idx
    layer: Any = graphcache_batch.state.layers[index]
    attended: Tensor = layer.attend(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        graphcache_batch,
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=int(kwargs.get("sliding_window") or 0),
        softcap=float(kwargs.get("softcap") or 0.0),
        sinks=kwargs.get("s_aux"),
    )
    return attended.unsqueeze(0), None


def _attend_over_eager(module: nn.Module, *given: Any, **kwargs: Any) -> tuple[Tensor, None]:
    modelling: Any = sys.modules[type(module).__module__]
    return _attend(module, *given, graphcache_as_before=modelling.eager_attention_forward, **kwargs)


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
AttentionInterface.register(ATTENTION_OVER_EAGER, _attend_over_eager)
AttentionMaskInterface.register(ATTENTION_OVER_EAGER, eager_mask)


class TransformersDecoder(Hosted):
    """A built `transformers` decoder as the runtime's model.

    The model is taken as it is, where it is, and switched to this package's attention; by itself,
    without a batch of ours, it runs as before. Nothing is copied.

    Args:
        model: of a kind in `families.FAMILIES`, with a language head, on one device in one dtype.
        tokenizer: its tokenizer, if text is to be turned into ids and back.

    Attributes:
        model: the model given.
        schemas: one for each layer; its dtype is the weights'.
        fields: none.
        vocab_size: rows of the vocabulary that are ids.
        stop_tokens: ids that end an answer, from the generation config or the config.
        max_context: most positions the model was made for.
        device, dtype: of the weights.
        tokenizer: the one given, or None.

    Raises:
        UnsupportedModel: naming the part that can't be served.
    """

    fields: tuple[Field, ...] = ()

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        super().__init__(tokenizer)
        if not isinstance(model, PreTrainedModel):
            raise UnsupportedModel(
                f"expected a built transformers model, got {type(model).__name__}"
            )
        family = check_config(model.config)
        self.device, self.dtype = place_of(model)
        self.schemas = read_schemas(model.config, self.dtype)
        if model.get_output_embeddings() is None:
            raise UnsupportedModel(
                f"{type(model).__name__} has no language head; build it with AutoModelForCausalLM"
            )
        self.model = model.eval()
        self.vocab_size = int(model.config.vocab_size)
        self.max_context = int(model.config.max_position_embeddings)
        self.stop_tokens = stop_tokens_of(model)
        self._body: Any = model.base_model
        # Four dims keep transformers from building a mask, which would read positions on the host.
        self._no_mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=self.device)
        _switch_attention(model)
        if model._can_set_experts_implementation():
            model.set_experts_implementation(EXPERTS)
        _name_scopes(model, family)

    def named_tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers by name, as they are now: their addresses are in every capture."""
        return {
            **dict(self.model.named_parameters()),
            **dict(self.model.named_buffers()),
            "graphcache.no_mask": self._no_mask,
        }

    @torch.no_grad()
    def prefill(self, batch: Batch) -> None:
        """Absorb the batch's tokens into the state; no head.

        Runs on the current stream without synchronizing. Writes K and V of every layer through
        `batch.state`.
        """
        self._run(self._body, batch)

    @torch.no_grad()
    def decode(self, batch: Batch) -> Tensor:
        """Absorb the batch's tokens into the state and return logits [T, V] in the model's dtype.

        Runs on the current stream without synchronizing; can be captured. V is the head's width,
        at least `vocab_size`. Rows of padding hold finite numbers without meaning.
        """
        logits: Tensor = self._run(self.model, batch).logits
        return logits[0]

    def _run(self, module: Any, batch: Batch) -> Any:
        depth = len(scopes.path())
        try:
            return module(
                input_ids=batch.tokens.unsqueeze(0),
                position_ids=batch.positions.unsqueeze(0),
                attention_mask=self._no_mask,
                use_cache=False,
                return_dict=True,
                graphcache_batch=batch,
            )
        finally:
            scopes.reset(depth)


def _switch_attention(model: PreTrainedModel) -> None:
    before = model.config._attn_implementation
    ours = ATTENTION_OVER_EAGER if before in ("eager", ATTENTION_OVER_EAGER) else ATTENTION
    model.set_attn_implementation(ours)
    # Where a model can't switch, transformers only warns.
    if model.config._attn_implementation != ours:
        raise UnsupportedModel(
            f"{type(model).__name__} does not call attention through transformers' interface"
        )


# Hooks stay with a model, which may be given to more than one adapter.
_named: WeakSet[nn.Module] = WeakSet()


def _name_scopes(model: PreTrainedModel, family: Family) -> None:
    if model in _named:
        return
    _named.add(model)
    for index, layer in enumerate(getattr(model.base_model, family.layers)):
        _name_scope(layer, f"layer {index}")
        _name_scope(getattr(layer, family.attention), "attention")
        _name_scope(getattr(layer, family.mlp), "mlp")


def _name_scope(module: nn.Module, name: str) -> None:
    module.register_forward_pre_hook(lambda *_: scopes.open_scope(name))
    module.register_forward_hook(_leave_scope, always_call=True)


def _leave_scope(module: nn.Module, given: object, output: Any) -> None:
    # Attention modules return their weights besides; a forward that raised returned nothing.
    first = output[0] if isinstance(output, tuple) and output else output
    if isinstance(first, Tensor):
        probe("output", first)
    scopes.close_scope()
