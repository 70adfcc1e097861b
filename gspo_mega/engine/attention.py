"""Core attention and norm without Transformer Engine: packed sequences on torch's SDPA.

`PackedAttention` and `TorchNorm` replace `TEDotProductAttention` and `TENorm`, which half precision on a GPU uses. They
take the same packed (`thd`) input and context-parallel layout, so all code above them is the same. `HeadsNorm` is a
norm of queries and keys that neither has. Packs whose rows share prefixes are beyond Transformer Engine's kernels, so
its core attention leaves them to `attend` (`forest_dot_product_attention`), which chooses by device.
"""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any, cast

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch.autograd.function import once_differentiable

from gspo_mega.cpu import batch_invariant, packed_sdpa
from gspo_mega.cpu.forest_attention import forest_of
from gspo_mega.engine.flex_attention import flex_attend
from gspo_mega.engine.process_groups import tensor_group

if TYPE_CHECKING:
    import torch.distributed as dist
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection


class ZeroCentredNorm(torch.nn.Module):
    """RMSNorm that multiplies by 1 + weight, computed in fp32 and rounded once: Qwen3-Next's."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(size, dtype=dtype))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x [..., size]; the dtype stays."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * (1.0 + self.weight.float())).to(x.dtype)


class _NormInPieces(torch.autograd.Function):
    """RMSNorm of x [N, width] by weight [width], both bf16, in fp32 and rounded once, some rows at a time, so that what
    is widened stays in the processor's cache. The output has the bits of torch's, which widens all rows.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        output, scales, wide_weight = torch.empty_like(x), x.new_empty(len(x), 1, dtype=torch.float32), weight.float()
        step = max(1, _CACHED_NUMBERS // x.shape[1])
        for rows, out, scale in zip(x.split(step), output.split(step), scales.split(step), strict=True):
            wide = rows.float()
            torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps), out=scale)
            out.copy_(wide.mul_(scale).mul_(wide_weight))
        ctx.save_for_backward(x, weight, scales)
        return output

    @staticmethod
    @once_differentiable
    # `once_differentiable` makes `ctx` positional; autograd passes it so.
    def backward(ctx, *grads: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, scales = ctx.saved_tensors
        grad_x, wide_weight = torch.empty_like(x), weight.float()
        grad_weight = torch.zeros_like(wide_weight)
        step = max(1, _CACHED_NUMBERS // x.shape[1])
        pieces = (x.split(step), grads[0].split(step), grad_x.split(step), scales.split(step))
        for rows, grad, out, scale in zip(*pieces, strict=True):
            normed, wide = rows.float().mul_(scale), grad.float()
            product = wide * normed
            grad_weight += product.sum(0)
            mean = product.mv(wide_weight).div_(-x.shape[1])[:, None]
            out.copy_(wide.mul_(wide_weight).addcmul_(normed, mean).mul_(scale))
        return grad_x, grad_weight.to(weight.dtype), None


_CACHED_NUMBERS = 2**16


class NormInPieces(torch.nn.RMSNorm):
    """torch's RMSNorm; of bf16 on a CPU in a third of its time, forward and backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not (x.is_cpu and x.dtype == self.weight.dtype == torch.bfloat16) or self.eps is None:
            return super().forward(x)
        return _NormInPieces.apply(x.reshape(-1, x.shape[-1]), self.weight, self.eps).view(x.shape)


class TorchNorm:
    """RMSNorm or LayerNorm whose parameters are marked as seeing sequence-parallel activations.

    Megatron all-reduces the gradients of marked parameters over the tensor group. torch's own norms carry no mark, and
    Megatron refuses them under sequence parallelism.
    """

    def __new__(
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: object
    ) -> torch.nn.Module:
        norm_class = NormInPieces if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        if norm_class is NormInPieces and config.activation_func is batch_invariant.silu:
            norm_class = torch.nn.RMSNorm  # `engine.batch_invariant`: the very operation of the servers
        if config.layernorm_zero_centered_gamma:
            norm = ZeroCentredNorm(hidden_size, eps, config.params_dtype)
        else:
            norm = norm_class(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            marked: Any = parameter  # Megatron's mark is an attribute that torch's class does not declare
            marked.sequence_parallel = config.sequence_parallel
        return norm


class HeadsNorm(MegatronModule):
    """RMSNorm of queries or keys over all heads together, those of all tensor ranks (MiniMax-M2, OLMo).

    `weight` [heads of this tensor rank x head] has this rank's part. `forward` takes and returns [t, batch, heads of
    this tensor rank, head] and computes in fp32. Collective over the tensor group.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, num_heads: int) -> None:
        super().__init__(config=config)
        self.tp_group = tensor_group()
        self.eps, self.width = eps, num_heads * hidden_size
        place = torch.device("cpu") if config.use_cpu_initialization else torch.device("cuda")
        size = self.width // self.tp_group.size()
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype, device=place))

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        wide = heads.float()
        squares = wide.square().sum(dim=(-2, -1), keepdim=True)
        if self.tp_group.size() > 1:
            # The sum goes into the heads of every rank, so its gradient is a sum over the ranks, too.
            squares = copy_to_tensor_model_parallel_region(
                reduce_from_tensor_model_parallel_region(squares, self.tp_group), self.tp_group
            )
        normed = wide * torch.rsqrt(squares / self.width + self.eps)
        return (normed * self.weight.view(heads.shape[-2:])).to(heads.dtype)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Megatron's sharded state, cut over the tensor group."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


# The attribute by which Megatron knows that positions are scaled by YaRN.
_SCALED = "yarn_rotary_scaling_factor"


