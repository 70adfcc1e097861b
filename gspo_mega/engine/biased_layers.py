"""The layers of gpt-oss in Megatron's terms: biases everywhere, sinks, sliding windows, a clamped activation, YaRN.

Owns the translation of these fields of a ModelSpec into Megatron's settings. The attention itself is
`packed_attention.py`'s.
"""

from __future__ import annotations

from typing import Any

from megatron.core.activations import quick_gelu
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from gspo_mega.models.spec import ModelSpec, YarnScaling


def biased_settings(spec: ModelSpec) -> dict[str, Any]:
    """The settings of TransformerConfig that these fields decide; none for a model without them."""
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
        # Positions to the left and to the right, besides the token's own; a mark for each layer.
        settings |= dict(
            window_size=(spec.window.tokens - 1, 0),
            window_attn_skip_freq=[int(is_windowed) for is_windowed in spec.window.layers],
        )
    return settings


def position_type(spec: ModelSpec) -> str:
    """Megatron's name for the model's positions. Latent attention turns its own."""
    return "yarn" if spec.latent is None and isinstance(spec.rope_scaling, YarnScaling) else "rope"


def set_yarn(megatron_config: TransformerConfig, spec: ModelSpec) -> None:
    """YaRN of other models than those with latent attention: Megatron reads it from attributes that its configuration
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


def reach_expert_biases(chunk: nn.Module) -> None:
    """Give the biases after the second product of plain experts a gradient without expert parallelism.

    Megatron 0.16 and 0.19 add such a bias in place to a view, which autograd refuses: the view is that of a reduction
    over the one rank that an expert is on, so it is left out. (They also mark these biases as parameters whose gradient
    is summed over the tensor group, whose other ranks have other experts; `parameter_marks.py` sets that right.)
    """
    for name, module in chunk.named_modules():
        if ".experts." in name and name.endswith(".linear_fc2") and getattr(module, "bias", None) is not None:
            vars(module)["explicit_expert_comm"] = True
