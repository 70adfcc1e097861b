"""Megatron GPT chunks that return hidden states, built from a ModelSpec and a layout.

`build_chunks` makes this rank's chunks, and `transformer_config` the Megatron configuration that they need. After them
come the layer specs, and then the parts of a model that Megatron's defaults do not cover: multi-head latent attention
(DeepSeek), the layers of gpt-oss (biases everywhere, sinks, sliding windows, a clamped activation, YaRN), rotary
frequencies for positions that were stretched after training (Llama 3.1), and Megatron's marks on parameters, which say
how often a gradient counts in the norm and where it is summed.

Weights come from `gspo_mega.checkpoint`. The LM head is applied by `log_probs.py`, in chunks, not here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from megatron.core.activations import quick_gelu
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.post_training.modelopt.layers import Linear as ReplicatedLinear
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import nn

from gspo_mega.base.errors import ModelError
from gspo_mega.config.schema import Config, Moe, Parallel
from gspo_mega.cpu.backend import is_cpu_backend
from gspo_mega.cpu.forest_attention import ForestNodes, forest_of
from gspo_mega.engine.adapters import Adapter
from gspo_mega.engine.attention import (
    PackedAttention,
    TorchNorm,
    forest_dot_product_attention,
    norm_all_heads,
    norm_outputs,
)
from gspo_mega.engine.delta_net import GatedAttention, complete_delta_spec, delta_settings, with_plain_gates
from gspo_mega.engine.invariant_layers import ACTIVATION, is_batch_invariant, use_invariant_parts
from gspo_mega.engine.precision import (
    dispatcher_settings,
    fusion_choices,
    fusion_settings,
    head_without_apex,
    log_backends,
    mlp_submodules,
    parameter_dtype,
    precision_settings,
    require_precision,
    uses_transformer_engine,
)
from gspo_mega.engine.process_groups import ParallelGroups, stage_flags
from gspo_mega.engine.routing import megatron_coefficient
from gspo_mega.models.families import FAMILIES
from gspo_mega.models.hf_fields import LATENT_NORM_EPS
from gspo_mega.models.parameter_names import canonical_parameters, table_by_parameter
from gspo_mega.models.spec import LatentAttention, ModelSpec, MoeSpec, RopeScaling, YarnScaling
from gspo_mega.models.tensors import TensorEntry, padded_vocab_size


class PolicyModel(GPTModel):
    """A Megatron GPT whose last stage returns hidden states [t, 1, H] of the model's dtype instead of logits.

    t counts this context rank's tokens; with sequence parallelism, this tensor rank's share of them. `output_layer`
    still owns the LM head weight.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.adapters = torch.nn.ModuleDict()  # by the layer that each belongs to; empty without `lora`

    def low_rank(self) -> list[Adapter]:
        """The low-rank adapters of this chunk's layers."""
        return [cast(Adapter, adapter) for adapter in self.adapters.values()]

    def _preprocess(self, *args: Any, packed_seq_params: PackedSeqParams | None = None, **kwargs: Any) -> Any:
        """As Megatron's. For a forest, the rotary embedding has an entry for each computed token, by its depth."""
        prepared = super()._preprocess(*args, packed_seq_params=cast(Any, packed_seq_params), **kwargs)
        forest = None if packed_seq_params is None else forest_of(packed_seq_params)
        decoder_input, rotary, *rest = prepared
        if forest is None or rotary is None:  # latent attention has an embedding in each layer
            return prepared
        return decoder_input, rotary.index_select(0, forest.depths), *rest

    def _postprocess(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return hidden_states

    def await_parameters(self) -> None:
        """Wait for parameters that other ranks are still sending; data parallelism replaces this method if there are
        any.

        Call it before reading parameters without calling the module that owns them.
        """

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Megatron's sharded state of the model's own weights, without adapters (`sharded_adapters` has theirs)."""
        self.await_parameters()
        state = super().sharded_state_dict(*args, **kwargs)
        return {name: part for name, part in state.items() if not name.startswith("adapters.")}

    def head_weight(self) -> torch.Tensor:
        """The LM head of the last stage, its own or the tied embedding: [padded vocabulary / tensor, H] of the model's
        dtype, this tensor rank's part. Raises ValueError on other stages.
        """
        self.await_parameters()
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        if weight is None:
            raise ValueError("this chunk holds no LM head; only the last pipeline stage does")
        return weight


def build_chunks(
    megatron_config: TransformerConfig,
    spec: ModelSpec,
    groups: ParallelGroups,
    model: type[PolicyModel] = PolicyModel,
    *,
    separate_norms: bool = False,
) -> list[PolicyModel]:
    """This rank's model chunks: one, or one per virtual pipeline stage. Parameters are untrained.

    `separate_norms`: Transformer Engine's layers do not fuse a norm into the linear layer after it, because adapters
    need that layer's input. Megatron's plain layers never do.

    Collective over the embedding group if embeddings are tied over several pipeline stages.
    """
    virtual = megatron_config.virtual_pipeline_model_parallel_size
    chunks = []
    for stage in [None] if virtual is None else range(virtual):
        has_embedding, has_head = stage_flags(stage)
        with head_without_apex():
            chunk = model(
                megatron_config,
                cast(ModuleSpec, _layer_specs(megatron_config, spec, stage, separate_norms)),  # Megatron takes either
                vocab_size=padded_vocab_size(spec.vocab_size, groups.tensor.size),
                max_sequence_length=spec.max_position_embeddings,
                pre_process=has_embedding,
                post_process=has_head,
                parallel_output=True,
                share_embeddings_and_output_weights=spec.tie_word_embeddings,
                position_embedding_type=cast(Any, position_type(spec)),
                rotary_percent=spec.rotary_share,
                rotary_base=cast(int, spec.rope_theta),  # Megatron declares int and computes with a float
                vp_stage=stage,
            )
        if isinstance(spec.rope_scaling, RopeScaling):
            assert isinstance(chunk.rotary_pos_emb, RotaryEmbedding)
            scale_rotary(chunk.rotary_pos_emb, spec.rope_scaling)
        let_gradients_reach_expert_biases(chunk)
        chunk.model_type = ModelType.encoder_or_decoder
        if not is_cpu_backend():
            chunk.cuda(torch.cuda.current_device())
        chunks.append(chunk)
    mark_parameters(spec, groups, chunks)
    return chunks


def transformer_config(config: Config, spec: ModelSpec) -> TransformerConfig:
    """Megatron's configuration of this model in this layout and precision.

    Raises ModelError if this machine cannot compute in that precision, or lacks a library for a chosen operation.
    """
    log_backends()
    require_precision(config)
    parallel = config.parallel
    dtype, has_experts = parameter_dtype(config.precision, config.certify), spec.moe is not None
    precision = precision_settings(config.precision, config.engine, config.fp8, dtype)
    settings: dict = dict(
        **precision,
        **fusion_settings(fusion_choices(config, has_experts), has_experts),
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        ffn_hidden_size=spec.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=spec.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=ACTIVATION if config.engine.batch_invariant else torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=spec.attention_bias,
        # Megatron would sum gradients of norms over all heads over the tensor group, as if every rank had them whole.
        qk_layernorm=spec.qk_norm and not FAMILIES[spec.family].norms_all_heads,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        # Transformer Engine would quantise FP8 parameters before Megatron's initialisation on the host fills them.
        use_cpu_initialization=is_cpu_backend() and precision["transformer_impl"] == "local",
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
        num_layers_in_first_pipeline_stage=parallel.first_stage_layers,
        num_layers_in_last_pipeline_stage=None if _first_stage_implies_last(parallel) else parallel.last_stage_layers,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        sequence_parallel=parallel.sequence and parallel.tensor > 1,
        # The loss is divided by its global denominator before the backward pass: no further averaging.
        calculate_per_token_loss=True,
        **dispatcher_settings(config.parallel),
        # Packs differ in length, so pipeline stages announce shapes.
        variable_seq_lengths=parallel.pipeline > 1,
        # The schedules must not free outputs that gloo has not finished sending.
        deallocate_pipeline_outputs=not is_cpu_backend(),
        # Two interleaved stages exchange tensors in both directions at once. Batched transfers then confuse the two on
        # gloo.
        overlap_p2p_comm=parallel.virtual_pipeline is not None,
        batch_p2p_comm=parallel.virtual_pipeline is None,
    )
    if config.recompute.granularity == "full":
        settings.update(
            recompute_granularity="full", recompute_method="uniform", recompute_num_layers=config.recompute.num_layers
        )
    if spec.moe is not None:
        settings |= _expert_settings(config.moe, spec, spec.moe) | {
            "moe_grouped_gemm": settings["transformer_impl"] == "transformer_engine"
        }
    if spec.latent is None:
        found = TransformerConfig(**settings | biased_settings(spec) | delta_settings(spec))
        set_yarn(found, spec)
        return found
    return MLATransformerConfig(**settings | latent_settings(spec, spec.latent))


def _first_stage_implies_last(parallel: Parallel) -> bool:
    """Whether the first stage's layers imply the last stage's: there are two stages, and both are given. Megatron would
    divide by the number of stages in between.
    """
    return parallel.pipeline == 2 and parallel.first_stage_layers is not None


def _expert_settings(routing: Moe, spec: ModelSpec, moe: MoeSpec) -> dict:
    grouped = moe.groups_per_token < moe.num_groups
    return dict(
        num_moe_experts=moe.num_experts,
        moe_router_topk=moe.experts_per_token,
        moe_ffn_hidden_size=moe.expert_intermediate_size,
        # A list, set only if there are dense layers: the list changes the names in checkpoints.
        **(
            dict(moe_layer_freq=[int(spec.has_experts(layer)) for layer in range(spec.num_layers)])
            if moe.num_dense_layers
            else {}
        ),
        moe_shared_expert_intermediate_size=moe.shared_intermediate_size or None,
        moe_shared_expert_gate=moe.shared_gate,
        moe_router_dtype="fp32",
        moe_router_score_function=moe.score_function,
        # `routing.py` moves the bias. Megatron would do so before the optimizer step, and count padding.
        moe_router_enable_expert_bias=moe.expert_bias,
        moe_router_bias_update_rate=0.0,
        moe_router_num_groups=moe.num_groups if grouped else None,
        moe_router_group_topk=moe.groups_per_token if grouped else None,
        moe_router_topk_scaling_factor=moe.scaling_factor if moe.scaling_factor != 1.0 else None,
        # Softmax over the chosen k equals the renormalised softmax over all experts. Without renormalisation the
        # softmax comes first.
        moe_router_pre_softmax=moe.score_function == "softmax" and not moe.norm_topk_prob,
        moe_router_load_balancing_type=routing.load_balancing,
        moe_aux_loss_coeff=megatron_coefficient(routing),
        moe_z_loss_coeff=routing.z_loss_coefficient or None,
        # Routes are always recorded, and replayed if configured. A fused router would bypass the replay.
        moe_enable_routing_replay=True,
        moe_router_fusion=False,
    )


# --- Layer specs ---------------------------------------------------------------------------------------------


def _layer_specs(
    megatron_config: TransformerConfig, spec: ModelSpec, virtual_stage: int | None, separate_norms: bool
) -> TransformerBlockSubmodules:
    first = get_transformer_layer_offset(megatron_config, vp_stage=virtual_stage)
    count = get_num_layers_to_build(megatron_config, vp_stage=virtual_stage)

    def make(has_experts: bool, has_delta_net: bool) -> ModuleSpec:
        if uses_transformer_engine(megatron_config):
            layer = _transformer_engine_layer(megatron_config, spec, has_experts, has_delta_net, separate_norms)
        else:
            layer = _plain_layer(megatron_config, spec, has_experts, has_delta_net)
        if FAMILIES[spec.family].norms_all_heads:
            norm_all_heads(_submodules(_submodules(layer).self_attention), spec.num_heads, spec.num_kv_heads)
        if FAMILIES[spec.family].norms_outputs:
            norm_outputs(layer)
        return layer

    # All layers of a kind share one spec.
    wanted = [(spec.has_experts(layer), spec.has_delta_net(layer)) for layer in range(first, first + count)]
    kinds = {kind: make(*kind) for kind in set(wanted)}
    layers = [kinds[kind] for kind in wanted]
    norm: Any = norm_class(megatron_config)  # Megatron declares a spec or a module and builds a class as well
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def _plain_layer(
    megatron_config: TransformerConfig, spec: ModelSpec, has_experts: bool, has_delta_net: bool
) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        num_experts=megatron_config.num_moe_experts if has_experts else None,
        moe_grouped_gemm=False,
        qk_layernorm=megatron_config.qk_layernorm,
        multi_latent_attention=spec.latent is not None,
        normalization=megatron_config.normalization,
    )
    parts = _submodules(layer)
    parts.input_layernorm = parts.pre_mlp_layernorm = TorchNorm
    attention = _submodules(parts.self_attention)
    attention.core_attention = PackedAttention
    if spec.latent is not None:
        # Replicated on every tensor rank, as in Transformer Engine, so that a checkpoint fits both.
        attention.linear_q_down_proj = attention.linear_kv_down_proj = ReplicatedLinear
        complete_latent_spec(parts.self_attention)
    elif megatron_config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = TorchNorm
    if spec.output_gate:
        parts.self_attention.module = GatedAttention
    if is_batch_invariant(megatron_config):
        use_invariant_parts(attention, parts)
    if has_delta_net:
        complete_delta_spec(layer, TorchNorm)
    return layer


def _transformer_engine_layer(
    megatron_config: TransformerConfig,
    spec: ModelSpec,
    has_experts: bool,
    has_delta_net: bool,
    separate_norms: bool,
) -> ModuleSpec:
    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=megatron_config.num_moe_experts if has_experts else None,
        moe_grouped_gemm=megatron_config.moe_grouped_gemm,
        qk_layernorm=megatron_config.qk_layernorm,
        multi_latent_attention=spec.latent is not None,
    )
    _submodules(_submodules(layer).self_attention).core_attention = forest_dot_product_attention()
    if spec.latent is not None:
        complete_latent_spec(_submodules(layer).self_attention)
    if spec.output_gate:
        _submodules(layer).self_attention.module = GatedAttention
    if separate_norms:
        _separate_norms(_submodules(layer), spec, has_experts, norm_class(megatron_config))
    if has_delta_net:
        # This module imports Transformer Engine; `require_precision` has checked that it is installed.
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

        column: Any = TEColumnParallelLinear
        if megatron_config.fp8:
            column = with_plain_gates(column)
        complete_delta_spec(layer, norm_class(megatron_config), (column, TERowParallelLinear))
    return layer


def _separate_norms(parts: Any, spec: ModelSpec, has_experts: bool, norm: type) -> None:
    """Take the norms out of the linear layers of Transformer Engine's layer, in place. `parts`: its submodules.

    Latent attention and experts have norms of their own anyway.
    """
    # This module imports Transformer Engine; `require_precision` has checked that it is installed.
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

    fused = {}
    if spec.latent is None:
        parts.input_layernorm = norm
        _submodules(parts.self_attention).linear_qkv = TEColumnParallelLinear
        fused["input_layernorm."] = "self_attention.linear_qkv.layer_norm_"
    if not has_experts:
        parts.pre_mlp_layernorm = norm
        mlp_submodules(parts.mlp).linear_fc1 = TEColumnParallelLinear
        fused["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    # A checkpoint names them as if they were fused.
    parts.sharded_state_dict_keys_map = fused


def norm_class(config: TransformerConfig) -> type:
    """The class for norms of this configuration: Transformer Engine's, or this package's if Transformer Engine's layers
    are not used.
    """
    if not uses_transformer_engine(config):
        return TorchNorm
    # This module imports Transformer Engine; `require_precision` has checked that it is installed.
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def _submodules(spec: ModuleSpec) -> Any:
    """The submodules of a module spec. Megatron declares `object`, because each module has a class of its own."""
    return spec.submodules


# --- Latent attention ----------------------------------------------------------------------------------------


class LatentNorm:
    """The norm of a latent. It has an epsilon of its own, so it is not fused into the projection after it."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float, **unused: object) -> torch.nn.Module:
        return norm_class(config)(config=config, hidden_size=hidden_size, eps=LATENT_NORM_EPS)


def latent_settings(spec: ModelSpec, latent: LatentAttention) -> dict:
    """The settings of Megatron's MLATransformerConfig that define latent attention. They override those of other
    models. The attention is Megatron's; its core is Transformer Engine's, or `attention.py`'s PackedAttention.
    """
    yarn = spec.rope_scaling if isinstance(spec.rope_scaling, YarnScaling) else None
    rope: dict = dict(rope_type="rope", rotary_scaling_factor=1.0)
    if yarn is not None:
        rope = dict(
            rope_type="yarn",
            rotary_scaling_factor=yarn.factor,
            original_max_position_embeddings=yarn.original_positions,
            beta_fast=yarn.beta_fast,
            beta_slow=yarn.beta_slow,
            mscale=yarn.attention_scale,
            mscale_all_dim=yarn.attention_scale_all,
        )
    return rope | dict(
        rotary_base=spec.rope_theta,
        q_lora_rank=latent.query_rank,
        kv_lora_rank=latent.key_value_rank,
        qk_head_dim=latent.content_dim,
        qk_pos_emb_head_dim=latent.rotary_dim,
        v_head_dim=latent.value_dim,
        kv_channels=latent.value_dim,
        # Megatron's fused kernel supports YaRN only.
        apply_rope_fusion=False,
    )


class LatentAttentionLayer(MLASelfAttention):
    """Megatron's layer with the norms and projections that the layer spec names. In a forest it takes the rotary
    embedding of each computed token by its depth.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._forest: ForestNodes | None = None
        self.rotary_pos_emb.register_forward_hook(self._by_depth)

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: Any = None,
        position_ids: Any = None,
        packed_seq_params: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        self._forest = None if packed_seq_params is None else forest_of(packed_seq_params)
        try:
            return super().get_query_key_value_tensors(
                hidden_states, key_value_states, position_ids, packed_seq_params, *args, **kwargs
            )
        finally:
            self._forest = None

    def _by_depth(self, _module: nn.Module, _inputs: object, output: Any) -> Any:
        if self._forest is None:
            return output
        if isinstance(output, tuple):  # with YaRN's factor
            return output[0].index_select(0, self._forest.depths), *output[1:]
        return output.index_select(0, self._forest.depths)

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, object]:
        # Only Megatron 0.19 calls this. Its own version cannot norm only keys and values if queries have no latent.
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}


def complete_latent_spec(attention: ModuleSpec) -> None:
    """Put this module's layer and norms into the spec that Megatron made for a layer's latent attention, in place."""
    attention.module = LatentAttentionLayer
    parts = _submodules(attention)
    parts.q_layernorm = parts.kv_layernorm = LatentNorm


# --- Biases, sinks, windows and YaRN -------------------------------------------------------------------------


def biased_settings(spec: ModelSpec) -> dict[str, Any]:
    """The settings of TransformerConfig for biases, the clamped activation, sinks and sliding windows; none for a model
    without them.
    """
    settings: dict[str, Any] = {}
    if spec.linear_bias:
        # Megatron's fused activation gives every token of an expert the bias's whole gradient.
        settings |= dict(add_bias_linear=True, bias_activation_fusion=False)
    if spec.swiglu_limit is not None:
        settings |= dict(
            activation_func=quick_gelu, glu_linear_offset=1.0, activation_func_clamp_value=spec.swiglu_limit
        )
    if spec.sinks:
        settings |= dict(softmax_type="learnable")
    if spec.window is not None:
        # Positions to the left and to the right of the token's own, and for each layer whether it has a window.
        settings |= dict(
            window_size=(spec.window.tokens - 1, 0),
            window_attn_skip_freq=[int(is_windowed) for is_windowed in spec.window.layers],
        )
    return settings


def position_type(spec: ModelSpec) -> str:
    """Megatron's name for the model's positions. Latent attention applies its own."""
    return "yarn" if spec.latent is None and isinstance(spec.rope_scaling, YarnScaling) else "rope"


def set_yarn(megatron_config: TransformerConfig, spec: ModelSpec) -> None:
    """Set YaRN for models without latent attention, in place: Megatron reads it from attributes that its configuration
    does not declare.
    """
    if position_type(spec) != "yarn":
        return
    yarn, found = spec.rope_scaling, vars(megatron_config)
    assert isinstance(yarn, YarnScaling)
    found["yarn_rotary_scaling_factor"] = yarn.factor
    found["yarn_original_max_position_embeddings"] = yarn.original_positions
    found["yarn_beta_fast"], found["yarn_beta_slow"] = yarn.beta_fast, yarn.beta_slow
    found["yarn_mscale"], found["yarn_mscale_all_dim"] = yarn.attention_scale, yarn.attention_scale_all
    found["yarn_correction_range_round_to_int"] = yarn.rounds
    found["own_rotary_base"] = spec.rope_theta  # of layers whose positions are not scaled


def let_gradients_reach_expert_biases(chunk: nn.Module) -> None:
    """Make the biases after the second product of plain experts get a gradient without expert parallelism.

    Megatron 0.16 and 0.19 add such a bias in place to a view, which autograd refuses. The view comes from a reduction
    over the single rank that an expert is on, so this leaves the reduction out. (They also mark these biases as
    parameters whose gradient is summed over the tensor group, whose other ranks have other experts; `mark_parameters`
    corrects that.)
    """
    for name, module in chunk.named_modules():
        if ".experts." in name and name.endswith(".linear_fc2") and getattr(module, "bias", None) is not None:
            vars(module)["explicit_expert_comm"] = True


# --- Rotary frequencies --------------------------------------------------------------------------------------


def scaled_frequencies(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """`frequencies` after Llama 3's scaling: [head_dim / 2] float32, radians per token, the same on all ranks.

    Megatron has the same formula with three of its four numbers fixed; here all four come from the checkpoint. With w =
    2 pi / f and o = original_positions: f / factor if w > o / low_frequency_factor, f if w < o / high_frequency_factor,
    and between them (1 - m) f / factor + m f with m = (o / w - low_frequency_factor) / (high_frequency_factor -
    low_frequency_factor).
    """
    low, high, original = scaling.low_frequency_factor, scaling.high_frequency_factor, scaling.original_positions
    wavelengths = 2 * math.pi / frequencies
    share = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    between = (1 - share) * frequencies / scaling.factor + share * frequencies
    result = torch.where(wavelengths > original / low, frequencies / scaling.factor, frequencies)
    return torch.where((wavelengths <= original / low) & (wavelengths >= original / high), between, result)


def scale_rotary(embedding: RotaryEmbedding, scaling: RopeScaling) -> None:
    """Apply the model's scaling to a newly made rotary embedding, in place."""
    embedding.inv_freq = scaled_frequencies(embedding.inv_freq, scaling)


# --- Marks on parameters -------------------------------------------------------------------------------------

_CUT_ALONG = {"rows": 0, "vocabulary": 0, "columns": 1}


def mark_parameters(spec: ModelSpec, groups: ParallelGroups, chunks: Sequence[PolicyModel]) -> None:
    """Mark every parameter of the model's own as its tensors are cut. Call it before data parallelism and the
    optimizer, which copy the marks.

    A mark is an attribute that Megatron's layers set, or forget: https://github.com/NVIDIA/Megatron-LM/issues/7452
    (finding 8) and https://github.com/NVIDIA/Megatron-LM/pull/5916 are two that were forgotten. Here the family table
    decides, which also says how a checkpoint is cut, so that a new family or layer cannot bring a mark of its own.

    `tensor_model_parallel`: each rank of the tensor group (for an expert, of the expert-tensor group) has another part
    of it. `sequence_parallel`: it is whole on each of them and has seen only that rank's positions, so its gradient is
    a sum over them. The gradient of an expert is complete, because its rank has all tokens that chose it.

    Raises ModelError for a parameter that is in no table, or that Megatron reduces in a way that the table excludes.
    """
    table = table_by_parameter(spec)
    owners = {parameter: entries[0] for parameter, entries in table.items()}
    owners |= {copy: entries[0] for entries in table.values() for copy in entries[0].copies}
    sequence_parallel = chunks[0].config.sequence_parallel
    for name, parameter in canonical_parameters(spec, groups, chunks).items():
        if isinstance(parameter, nn.Parameter):
            _mark(name, parameter, owners[name], groups, sequence_parallel)


def _mark(name: str, parameter: Any, entry: TensorEntry, groups: ParallelGroups, sequence_parallel: bool) -> None:
    along = _CUT_ALONG.get(entry.sharding)
    parameter.tensor_model_parallel = along is not None
    parameter.partition_dim = -1 if along is None else along
    if not hasattr(parameter, "partition_stride"):
        parameter.partition_stride = 1
    parameter.sequence_parallel = sequence_parallel and along is None and entry.expert is None
    is_experts_own = entry.expert is not None and groups.expert.size > 1
    # Megatron-Core 0.16 and 0.19 mark this layout, which the plan refuses, differently.
    is_refused = (
        entry.expert is not None and groups.expert.size == 1 and groups.expert_tensor.size != groups.tensor.size
    )
    if not is_refused and getattr(parameter, "allreduce", True) == is_experts_own:
        raise ModelError(
            f"{name}: Megatron reduces its gradient {'over all data ranks' if is_experts_own else 'as an expert'}, and"
            f" the tensor table says that it is {'an expert' if is_experts_own else 'not an expert'}"
        )
    if getattr(parameter, "average_gradients_across_tp_domain", False):
        raise ModelError(
            f"{name}: Megatron averages its gradient over the tensor group; no parameter of a known family is averaged"
        )
