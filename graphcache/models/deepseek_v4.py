"""DeepSeek-V4 of `transformers`, stepped on state that requests own.

Weights and modules are theirs: embedding, hyper-connections, routers, experts, norms, projections.
Attention, compressors and indexer are this package's, which read and write by slot. The residual
streams of all requests are packed into one row, [1, T, streams, hidden].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..batch import Batch
from ..entry_layer import CompressorInputs, EntryInputs, EntryLayer, IndexInputs
from ..errors import UnsupportedModel, UnsupportedPlatform
from ..ops.absorb import Rotation
from ..ops.rotate_heads import rotate_heads
from ..probes import probe
from ..rows import RowFormat
from ..schema import LayerCacheSchema
from ..scopes import scope
from ._hosted import Hosted, stop_tokens_of
from .entry_schemas import WEIGHT_DTYPES, read_entry_schemas
from .families import check_device, family_of

if TYPE_CHECKING:
    from transformers import DeepseekV4ForCausalLM, PreTrainedTokenizerBase

__all__ = ["DeepseekV4Decoder", "LayerAttention", "Rotations"]

# The shapes of these don't depend on the data.
EXPERTS = "batched_mm"


class DeepseekV4Decoder(Hosted):
    """A built DeepSeek-V4 as the runtime's model.

    The model is taken as it is, where it is; its projections from one input are gathered into one
    matrix, of which the modules' weights become views. By itself it runs as before.

    Args:
        model: transformers' `DeepseekV4ForCausalLM`, on one device.
        tokenizer: its tokenizer, if text is to be turned into ids and back.
        row_format: of windows and compressed entries.
        index_format: of index keys.
        tail_dtype: of tails, float32 or bfloat16.
        step_width: most tokens of one slot in one step (q).
        rewind: how far back a slot can always be rewound (k).

    Attributes:
        model: the model given.
        schemas: one for each layer.
        fields: none.
        vocab_size: rows of the vocabulary.
        stop_tokens: ids that end an answer, from the generation config or the config.
        max_context: most positions the model was made for.
        device, dtype: of the embedding.
        tokenizer: the one given, or None.

    Raises:
        UnsupportedModel: naming the part that can't be served, or the option that can't be met.
        UnsupportedPlatform: for a device that has no such formats, or a transformers without
            DeepSeek-V4. All of them before anything of the model is changed or memory taken.
    """

    def __init__(
        self,
        model: DeepseekV4ForCausalLM,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        row_format: RowFormat = RowFormat.FP8,
        index_format: RowFormat = RowFormat.FP8,
        tail_dtype: torch.dtype = torch.float32,
        step_width: int = 1,
        rewind: int = 0,
    ) -> None:
        super().__init__(tokenizer)
        _check_class(model)
        embedding = model.model.embed_tokens.weight
        self.device, self.dtype = embedding.device, embedding.dtype
        family_of(model.config)
        self.schemas = schemas = read_entry_schemas(
            model.config,
            row_format=row_format,
            index_format=index_format,
            tail_dtype=tail_dtype,
            step_width=step_width,
            rewind=rewind,
        )
        _check_weights(model, self.device)
        _check_dims(model, schemas)
        check_device(schemas, self.device)
        self.model: Any = model.eval()
        self.vocab_size = int(model.config.vocab_size)
        self.max_context = int(model.config.max_position_embeddings)
        self.stop_tokens = stop_tokens_of(model)
        self.model.set_experts_implementation(EXPERTS)
        self._layers = [
            LayerAttention(layer.self_attn, schema)
            for layer, schema in zip(self.model.model.layers, schemas, strict=True)
        ]
        self._compressions = sorted({s.compression for s in schemas if s.compression})

    def named_tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers by name, as they are now: their addresses are in every capture."""
        gathered = {
            f"graphcache.projections.{index}.{number}": weight
            for index, layer in enumerate(self._layers)
            for number, weight in enumerate(layer.projections.weights)
        }
        return {
            **dict(self.model.named_parameters()),
            **dict(self.model.named_buffers()),
            **gathered,
        }

    @torch.no_grad()
    def prefill(self, batch: Batch) -> None:
        """Absorb the batch's tokens into the state; no head.

        Runs on the current stream without synchronizing.
        """
        self._body(batch)

    @torch.no_grad()
    def decode(self, batch: Batch) -> Tensor:
        """Absorb the batch's tokens into the state and return logits [T, V] in the model's dtype.

        Runs on the current stream without synchronizing; can be captured. Rows of padding hold
        finite numbers without meaning.
        """
        logits: Tensor = self.model.lm_head(self._body(batch))[0]
        return logits

    def _body(self, batch: Batch) -> Tensor:
        """Hidden states [1, T, hidden] after the last norm."""
        body = self.model.model
        tokens = batch.tokens.unsqueeze(0)
        embedded = body.embed_tokens(tokens)
        streams = embedded.unsqueeze(2).expand(-1, -1, body.config.hc_mult, -1).contiguous()
        turns = Rotations(body.rotary_emb, batch.positions, self._compressions)
        for index, (layer, attention) in enumerate(zip(body.layers, self._layers, strict=True)):
            with scope(f"layer {index}"):
                streams = _step_layer(layer, attention, streams, tokens, turns, batch, index)
                probe("output", streams)
        hidden: Tensor = body.norm(body.hc_head(streams))
        return hidden