class OutputNormLayer(TransformerLayer):
    """Megatron's layer with norms of what its attention and its MLP return (OLMo). If the model's positions are scaled
    (YaRN), layers with a sliding window have unscaled ones.
    """

    def __init__(self, config: TransformerConfig, *args: Any, layer_number: int = 1, **kwargs: Any) -> None:
        vp_stage, pattern = kwargs.get("vp_stage"), cast(Any, config.window_attn_skip_freq)
        number = layer_number + get_transformer_layer_offset(config, vp_stage)
        own = is_layer_window_attention(config.window_size, pattern, number) and _SCALED in vars(config)
        if own:
            config = copy.copy(config)
            del vars(config)[_SCALED]  # Megatron would multiply cosines and sines
        super().__init__(config, *args, layer_number=layer_number, **kwargs)
        self.own_positions = _unscaled_positions(config) if own else None
        parts: Any = ((self.self_attention, "post_self_attn_layernorm"), (self.mlp, "post_mlp_layernorm"))
        for part, name in parts:
            norm = TorchNorm(config, config.hidden_size, config.layernorm_epsilon)
            self.add_module(name, norm)
            part.register_forward_hook(lambda _part, _inputs, output, norm=norm: (norm(output[0]), *output[1:]))

    def forward(self, *args: Any, rotary_pos_emb: Any = None, **kwargs: Any) -> Any:
        if self.own_positions is not None:
            rotary_pos_emb = self.own_positions(len(rotary_pos_emb), packed_seq=True)
            params = kwargs.get("packed_seq_params")
            if (forest := None if params is None else forest_of(params)) is not None:
                rotary_pos_emb = rotary_pos_emb.index_select(0, forest.depths)
        return super().forward(*args, rotary_pos_emb=rotary_pos_emb, **kwargs)


def _unscaled_positions(config: Any) -> RotaryEmbedding:
    """The rotary positions of the model without YaRN, whose base is in `own_rotary_base` (`set_yarn`)."""
    return RotaryEmbedding(
        config.kv_channels,
        rotary_percent=1.0,
        rotary_base=config.own_rotary_base,
        use_cpu_initialization=config.use_cpu_initialization,
    )


def norm_outputs(layer: ModuleSpec) -> None:
    """Put norms after attention and MLP in place of those before them into the spec of a layer, in place."""
    layer.module = OutputNormLayer
    parts: Any = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp


def norm_all_heads(attention: Any, num_heads: int, num_kv_heads: int) -> None:
    """Put norms over all heads into the submodules of a layer's attention, in place."""
    attention.q_layernorm = ModuleSpec(module=HeadsNorm, params=dict(num_heads=num_heads))
    attention.k_layernorm = ModuleSpec(module=HeadsNorm, params=dict(num_heads=num_kv_heads))


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    params: PackedSeqParams,
    context_group: dist.ProcessGroup | None,
    softmax_scale: float | None,
    sinks: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Compute `packed_sdpa.attend`; on a GPU FlexAttention takes packs whose rows share prefixes."""
    forest = forest_of(params)
    if forest is None or not query.is_cuda:
        return packed_sdpa.attend(query, key, value, params, context_group, softmax_scale, sinks, window)
    key, value = (packed_sdpa.of_whole_pack(x, context_group) for x in (key, value))
    return flex_attend(query, key, value, forest, softmax_scale, sinks, window)


@functools.cache
def forest_dot_product_attention() -> type:
    """Transformer Engine's core attention, of which packs whose rows share prefixes go to `attend`."""
    # This module imports Transformer Engine; `require_precision` has checked that it is installed.
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    class ForestDotProductAttention(TEDotProductAttention):
        def forward(
            self,
            query,
            key,
            value,
            attention_mask,
            attn_mask_type,
            attention_bias=None,
            packed_seq_params=None,
            num_splits=None,
        ):
            # On a CPU this package's kernels stand behind the module.
            if packed_seq_params is None or forest_of(packed_seq_params) is None or not query.is_cuda:
                return super().forward(
                    query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params, num_splits
                )
            own: Any = self
            left = -1 if own.window_size is None else own.window_size[0]
            window = left + 1 if left >= 0 else None
            return attend(
                query, key, value, packed_seq_params, own.cp_group, own.softmax_scale, own.softmax_offset, window
            )

    return ForestDotProductAttention


class PackedAttention(MegatronModule):
    """`attend` as the core attention of one of Megatron's layers. `softmax_offset` [heads of this tensor rank]: the
    layer's sinks, or None.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number,
        attn_mask_type,
        attention_type,
        attention_dropout=None,
        softmax_scale=None,
        cp_comm_type=None,
        *,
        pg_collection: ProcessGroupCollection,
        k_channels=None,
        v_channels=None,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        self.context_group = pg_collection.cp
        self.tp_group = pg_collection.tp
        pattern: Any = config.window_attn_skip_freq  # Megatron takes None, too
        is_windowed = is_layer_window_attention(config.window_size, pattern, layer_number)
        self.window = config.window_size[0] + 1 if is_windowed and config.window_size is not None else None
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // self.tp_group.size()
            place = torch.device("cpu") if config.use_cpu_initialization else torch.device("cuda")
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype, device=place))

    def forward(
        self,
        query,
        key,
        value,
        attention_mask,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=None,
    ):
        if packed_seq_params is None:
            raise ValueError("PackedAttention takes packed sequences only; packed_seq_params is None")
        return attend(
            query,
            key,
            value,
            packed_seq_params,
            self.context_group,
            self.softmax_scale,
            self.softmax_offset,
            self.window,
        )

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Megatron's sharded state of the sinks, cut over the tensor group as in Megatron's own attention."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
