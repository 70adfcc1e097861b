"""Bytes that a forward pass leaves for the backward pass, by kind of layer.

These are formulas per token of one rank, after context parallelism has divided the tokens. Those of a CPU are measured:
the engine's saved tensors equal them. Those of a GPU follow the source of Transformer Engine's layers and have not been
verified on a GPU. Experts are assumed to be evenly loaded.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from gspo_mega.config.derived import has_sampling_masks
from gspo_mega.config.precision import FusionKey, fused_keys
from gspo_mega.config.schema import Config, Precision
from gspo_mega.models.spec import DeltaNet, LatentAttention, ModelSpec, MoeSpec
from gspo_mega.models.tensors import DELTA_CHUNK
from gspo_mega.plan.gpus import Device
from gspo_mega.plan.layout import Layout
from gspo_mega.plan.state import WEIGHT_BYTES

# Bytes of an FP8 activation: one byte per value, and a scale of at most 4 bytes per block of 128.
_FP8_BYTES = 1 + 4 / 128
# Entropies, and the gradient of an entropy bonus, take the logits of a chunk once more, a part at a time:
# `ENTROPY_PARTS` of `engine/log_probs.py`.
_ENTROPY_PARTS = 8


@dataclass(frozen=True)
class LayerActivations:
    """Bytes per token. `attention`, `mlp`: a layer's two halves, each with the norm before it. `layer_input`: only a
    layer's input, which full recomputation keeps. `working`: what a backward pass through one layer needs temporarily.
    """

    attention: float
    mlp: float
    layer_input: float
    working: float


@dataclass(frozen=True)
class HeadActivations:
    """Bytes on the last stage. `row`: saved per token with an active label. `token`: saved per token, for the final
    norm. `working`: needed temporarily per token, for gathered hidden states and gradients. `chunk_forward`,
    `chunk_backward`: the logits that are in memory at once.
    """

    row: float
    token: float
    working: float
    chunk_forward: int
    chunk_backward: int


def layer_activations(
    config: Config, spec: ModelSpec, layout: Layout, device: Device, has_experts: bool | None = None
) -> LayerActivations:
    """Return the activations of one layer, per token of one rank, which is a token of a context-parallel rank's share
    of the pack. `has_experts`: whether the layer has experts; None for the model's last layer.
    """
    moe = None if has_experts is False else spec.moe
    size = WEIGHT_BYTES[config.precision]
    # The part of a token that remains per rank if sequence parallelism divides tokens over tensor ranks.
    part = 1 / layout.tensor if layout.sequence_parallel else 1.0
    fused = fused_keys(config, has_experts=True, has_gpu=device == "gpu")
    if device == "cpu" or config.precision == "fp32":
        attention, mlp = _cpu(fused, spec, moe, layout, size, part)
    else:
        attention, mlp = _gpu(config.precision, fused, spec, moe, layout, size, part)
    if spec.delta is not None:  # what both kinds of layers fit in
        delta = _delta_net(spec, spec.delta, layout, size, part)
        if config.precision == "fp8":  # what both projections multiply, once more
            delta += _FP8_BYTES * (part * spec.hidden_size + spec.delta.values / layout.tensor)
        attention = max(attention, delta)
    return LayerActivations(attention, mlp, part * spec.hidden_size * size, _working(spec, moe, layout, size, part))


def head_activations(config: Config, spec: ModelSpec, layout: Layout) -> HeadActivations:
    """Return what the last stage's log-probs take."""
    size = WEIGHT_BYTES[config.precision]
    part = 1 / layout.tensor if layout.sequence_parallel else 1.0
    vocabulary = layout.padded_vocab_size // layout.tensor
    chunk = config.batch.log_prob_chunk_tokens
    entropy_part = chunk * vocabulary * 4 // _ENTROPY_PARTS
    # The head's gradient is summed over chunks in fp32: in the buffer itself, or in a separate tensor that is then
    # rounded.
    is_separate = config.optimizer.gradients_dtype == "bf16" and config.lora is None
    summed = vocabulary * spec.hidden_size * (4 + size) if is_separate else 0
    # The sets of kept tokens, and those of a chunk as columns (int64), with what is among them (fp32, bool).
    kept = min(config.rollout.top_k, spec.vocab_size) if has_sampling_masks(config.rollout) else 0
    return HeadActivations(
        row=spec.hidden_size * size + 40 + 4 * kept,
        token=part * _norm(spec.hidden_size, size),
        working=(4 if layout.sequence_parallel else 2) * spec.hidden_size * size,
        chunk_forward=chunk * (vocabulary * 4 + 32 * kept) + entropy_part,
        chunk_backward=chunk * (vocabulary * (4 if size == 4 else 6) + spec.hidden_size * 4 + 32 * kept)
        + summed
        + (entropy_part if config.objective.entropy_coefficient > 0 else 0),
    )