def _step_layer(
    layer: Any,
    attention: LayerAttention,
    streams: Tensor,
    tokens: Tensor,
    turns: Rotations,
    batch: Batch,
    index: int,
) -> Tensor:
    post, mix, collapsed = layer.attn_hc(streams)
    state: Any = batch.state.layers[index]
    with scope("attention"):
        attended = attention(layer.input_layernorm(collapsed)[0], turns, batch, state)
        probe("output", attended)
    streams = _mix(streams, post, mix, attended.unsqueeze(0))
    post, mix, collapsed = layer.ffn_hc(streams)
    with scope("mlp"):
        fed = layer.mlp(layer.post_attention_layernorm(collapsed), input_ids=tokens)
        probe("output", fed)
    return _mix(streams, post, mix, fed)


def _mix(streams: Tensor, post: Tensor, mix: Tensor, output: Tensor) -> Tensor:
    """The residual streams [1, T, n, hidden] mixed among themselves, with a block's output."""
    dtype = streams.dtype
    mixed = torch.matmul(mix.to(dtype).transpose(-1, -2), streams)
    return post.to(dtype).unsqueeze(-1) * output.unsqueeze(-2) + mixed


class Rotations:
    """Every rotation that a batch's layers need, computed once.

    Args:
        rotary: transformers' `DeepseekV4RotaryEmbedding`.
        positions: [T] int32.
        compressions: of the layers.

    Attributes:
        main, compressed: at the positions, of layers with a window only and of the others.
        block: by compression, at the first position of the block that a token completes.
    """

    def __init__(self, rotary: Any, positions: Tensor, compressions: list[int]) -> None:
        self.main = _rotation(rotary, positions, "main")
        self.compressed = _rotation(rotary, positions, "compress")
        # A token that completes no block has one here all the same, which nobody uses.
        self.block = {m: _rotation(rotary, positions + 1 - m, "compress") for m in compressions}


def _rotation(rotary: Any, positions: Tensor, kind: str) -> Rotation:
    frequencies = getattr(rotary, f"{kind}_inv_freq").float()
    scaling = float(getattr(rotary, f"{kind}_attention_scaling"))
    angle = positions.float().unsqueeze(1) * frequencies
    return Rotation(angle.cos() * scaling, angle.sin() * scaling)


class LayerAttention:
    """One layer's attention: transformers' weights, this package's state.

    Args:
        module: transformers' `DeepseekV4Attention`.
        schema: of the layer.

    Attributes:
        projections: of the hidden states, gathered.
    """

    def __init__(self, module: Any, schema: LayerCacheSchema) -> None:
        self._module = module
        self._schema = schema
        # The config's: what the norms call theirs changes with transformers' versions.
        self._eps = float(module.config.rms_norm_eps)
        sources = [module.q_a_proj, module.kv_proj]
        self._compressor = module.compressor
        self._indexer = None
        if schema.compression:
            sources += [self._compressor.kv_proj, self._compressor.gate_proj]
        if schema.indexer is not None:
            self._indexer = self._compressor.indexer
            scorer = self._indexer.scorer
            sources += [self._indexer.kv_proj, self._indexer.gate_proj, scorer.weights_proj]
            self._score_scale = float(scorer.softmax_scale * scorer.weights_scaling)
        self.projections = _Projections(sources)
        # As transformers loads them; a model cast as a whole has others.
        module.sinks.data = module.sinks.data.float()

    def __call__(self, hidden: Tensor, turns: Rotations, batch: Batch, state: EntryLayer) -> Tensor:
        """hidden [T, hidden] -> [T, hidden]."""
        module, schema = self._module, self._schema
        tokens = hidden.shape[0]
        rotation = turns.compressed if schema.compression else turns.main
        projected = self.projections(hidden)
        low_rank = module.q_a_norm(projected[0])
        query = module.q_b_proj(low_rank).view(tokens, -1, schema.entry_head_dim)
        query = rotate_heads(query, rotation, norm=True, eps=self._eps)
        compressor = indexer = None
        if schema.compression:
            compressor = CompressorInputs(
                projected[2], projected[3], self._compressor.position_bias,
                self._compressor.kv_norm.weight,
            )  # fmt: skip
        if self._indexer is not None:
            indexer = self._index_inputs(low_rank, projected, rotation)
        attended = state.attend(
            query,
            EntryInputs(
                projected[1],
                module.kv_norm.weight,
                rotation,
                turns.block.get(schema.compression),
                compressor,
                indexer,
                self._eps,
            ),
            batch,
            scale=float(module.scaling),
            sinks=module.sinks,
        )
        grouped = module.o_a_proj(attended.view(tokens, module.config.o_groups, -1))
        output: Tensor = module.o_b_proj(grouped.flatten(1))
        return output

    def _index_inputs(
        self, low_rank: Tensor, projected: list[Tensor], rotation: Rotation
    ) -> IndexInputs:
        indexer: Any = self._indexer
        query = indexer.q_b_proj(low_rank).view(low_rank.shape[0], -1, indexer.head_dim)
        return IndexInputs(
            rotate_heads(query, rotation),
            projected[6].float() * self._score_scale,
            CompressorInputs(
                projected[4], projected[5], indexer.position_bias, indexer.kv_norm.weight
            ),
        )


