"""Multi-head latent attention in Megatron's terms: its settings, and its parts in a layer spec.

The attention itself is Megatron's; its core is Transformer Engine's, or `packed_attention.PackedAttention`.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec

from gspo_mega.engine.norms import LatentNorm
from gspo_mega.models.spec import LatentAttention, ModelSpec, YarnScaling


def latent_settings(spec: ModelSpec, latent: LatentAttention) -> dict:
    """The settings of Megatron's MLATransformerConfig that define attention. They override those of other models."""
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
    """Megatron's layer with the norms and projections that the layer spec names."""

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, object]:
        # Only 0.19 calls this. Its own version cannot norm keys and values alone if queries have no latent.
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}


def submodules_of(spec: ModuleSpec) -> Any:
    """The parts of a module as its spec names them. Megatron declares `object`: each module has a class of its own."""
    return spec.submodules


def name_latent_parts(attention: ModuleSpec) -> None:
    """Complete the spec that Megatron made for a layer's attention."""
    attention.module = LatentAttentionLayer
    parts = submodules_of(attention)
    parts.q_layernorm = parts.kv_layernorm = LatentNorm