def value_head_activations(config: Config, spec: ModelSpec, layout: Layout) -> HeadActivations:
    """Return what the values of a critic take on the last stage. Its head is one row, so a chunk takes no more than its
    states in fp32.
    """
    chunk = config.batch.log_prob_chunk_tokens * spec.hidden_size * 4
    return replace(head_activations(config, spec, layout), chunk_forward=chunk, chunk_backward=2 * chunk)


def _heads(spec: ModelSpec, layout: Layout) -> tuple[float, float, float, float]:
    """Return (query heads, key-value heads, elements of queries, elements of keys) of a tensor rank."""
    query = spec.num_heads / layout.tensor
    key = max(1.0, spec.num_kv_heads / layout.tensor)
    return query, key, query * spec.head_dim, key * spec.head_dim


def _projected(spec: ModelSpec, layout: Layout) -> float:
    """Return the elements that queries, keys and values are views of. They are gathered whole if tensor ranks share a
    key-value head.
    """
    ranks = layout.tensor if spec.num_kv_heads >= layout.tensor else 1
    return ((1 + spec.output_gate) * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim / ranks


def _cpu(
    fused: Collection[FusionKey], spec: ModelSpec, moe: MoeSpec | None, layout: Layout, size: int, part: float
) -> tuple[float, float]:
    """Return (attention, mlp) of Megatron's plain layers with this package's norm and attention, for sequences of one
    length and without context parallelism. `fused`: the operations that are.
    """
    hidden, gate = spec.hidden_size, _gate(fused, spec)
    norm = part * _norm(hidden, size)
    attention = (
        norm
        + part * hidden * size
        + (
            _cpu_heads(spec, layout, size)
            if spec.latent is None
            else _cpu_latent(spec, spec.latent, layout, size, part)
        )
    )
    mlp = norm + part * hidden * size
    if moe is None:
        return attention, mlp + (gate + 1) * spec.intermediate_size / layout.tensor * size
    shared = (gate + 1) * moe.shared_intermediate_size / layout.tensor * size + part * _shared_gate(spec, moe, size)
    return attention, mlp + shared + part * (
        _router(moe) + moe.experts_per_token * (20 + _routed(fused, spec, moe, layout, size, size))
    )


def _norm(width: int, size: int) -> int:
    """Return what an RMSNorm keeps: its input and one scale, in fp32 also the input normalised."""
    return (8 if size == 4 else size) * width + 4


def _cpu_heads(spec: ModelSpec, layout: Layout, size: int) -> float:
    """Return what grouped-query attention keeps after the norm and the projection's input."""
    heads, kv_heads, query, key = _heads(spec, layout)
    attention = 0.0
    if spec.qk_norm:
        if size == 4:  # no copy is made of the keys: they keep the fused projection's whole output alive
            attention += 8 * query + 4 * key + 4 * _projected(spec, layout)
        elif spec.num_kv_heads < layout.tensor:  # gathered whole, and kept alive whole
            attention += size * _projected(spec, layout)
        else:
            attention += 4 * (query + key)
        attention += 4 * (heads + kv_heads)
    attention += 4 * spec.head_dim * size  # cosines and sines, of queries and of keys
    # Keys, values, queries, output, log-sum-exp; with sinks each head's are wider by the query heads that share a key.
    wider = 1 + (spec.num_heads / spec.num_kv_heads / spec.head_dim if spec.sinks else 0)
    attention += (2 * key + 2 * query) * wider * size + 4 * heads
    if spec.output_gate:
        attention += query * (size + 4)
    return attention + query * size  # what the output projection multiplies


def _cpu_latent(spec: ModelSpec, latent: LatentAttention, layout: Layout, size: int, part: float) -> float:
    """Return what latent attention keeps after the norm and the down-projections' input: each latent's norm, and what
    is projected up.
    """
    heads = spec.num_heads / layout.tensor
    # The latent is a view of the projection's output, which has the rotary part beside it.
    kept = part * (_norm(latent.key_value_rank, size) + size * latent.key_value_rank + size * latent.rotary_dim)
    if latent.query_rank is not None:
        kept += part * (_norm(latent.query_rank, size) + size * latent.query_rank)
    kept += 4 * latent.rotary_dim * size  # cosines and sines, of queries and of keys
    kept += heads * (4 * spec.head_dim * size + 4)  # keys, values as wide, queries, output, log-sum-exp
    return kept + heads * latent.value_dim * size  # what the output projection multiplies


def _gpu(
    precision: Precision,
    fused: Collection[FusionKey],
    spec: ModelSpec,
    moe: MoeSpec | None,
    layout: Layout,
    size: int,
    part: float,
) -> tuple[float, float]:
    """Return (attention, mlp) of Transformer Engine's layers, whose norms are fused into the linear layer that follows,
    except before experts. With adapters none is fused, and as much is kept: frozen layers keep no input, the adapters
    do.
    """
    hidden, gate = spec.hidden_size, _gate(fused, spec)
    linear = _FP8_BYTES if precision == "fp8" else size
    norm = part * (hidden * size + 4)
    attention = norm + part * hidden * linear
    attention += (
        _gpu_heads(precision, spec, layout, size, linear)
        if spec.latent is None
        else _gpu_latent(precision, spec, spec.latent, layout, size, part, linear)
    )
    if moe is None:
        intermediate = spec.intermediate_size / layout.tensor
        return attention, norm + part * hidden * linear + intermediate * (gate * size + linear)
    routed = moe.experts_per_token * _routed(fused, spec, moe, layout, size, linear)
    shared = moe.shared_intermediate_size / layout.tensor * (gate * size + linear) + part * _shared_gate(
        spec, moe, size
    )
    return attention, norm + shared + part * (hidden * size + _router(moe) + routed + _moved(fused, moe))


def _gpu_heads(precision: Precision, spec: ModelSpec, layout: Layout, size: int, linear: float) -> float:
    """Return what grouped-query attention keeps after the projection's input."""
    heads, kv_heads, query, key = _heads(spec, layout)
    attention = 0.0
    attention += _projected(spec, layout) * size  # the projection's output, whose part the values are
    if spec.qk_norm:
        attention += query * size + 4 * heads + 4 * kv_heads  # a copy of the queries, one scale a head
    attention += (2 * query + key) * size + 4 * heads  # turned queries and keys, output, log-sum-exp
    if precision == "fp8":
        attention += query * linear  # the output once more, as the projection multiplies it
    if spec.output_gate:
        attention += query * (size + 4)  # its sigmoid in fp32, and the gated output
    return attention


def _gpu_latent(
    precision: Precision,
    spec: ModelSpec,
    latent: LatentAttention,
    layout: Layout,
    size: int,
    part: float,
    linear: float,
) -> float:
    """Return what latent attention keeps. Norms of latents are not fused, so their input is kept, and their output as
    it is projected up. Rotary positions are not fused either.
    """
    heads = spec.num_heads / layout.tensor
    ranks = latent.key_value_rank + (latent.query_rank or 0)
    kept = part * (ranks * (size + linear) + latent.rotary_dim * size + 8) + 4 * latent.rotary_dim * size
    kept += heads * (
        2 * (spec.head_dim + latent.value_dim) * size + 4
    )  # queries and keys, values and output, log-sum-exp
    return kept + (heads * latent.value_dim * linear if precision == "fp8" else 0)


def _delta_net(spec: ModelSpec, delta: DeltaNet, layout: Layout, size: int, part: float) -> float:
    """Return what a gated delta net keeps: its norm and the projection's input; the convolution's input and output;
    queries and keys normed, and copied for every value head; values; decays and betas; a matrix for the positions of a
    chunk; the output, its gate, and both as the gated norm has them in fp32. By the source of the kernels for GPUs.
    """
    keys, values, heads = (x / layout.tensor for x in (delta.keys, delta.values, delta.value_heads))
    convolved, copied = 2 * keys + values, 2 * heads * delta.key_dim
    kept = part * (2 * spec.hidden_size * size + 4)
    kept += (2 * convolved + 2 * keys + copied + 4 * values + DELTA_CHUNK * heads) * size
    return kept + 4 * (2 * values + 6 * heads)


def _router(moe: MoeSpec) -> float:
    """Return what the router keeps of a token: scores and choices of all experts and all groups."""
    if moe.score_function == "softmax":
        return 5 * moe.num_experts
    grouped = (
        moe.num_experts + 16 * moe.num_groups + 8 * moe.groups_per_token if moe.groups_per_token < moe.num_groups else 0
    )
    return 9 * moe.num_experts + 4 + grouped


def _shared_gate(spec: ModelSpec, moe: MoeSpec, size: float) -> float:
    """Return what the gate of shared experts keeps of a token: their output, and its sigmoid twice."""
    return (spec.hidden_size + 2) * size if moe.shared_gate else 0.0


def _gate(fused: Collection[FusionKey], spec: ModelSpec) -> int:
    """Return how many values SwiGLU keeps per intermediate value: both halves of its input and, unless it is fused, the
    gate's SiLU and the other half plus Megatron's offset of zero. With limits it is never fused, and also keeps the
    limited gate and its sigmoid.
    """
    if spec.swiglu_limit is not None:
        return 6
    return 2 if "fuse_activation" in fused else 4


def _moved(fused: Collection[FusionKey], moe: MoeSpec) -> float:
    """Return the bytes per token that record where its copies went, and their weights: 20 for each copy, or Transformer
    Engine's row map with two 4-byte columns for every expert and 12 for each copy.
    """
    if "fuse_permutation" in fused:
        return 4 * (2 * moe.num_experts + 1) + 12 * moe.experts_per_token
    return 20 * moe.experts_per_token


def _routed(
    fused: Collection[FusionKey], spec: ModelSpec, moe: MoeSpec, layout: Layout, size: float, linear: float
) -> float:
    """Return the bytes of a token at one expert: the inputs of both products, gate and up, what the activation keeps,
    and its probability.

    With expert-tensor parallelism each rank sees the tokens of all ranks and has its part of every expert.
    """
    gate = _gate(fused, spec)
    gate += gate > 2  # if it is not fused, the value that its probability is multiplied with
    return layout.expert_tensor * spec.hidden_size * linear + moe.expert_intermediate_size * (gate * size + linear) + 4


def _working(spec: ModelSpec, moe: MoeSpec | None, layout: Layout, size: float, part: float) -> float:
    """Return the gradients and gathered inputs that are alive at the widest point of one layer's backward pass."""
    gathered = spec.hidden_size * size
    if moe is None:
        return 3 * spec.intermediate_size / layout.tensor * size + 3 * gathered
    per_expert = layout.expert_tensor * 2 * spec.hidden_size + 3 * moe.expert_intermediate_size
    return part * moe.experts_per_token * per_expert * size + 2 * gathered
