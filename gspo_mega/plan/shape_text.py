"""A model's shape in words, for the report of a plan."""

from __future__ import annotations

from gspo_mega.models.spec import ModelSpec


def shape_text(spec: ModelSpec, padded_vocab_size: int) -> str:
    """One line: layers, heads, vocabulary, latents, experts."""
    shape = (
        f"{spec.family}: {spec.num_layers} layers, hidden {spec.hidden_size}, {spec.num_heads} heads x {spec.head_dim} "
        f"({spec.num_kv_heads} key-value), vocabulary {spec.vocab_size} (padded {padded_vocab_size})"
    )
    if spec.latent is not None:
        shape += (
            f", latents of {spec.latent.query_rank or 'no'} (query) and {spec.latent.key_value_rank} (key and value)"
        )
    if spec.moe is not None:
        shape += (
            f", {spec.moe.num_experts} experts of {spec.moe.expert_intermediate_size}, {spec.moe.experts_per_token} per"
            " token"
        )
        if spec.moe.shared_intermediate_size:
            shape += f", shared {spec.moe.shared_intermediate_size}"
    if not spec.has_experts(0):
        dense = f" in the first {spec.moe.num_dense_layers} layers" if spec.moe is not None else ""
        shape += f", intermediate {spec.intermediate_size}{dense}"
    return shape


def window_lines(spec: ModelSpec) -> list[str]:
    """What windows change, and what is estimated as if there were none."""
    if spec.window is None:
        return []
    return [
        f"{sum(spec.window.layers)} of {spec.num_layers} layers attend to the last {spec.window.tokens} tokens: FLOPs"
        " and times are of that; a server's cache is estimated as if every layer kept all tokens"
    ]
