"""Multi-head latent attention in Megatron's terms: its settings, and its parts in a layer spec.

The attention itself is Megatron's; its core is Transformer Engine's, or `packed_attention.PackedAttention`.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec

from gspo_mega.engine.norms import LatentNorm
from gspo_mega.model.spec import LatentAttention, ModelSpec, YarnScaling


def latent_settings(spec: ModelSpec, latent: LatentAttention) -> dict:
    """The part of Megatron's MLATransformerConfig that says how attention is computed; it takes the place of other
    settings.
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
        # Megatron's fused kernel is for YaRN alone.
        apply_rope_fusion=False,
    )


class LatentAttentionLayer(MLASelfAttention):
    """Megatron's, with the norms and projections that the layer spec names."""

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, object]:
        # 0.19 asks here, and has no way to norm keys and values alone where queries have no latent; 0.16 does not ask.
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}


def submodules_of(spec: ModuleSpec) -> Any:
    """The parts of a module as its spec names them. Megatron declares `object`: each module has a class of its own."""
    return spec.submodules


def name_latent_parts(attention: ModuleSpec) -> None:
    """Complete the spec of a layer's attention as Megatron made it."""
    attention.module = LatentAttentionLayer
    parts = submodules_of(attention)
    parts.q_layernorm = parts.kv_layernorm = LatentNorm
