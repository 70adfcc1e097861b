"""Multi-head latent attention in Megatron's terms: its settings.

The attention itself is Megatron's `MLASelfAttention`; its core is Transformer Engine's, or `cpu_attention.PackedAttention`.
"""

from __future__ import annotations

from gspo_mega.model.spec import LatentAttention, ModelSpec, YarnScaling


def latent_settings(spec: ModelSpec, latent: LatentAttention) -> dict:
    """The part of Megatron's MLATransformerConfig that says how attention is computed; it takes the place of other settings."""
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