class _Projections:
    """Linear maps of one input, gathered by dtype: one matrix product for each.

    Attributes:
        weights: the gathered matrices; the modules' weights are views of them.
    """

    def __init__(self, modules: list[nn.Linear]) -> None:
        self.weights: list[Tensor] = []
        self._places: list[list[tuple[int, int]]] = []
        for dtype in dict.fromkeys(module.weight.dtype for module in modules):
            members = [i for i, module in enumerate(modules) if module.weight.dtype is dtype]
            gathered = _gather_weights([modules[i] for i in members])
            widths = [modules[i].out_features for i in members]
            self.weights.append(gathered)
            self._places.append(list(zip(members, widths, strict=True)))
        self._count = len(modules)

    def __call__(self, hidden: Tensor) -> list[Tensor]:
        """Each map's output [T, n], views of what all gave together."""
        outputs: list[Tensor] = [hidden] * self._count
        for weight, places in zip(self.weights, self._places, strict=True):
            together = F.linear(hidden.to(weight.dtype), weight)
            parts = together.split([width for _, width in places], dim=1)
            for (index, _), part in zip(places, parts, strict=True):
                outputs[index] = part
        return outputs


def _gather_weights(modules: list[nn.Linear]) -> Tensor:
    """One matrix with the modules' weights, which become views of it: no second copy stays."""
    parts = [module.weight.detach() for module in modules]
    first = parts[0]
    rows = sum(part.shape[0] for part in parts)
    if _follow_each_other(parts):
        # Gathered before, by another decoder of the same model.
        return first.as_strided((rows, first.shape[1]), first.stride())
    gathered = torch.cat(parts)
    for module, part in zip(modules, gathered.split([p.shape[0] for p in parts]), strict=True):
        module.weight.data = part
    return gathered


def _follow_each_other(parts: list[Tensor]) -> bool:
    """Whether contiguous tensors lie in one storage, each where the one before it ends."""
    storage = parts[0].untyped_storage().data_ptr()
    place = parts[0].data_ptr()
    for part in parts:
        same = part.untyped_storage().data_ptr() == storage and part.is_contiguous()
        if not same or part.data_ptr() != place:
            return False
        place += part.nbytes
    return True


def _check_class(model: object) -> None:
    try:
        from transformers import DeepseekV4ForCausalLM
    except ImportError as error:
        raise UnsupportedPlatform(
            "this transformers has no DeepSeek-V4: pip install 'transformers>=5.17,<6'"
        ) from error
    if not isinstance(model, DeepseekV4ForCausalLM):
        raise UnsupportedModel(
            f"expected a built DeepseekV4ForCausalLM, got {type(model).__name__}"
        )


def _check_dims(model: Any, schemas: tuple[LayerCacheSchema, ...]) -> None:
    """What transformers builds all the same, and the first step would trip over."""
    config = model.config
    width = config.num_attention_heads * config.head_dim
    if width % config.o_groups:
        raise UnsupportedModel(
            f"{config.num_attention_heads} heads of {config.head_dim} don't make "
            f"o_groups={config.o_groups} even groups"
        )
    rotated = {schema.rope_dim for schema in schemas}
    for kind in ("main", "compress"):
        turned = 2 * getattr(model.model.rotary_emb, f"{kind}_inv_freq").numel()
        if rotated - {turned}:
            raise UnsupportedModel(
                f"rope_parameters[{kind!r}] rotates {turned} dims, and the config says "
                f"{', '.join(map(str, rotated))}: give it the config's partial_rotary_factor"
            )


def _check_weights(model: nn.Module, device: torch.device) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise UnsupportedModel(f"the model is not built: {name} has no memory (device meta)")
        if parameter.device != device:
            raise UnsupportedModel(
                f"weights lie on {device} and {parameter.device} ({name}); one device is served"
            )
        if not parameter.is_floating_point() or parameter.dtype.itemsize < 2:
            raise UnsupportedModel(f"quantised weights are not served: {name} is {parameter.dtype}")
        if parameter.dtype not in WEIGHT_DTYPES:
            raise UnsupportedModel(
                f"weights are float32 or bfloat16, and {name} is {parameter.dtype}"
            )
