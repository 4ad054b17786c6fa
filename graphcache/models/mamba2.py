"""Mamba-2 of `transformers`, stepped on state that requests own.

Weights and modules are theirs: embedding, norms, projections. The convolution and the scan between
them are this package's, which update each slot's state in place. The tokens of all requests are
packed, [T, hidden].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..batch import Batch
from ..errors import UnsupportedModel
from ..ops.conv_update import conv_update
from ..ops.scan_update import scan_update
from ..probes import probe
from ..scopes import scope
from ._hosted import Hosted, place_of, stop_tokens_of
from .families import family_of, read_schemas
from .mamba2_fields import conv_field, mamba2_fields, state_field

if TYPE_CHECKING:
    from transformers import Mamba2ForCausalLM, PreTrainedTokenizerBase

__all__ = ["Mamba2Decoder"]


class Mamba2Decoder(Hosted):
    """A built Mamba-2 as the runtime's model.

    The model is taken as it is, where it is; by itself it runs as before. Its state does not grow
    with length, and every token is folded into it: requests can be forked and checkpointed, not
    rewound.

    Args:
        model: transformers' `Mamba2ForCausalLM`, on one device in one dtype.
        tokenizer: its tokenizer, if text is to be turned into ids and back.

    Attributes:
        model: the model given.
        schemas: none; no layer attends.
        fields: of each layer `layer<i>.conv` [K - 1, C] in the weights' dtype, the inputs that its
            convolution still needs, and `layer<i>.state` [H, P, N] float32.
        vocab_size: rows of the vocabulary.
        stop_tokens: ids that end an answer, from the generation config or the config.
        max_context: None, for there is no limit: the runtime is told one.
        device, dtype: of the weights.
        tokenizer: the one given, or None.

    Raises:
        UnsupportedModel: naming the part that can't be served.
    """

    def __init__(
        self, model: Mamba2ForCausalLM, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        super().__init__(tokenizer)
        from transformers import Mamba2ForCausalLM

        if not isinstance(model, Mamba2ForCausalLM):
            raise UnsupportedModel(
                f"expected a built Mamba2ForCausalLM, got {type(model).__name__}"
            )
        family_of(model.config)
        self.device, self.dtype = place_of(model)
        self.schemas = read_schemas(model.config, self.dtype)
        self.fields = mamba2_fields(model.config, self.dtype)
        self.model: Any = model.eval()
        self.vocab_size = int(model.config.vocab_size)
        self.max_context = None
        self.stop_tokens = stop_tokens_of(model)

    def named_tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers by name, as they are now: their addresses are in every capture."""
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    @torch.no_grad()
    def prefill(self, batch: Batch) -> None:
        """Absorb the batch's tokens into the state; no head.

        Runs on the current stream without synchronizing. A prompt in chunks of any lengths leaves
        the state that it leaves as a whole, but for the rounding of matrix products.
        """
        self._body(batch)

    @torch.no_grad()
    def decode(self, batch: Batch) -> Tensor:
        """Absorb the batch's tokens into the state and return logits [T, V] in the model's dtype.

        Runs on the current stream without synchronizing; can be captured. Rows of padding hold
        finite numbers without meaning.

        Raises:
            SchemaError: for several tokens a row.
        """
        head = self.model.lm_head
        logits: Tensor = head(self._body(batch).to(head.weight.dtype))
        return logits

    def _body(self, batch: Batch) -> Tensor:
        """Hidden states [T, hidden] after the last norm."""
        body = self.model.backbone
        hidden = body.embeddings(batch.tokens)
        for index, block in enumerate(body.layers):
            with scope(f"layer {index}"):
                residual = hidden.float() if block.residual_in_fp32 else hidden
                normed = block.norm(hidden.to(block.norm.weight.dtype))
                with scope("mixer"):
                    mixed = _mix(block.mixer, normed, batch, index)
                    probe("output", mixed)
                hidden = residual + mixed
                probe("output", hidden)
        last: Tensor = body.norm_f(hidden)
        return last


def _mix(mixer: Any, hidden: Tensor, batch: Batch, index: int) -> Tensor:
    """A layer between its norm and its residual: [T, hidden] -> [T, hidden]."""
    inner, groups = mixer.intermediate_size, (mixer.n_groups, mixer.ssm_state_size)
    gate, inputs, dt = mixer.in_proj(hidden).split([inner, mixer.conv_dim, mixer.num_heads], dim=1)
    convolved = conv_update(
        inputs, batch.in_place(conv_field(index)), mixer.conv1d.weight.squeeze(1),
        mixer.conv1d.bias, batch.slots, batch.q_len,
    )  # fmt: skip
    x, b, c = convolved.split([inner, *[groups[0] * groups[1]] * 2], dim=1)
    scanned = scan_update(
        x.unflatten(1, (mixer.num_heads, mixer.head_dim)), dt, b.unflatten(1, groups),
        c.unflatten(1, groups), batch.in_place(state_field(index)), mixer.A_log, mixer.D,
        mixer.dt_bias, batch.slots, batch.q_len,
    )  # fmt: skip
    normed = mixer.norm(scanned.flatten(1), gate)
    mixed: Tensor = mixer.out_proj(normed.to(hidden.dtype))
    return mixed
