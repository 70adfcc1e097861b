"""Attention, router and experts of a DeepSeek-V3 `config.json`, in this package's words.

A setting is refused by name where Megatron's layers would compute something else than transformers does for the same
config.
"""

from __future__ import annotations

from gspo_mega.models.config_reader import ConfigReader
from gspo_mega.models.spec import LatentAttention, MoeSpec

# transformers gives the norms of the latents this epsilon, whatever rms_norm_eps is.
LATENT_NORM_EPS = 1e-6


def read_latent_attention(reader: ConfigReader) -> LatentAttention:
    """The sizes of multi-head latent attention."""
    raw = reader.raw
    if raw.get("rope_interleave", True) is not True:
        reader.problem(
            "rope_interleave",
            f"{raw['rope_interleave']!r}: Megatron's latent attention turns neighbouring elements; supported: true",
        )
    heads, key_heads = raw.get("num_attention_heads"), raw.get("num_key_value_heads")
    if key_heads is not None and key_heads != heads:
        reader.problem(
            "num_key_value_heads", f"{key_heads!r}: latent attention has as many as num_attention_heads, {heads!r}"
        )
    rotary = reader.size("qk_rope_head_dim")
    if rotary % 2:
        reader.problem("qk_rope_head_dim", f"{rotary} is odd; rotary positions need pairs")
    return LatentAttention(
        query_rank=None if raw.get("q_lora_rank") is None else reader.size("q_lora_rank"),
        key_value_rank=reader.size("kv_lora_rank"),
        content_dim=reader.size("qk_nope_head_dim"),
        rotary_dim=rotary,
        value_dim=reader.size("v_head_dim"),
    )


def read_experts(reader: ConfigReader, num_experts: int, experts_per_token: int, intermediate_size: int) -> MoeSpec:
    """The router with sigmoid scores, bias and groups; shared experts; the first dense layers."""
    raw = reader.raw
    for key, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
        if raw.get(key, only) != only:
            reader.problem(key, f"{raw[key]!r} is not supported; supported: {only!r}")
    # Megatron divides sigmoid scores by their sum where a token goes to several experts, and never where it goes to
    # one.
    if raw.get("norm_topk_prob") is not (experts_per_token > 1):
        reader.problem(
            "norm_topk_prob",
            f"{raw.get('norm_topk_prob')!r} is not supported with num_experts_per_tok {experts_per_token}; supported:"
            f" {experts_per_token > 1}",
        )
    num_groups, groups_per_token = reader.size("n_group"), reader.size("topk_group")
    if num_groups and num_experts % num_groups:
        reader.problem("n_group", f"{num_groups} does not divide the {num_experts} experts")
    if groups_per_token > num_groups:
        reader.problem("topk_group", f"{groups_per_token} is more than the {num_groups} groups (n_group)")
    elif 0 < groups_per_token < num_groups and not _groups_agree(
        num_experts // num_groups, experts_per_token, groups_per_token
    ):
        reader.problem(
            "topk_group",
            f"{groups_per_token}: transformers ranks a group by its 2 best experts, Megatron by num_experts_per_tok"
            f" {experts_per_token} // topk_group of them. Supported: values for which that is 2, with at least 2"
            f" experts per group, or n_group {num_groups} (no limit)",
        )
    num_layers, num_dense = reader.size("num_hidden_layers"), reader.count("first_k_dense_replace")
    if num_layers and num_dense >= num_layers:
        reader.problem("first_k_dense_replace", f"{num_dense} leaves no layer of {num_layers} with experts")
    return MoeSpec(
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        expert_intermediate_size=intermediate_size,
        norm_topk_prob=experts_per_token > 1,
        score_function="sigmoid",
        expert_bias=True,
        num_groups=num_groups,
        groups_per_token=groups_per_token,
        scaling_factor=reader.number("routed_scaling_factor"),
        shared_intermediate_size=reader.size("n_shared_experts") * intermediate_size,
        num_dense_layers=num_dense,
    )


def _groups_agree(group_size: int, experts_per_token: int, groups_per_token: int) -> bool:
    return (
        experts_per_token // groups_per_token == 2
        and group_size >= 2
        and group_size * groups_per_token >= experts_per_token
    )
