"""Layers and sampling for SGLang on a CPU: batch-invariant, or with as few operations as possible.

The first part is the servers' side of `engine.batch_invariant`. The layers of dense Qwen3, the LM head and the
log-softmax are those of the trainer (`batch_invariant.py`), in the same order and with the same roundings, so the
log-prob of a sampled token equals the trainer's to the last bit. A server with the attention backend
`InvariantCpuAttention` (`sglang_attention.py`) computes all of it, and refuses a model with other layers.

The second part, from `take_over_layers` on, is for speed. On a CPU, dispatch dominates a decode step of a small model:
SGLang passes every layer through modules, stages and fallbacks made of single operations. Here one function computes
all layers of Llama, Qwen2, Qwen3 and Qwen3-MoE with the same arithmetic on the same parameters, with norms by
`rms_norm`, and cosines and sines once for all layers. It handles only cases that it knows exactly: float32 (of Llama
and Qwen2 bf16, too), unquantized, one rank, the batched attention. SGLang computes everything else. The server's log
says which of the two does.

Only a server process imports this file.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.nn.functional import rms_norm, silu

from gspo_mega.cpu import batch_invariant as rows
from gspo_mega.cpu.products import linear, widens_bf16

_PLAIN = "_gspo_mega_plain"
logger = logging.getLogger(__name__)


def is_on() -> bool:
    """Return whether the current forward pass is that of a batch-invariant server."""
    from sglang.srt.model_executor.forward_context import get_attn_backend

    from gspo_mega.cpu.sglang_attention import InvariantCpuAttention

    return isinstance(get_attn_backend(), InvariantCpuAttention)


def invariant_layers_forward(
    model: Any, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any
) -> torch.Tensor:
    """Return the hidden states [tokens, hidden] after the last norm of a dense Qwen3 in fp32 or bf16."""
    from sglang.srt.model_executor.forward_context import get_attn_backend

    backend: Any = get_attn_backend()
    hidden = model.embed_tokens(input_ids)
    cache = model.layers[0].self_attn.rotary_emb.cos_sin_cache.index_select(0, positions.flatten())
    cos, sin = (torch.cat((half, half), -1)[:, None] for half in cache.to(hidden.dtype).chunk(2, dim=-1))
    for layer in model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        dim, heads = attention.head_dim, attention.num_heads
        normed = _norm(hidden, layer.input_layernorm)
        qkv = rows.linear(normed, attention.qkv_proj.weight, attention.qkv_proj.bias).view(len(hidden), -1, dim)
        last_key = heads + attention.num_kv_heads
        query = rows.rotate(_norm(qkv[:, :heads], attention.q_norm), cos, sin)
        key = rows.rotate(_norm(qkv[:, heads:last_key], attention.k_norm), cos, sin)
        attended = backend.attend_plain(query, key, qkv[:, last_key:], attention.attn, forward_batch)
        hidden = hidden + rows.linear(attended, attention.o_proj.weight)
        gate_up = rows.linear(_norm(hidden, layer.post_attention_layernorm), mlp.gate_up_proj.weight)
        gate, up = gate_up.chunk(2, dim=-1)
        hidden = hidden + rows.linear(rows.silu(gate) * up, mlp.down_proj.weight)
    return _norm(hidden, model.norm)


def _norm(x: torch.Tensor, norm: Any) -> torch.Tensor:
    return rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)


def head_of(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap `stock`, SGLang's `LogitsProcessor._compute_lm_head`, to compute the trainer's product on a batch-invariant
    server, and plain products by `products.py`.
    """

    def compute(self: Any, hidden_states: torch.Tensor, lm_head: Any, *rest: Any, **options: Any) -> torch.Tensor:
        if is_on():
            return rows.logits(hidden_states, lm_head.weight)
        weight = getattr(lm_head, "weight", None)
        own = (torch.float32, torch.bfloat16) if widens_bf16() else (torch.float32,)
        plain = torch.is_tensor(weight) and weight.dtype == hidden_states.dtype and weight.dtype in own
        if plain and not any(rest) and not any(options.values()) and not hasattr(lm_head, "set_lora"):
            return linear(hidden_states, cast("torch.Tensor", weight))
        return stock(self, hidden_states, lm_head, *rest, **options)

    return compute


def log_softmax_of(stock: Callable[..., None], backend: str) -> Callable[..., None]:
    """Wrap `stock`, the `__init__` of SGLang's Sampler, to return log-probs by log-softmax with the attention
    `backend`.

    By default they are the logarithms of a softmax; log-softmax is SGLang's own alternative, for its deterministic
    inference.
    """

    def initialize(self: Any) -> None:
        from sglang.srt.runtime_context import get_server_args

        stock(self)
        arguments: Any = get_server_args()  # its fields are made by a decorator
        if arguments.attention_backend == backend:
            self.enable_deterministic = True

    return initialize


def take_over_layers(model: Any) -> None:
    """Have `model`, a class of SGLang's models without their heads (LlamaModel, Qwen2Model, ...), compute plain batches
    by `layers_forward`.
    """
    stock: Callable[..., Any] = vars(model).get("forward", model.forward)

    def forward(self, input_ids, positions, forward_batch, input_embeds=None, pp_proxy_tensors=None):
        invariant = is_on()
        plain = self.__dict__.get(_PLAIN)
        if plain is None:
            plain = self.__dict__[_PLAIN] = is_plain_model(self, invariant)
            who = "this package's functions" if plain else "SGLang's own modules"
            logger.info("the layers of %s are computed by %s", type(self).__name__, who)
        if plain and input_embeds is None and pp_proxy_tensors is None and len(input_ids) and _is_plain(forward_batch):
            compute = invariant_layers_forward if invariant else layers_forward
            return compute(self, input_ids, positions, forward_batch)
        return stock(self, input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)

    model.forward = forward


def _is_plain(forward_batch: Any) -> bool:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.forward_context import get_attn_backend

    from gspo_mega.cpu.sglang_attention import BatchedCpuAttention

    return (
        forward_batch.forward_mode in (ForwardMode.DECODE, ForwardMode.EXTEND)
        and not forward_batch.can_run_tbo
        and forward_batch.encoder_lens is None
        and isinstance(get_attn_backend(), BatchedCpuAttention)
    )


def is_plain_model(model: Any, invariant: bool = False) -> bool:
    """Return whether `layers_forward` computes exactly what `model` does; `invariant`: `invariant_layers_forward`."""
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
    from sglang.srt.layers.radix_attention import AttentionType
    from sglang.srt.layers.rotary_embedding import RotaryEmbedding
    from sglang.srt.layers.rotary_embedding.rope_variant import Llama3RotaryEmbedding
    from sglang.srt.models.llama import LlamaDecoderLayer, LlamaMLP
    from sglang.srt.models.qwen2 import Qwen2DecoderLayer, Qwen2MLP
    from sglang.srt.models.qwen3 import Qwen3DecoderLayer
    from sglang.srt.models.qwen3_moe import Qwen3MoeDecoderLayer
    from sglang.srt.runtime_context import get_exec, get_lora, get_parallel

    if get_lora().enable_lora:  # its layers add what the adapters compute
        return False
    dtype: Any = getattr(getattr(model.norm, "weight", None), "dtype", None)
    with_head_norms, without = (Qwen3DecoderLayer, Qwen3MoeDecoderLayer), (LlamaDecoderLayer, Qwen2DecoderLayer)
    if invariant:
        known = with_head_norms
    else:
        known = {torch.float32: (*with_head_norms, *without), torch.bfloat16: without}.get(dtype, ())

    def plain_norm(norm: Any) -> bool:
        return (
            type(norm) is RMSNorm
            and norm.variance_size_override is None
            and not norm.cast_x_before_out_mul
            and norm.override_orig_dtype is None
            and norm.weight.dtype == dtype
        )

    def plain_product(part: Any) -> bool:
        """Not quantized, and not packed for Intel's AMX."""
        return (
            type(part.quant_method) is UnquantizedLinearMethod
            and not getattr(part, "use_intel_amx_backend", False)
            and part.weight.dtype == dtype
        )

    def plain_layer(layer: Any) -> bool:
        if type(layer) not in known:
            return False
        attention, mlp = layer.self_attn, layer.mlp
        rotary = attention.rotary_emb
        products = [attention.qkv_proj, attention.o_proj]
        if type(mlp) in (LlamaMLP, Qwen2MLP):
            products += [mlp.gate_up_proj, mlp.down_proj]
        head_norms = (attention.q_norm, attention.k_norm) if type(layer) in with_head_norms else ()
        return (
            not getattr(layer, "_is_layer_to_capture", False)
            and all(map(plain_product, products))
            and attention.o_proj.bias is None
            and all(plain_norm(norm) for norm in (layer.input_layernorm, layer.post_attention_layernorm, *head_norms))
            and len({norm.variance_epsilon for norm in head_norms}) <= 1
            and type(rotary) in (RotaryEmbedding, Llama3RotaryEmbedding)
            and rotary is model.layers[0].self_attn.rotary_emb
            and rotary.is_neox_style
            and rotary.rotary_dim == rotary.head_size == attention.head_dim
            and attention.attn.attn_type == AttentionType.DECODER
            and attention.attn.sliding_window_size < 0
            and not attention.attn.is_cross_attention
        )

    return (
        model.pp_group.world_size == 1
        and get_parallel().tp_group.world_size == 1
        and get_exec().deterministic.rl_on_policy_target is None
        and not model.layers_to_capture
        and plain_norm(model.norm)
        and all(plain_layer(layer) for layer in model.layers)
    )


def layers_forward(model: Any, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any) -> torch.Tensor:
    """Return the hidden states [tokens, hidden] after the last norm of a plain model.

    In bf16 a sum is rounded before its norm, as by the trainer; SGLang norms what it has not rounded yet.
    """
    from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder
    from sglang.srt.model_executor.forward_context import get_attn_backend

    backend: Any = get_attn_backend()
    recorder = get_global_expert_distribution_recorder()
    hidden = model.embed_tokens(input_ids)
    rotation = rotation_of(model.layers[0].self_attn.rotary_emb.cos_sin_cache, positions, hidden.dtype)
    for index, layer in enumerate(model.layers):
        attention = layer.self_attn
        normed = _norm(hidden, layer.input_layernorm)
        query, key, value = _heads(attention, normed, rotation)
        attended = backend.attend_plain(query, key, value, attention.attn, forward_batch)
        hidden = hidden + linear(attended, attention.o_proj.weight)
        with recorder.with_current_layer(index):
            hidden = hidden + _feed_forward(layer.mlp, _norm(hidden, layer.post_attention_layernorm), forward_batch)
    return _norm(hidden, model.norm)


def rotation_of(
    cache: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines for `rotate`, [tokens, 1, dim] each, in the dtype of what is rotated; the sines have the
    sign of the half that they are for.

    `cache` [positions, dim]: the cosines of dim / 2 frequencies and then their sines.
    """
    cos, sin = cache.index_select(0, positions.flatten()).to(dtype).unsqueeze(1).chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Apply rotary positions to `x` [tokens, heads, dim], halves rotated against each other."""
    cos, sin = rotation
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def _heads(
    attention: Any, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query, key and value [tokens, heads, dim]; the query is contiguous."""
    dim, heads, kv_heads = attention.head_dim, attention.num_heads, attention.num_kv_heads
    qkv = linear(hidden, attention.qkv_proj.weight, attention.qkv_proj.bias).view(len(hidden), -1, dim)
    # One norm, if there is one, and one rotation for queries and keys, each with its own weight.
    both = qkv[:, : heads + kv_heads]
    if hasattr(attention, "q_norm"):
        weight = torch.cat((attention.q_norm.weight.expand(heads, dim), attention.k_norm.weight.expand(kv_heads, dim)))
        both = rms_norm(both, (dim,), None, attention.q_norm.variance_epsilon).mul_(weight)
    both = rotate(both, rotation)
    return both[:, :heads].contiguous(), both[:, heads:], qkv[:, heads + kv_heads :]


def _feed_forward(mlp: Any, hidden: torch.Tensor, forward_batch: Any) -> torch.Tensor:
    from sglang.srt.models.llama import LlamaMLP
    from sglang.srt.models.qwen2 import Qwen2MLP

    if type(mlp) not in (LlamaMLP, Qwen2MLP):
        return mlp(hidden, forward_batch)
    into, out_of = cast("Any", mlp.gate_up_proj), cast("Any", mlp.down_proj)
    gate, up = linear(hidden, into.weight).chunk(2, dim=-1)
    return linear(silu(gate).mul_(up), out_of.weight)


def experts_forward_plain(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap `stock`, SGLang's `moe_forward_native`, to compute gated SiLU experts without biases here."""

    def forward(layer: Any, x: torch.Tensor, topk_output: Any, config: Any) -> torch.Tensor:
        weights, chosen, _ = topk_output
        if config.activation == "silu" and config.gemm1_alpha is not None and not config.apply_router_weight_on_input:
            return clamped_experts_forward(layer, x, weights, chosen, config.gemm1_alpha, config.gemm1_clamp_limit)
        if (
            config.activation != "silu"
            or config.gemm1_alpha is not None
            or config.apply_router_weight_on_input
            or getattr(layer, "w13_weight_bias", None) is not None
            or getattr(layer, "w2_weight_bias", None) is not None
            or x.dtype != torch.float32
            or layer.w13_weight.dtype != torch.float32
        ):
            return stock(layer, x, topk_output, config)
        flat, num_here = chosen.reshape(-1), len(layer.w13_weight)
        # With expert parallelism the experts of other ranks are -1 here, and come last: they add nothing.
        flat = flat.where(flat >= 0, num_here)
        order = flat.argsort()
        counts = flat.bincount(minlength=num_here + 1).tolist()
        *entering, elsewhere = x.index_select(0, order // chosen.shape[1]).split(counts)
        parts = []
        for part, w13, w2 in zip(entering, layer.w13_weight.unbind(), layer.w2_weight.unbind()):
            if len(part):
                gate, up = linear(part, w13).chunk(2, dim=-1)
                parts.append(linear(silu(gate).mul_(up), w2))
        parts.append(torch.zeros_like(elsewhere))
        each = torch.empty_like(sorted_parts := torch.cat(parts)).index_copy_(0, order, sorted_parts)
        return each.view(*chosen.shape, -1).mul_(weights.unsqueeze(-1)).sum(dim=1)

    return forward


def clamped_experts_forward(
    layer: Any, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, alpha: float, limit: float
) -> torch.Tensor:
    """Compute the experts of gpt-oss, whose activation SGLang has only as a function that must be compiled first.

    x: [tokens, hidden]; weights, chosen: [tokens, k]; the layer's w13 alternates rows of gate and up.
    """
    flat, num_here = chosen.reshape(-1), len(layer.w13_weight)
    flat = flat.where(flat >= 0, num_here)  # the experts of other ranks add nothing
    order = flat.argsort()
    *entering, elsewhere = x.index_select(0, order // chosen.shape[1]).split(
        flat.bincount(minlength=num_here + 1).tolist()
    )
    parts = []
    for expert, part in enumerate(entering):
        if len(part):
            both = linear(part, layer.w13_weight[expert], layer.w13_weight_bias[expert].to(x.dtype))
            gate, up = both[..., ::2].clamp(max=limit), both[..., 1::2].clamp(-limit, limit)
            between = gate * torch.sigmoid(gate * alpha) * (up + 1)
            parts.append(linear(between, layer.w2_weight[expert], layer.w2_weight_bias[expert].to(x.dtype)))
    parts.append(torch.zeros_like(elsewhere))
    each = torch.empty_like(sorted_parts := torch.cat(parts)).index_copy_(0, order, sorted_parts)
    return (each.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)


def sample(probs: torch.Tensor) -> torch.Tensor:
    """Sample one index from each row of `probs` [rows, vocabulary], which need not add up to 1: int32 [rows].

    Inverts the distribution function in float64, where `torch.multinomial` draws one random number per token of the
    vocabulary. A large vocabulary is sampled in two steps, each with a random number of its own per row: a block of
    tokens by its sum, then one of its tokens. So only sums are taken over the whole vocabulary, not running sums, which
    take twenty times as long. Raises RuntimeError for a row that has NaN or infinity, or no value above 0.
    """
    size = probs.shape[1]
    if size < _SAMPLED_AT_ONCE:
        return _invert(probs).view(-1).to(torch.int32)
    num_whole = size // _BLOCK
    parts = probs[:, : num_whole * _BLOCK].unflatten(1, (num_whole, _BLOCK)).sum(dim=-1)
    rest = probs[:, num_whole * _BLOCK :].sum(dim=-1, keepdim=True)
    first = _invert(torch.cat((parts, rest), dim=1)) * _BLOCK
    tokens = first + torch.arange(_BLOCK)
    # The last block may be shorter. Its sum is above 0 if it was drawn.
    of_block = probs.gather(1, tokens.clamp(max=size - 1)).masked_fill_(tokens >= size, 0.0)
    return (first + _invert(of_block)).view(-1).to(torch.int32)


_BLOCK = 128
_SAMPLED_AT_ONCE = 2048
"""Vocabularies below this size are sampled in one step, which is as fast there."""


def _invert(probs: torch.Tensor) -> torch.Tensor:
    """Sample one index from each row: int64 [rows, 1]. Raises as `sample`."""
    summed = probs.cumsum(dim=-1, dtype=torch.float64)
    total = summed[:, -1:]
    if not bool(((total > 0) & (total < torch.inf)).all()):
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0, or a row of zeros")
    drawn = torch.rand(total.shape, dtype=torch.float64) * total
    # The first whose sum is above the number drawn: never one of probability 0.
    return torch.searchsorted(summed, drawn, right=True)


def sampling_plain(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap `stock`, SGLang's `sampling_from_probs_torch`, to sample a batch without seeds by `sample`."""

    def from_probs(
        probs: torch.Tensor, sampling_seed: torch.Tensor | None = None, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        if sampling_seed is None:
            return sample(probs)
        return stock(probs, sampling_seed=sampling_seed, positions=positions)

    return from_probs


def sampler_plain(stock: Callable[..., torch.Tensor], own_log_probs: bool) -> Callable[..., torch.Tensor]:
    """Wrap `stock`, the `forward` of SGLang's Sampler, to take the logarithm of the sampled tokens' probabilities only,
    in a batch that samples from all tokens, without seeds, and returns one log-prob per token. Same bits, one fifth of
    the time. `own_log_probs`: SGLang returns log-probs at the request's temperature, its default.
    """

    @functools.wraps(stock)
    def forward(
        self: Any,
        logits_output: Any,
        info: Any,
        return_logprob: bool,
        top_logprobs_nums: list[int] | None,
        token_ids_logprobs: list[list[int] | None] | None,
        positions: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        if (
            not own_log_probs
            or not return_logprob
            or options
            or info.is_all_greedy
            or info.sampling_seed is not None
            or info.need_top_p_sampling
            or info.need_top_k_sampling
            or info.need_min_p_sampling
            or info.sampling_mask_batch_indices is not None
            or info.sampling_support_logprobs_capture_indices is not None
            or self.enable_deterministic
            or self.rl_on_policy_target is not None
            or self.use_ascend_backend
            or any(top_logprobs_nums or ())
            or any(ids is not None for ids in token_ids_logprobs or ())
        ):
            return stock(
                self, logits_output, info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions, **options
            )
        logits = self._preprocess_logits(logits_output.next_token_logits, info)
        probs = torch.softmax(logits.div_(info.temperatures), dim=-1)
        token_ids = sample(probs)
        log_probs = probs.gather(1, token_ids.long().unsqueeze(1)).squeeze(1).log_()
        logits_output.next_token_logprobs = log_probs.clamp_(min=torch.finfo(log_probs.dtype).min)
        self._sync_token_ids_across_tp(token_ids, info)
        return token_ids

    return forward


def gated(hidden: torch.Tensor, gate: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """Return sigmoid(h w) times the output of a shared expert, computed in fp32 as by SGLang's kernel, in the dtype of
    `shared`. hidden, shared: [tokens, hidden]; gate: [hidden].
    """
    return (torch.sigmoid(hidden.float() @ gate.float())[:, None] * shared.float()).to(shared.dtype)


def add_gated(hidden: torch.Tensor, gate: torch.Tensor, shared: torch.Tensor, final: torch.Tensor) -> None:
    """Add `gated` to `final` [tokens, hidden] in place, rounded once."""
    score = torch.sigmoid(hidden.float() @ gate.float())[:, None]
    final.copy_(torch.addcmul(final.float(), score, shared.float()))


def sum_of_squares(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return [2 x tokens] float32: sums over this rank's heads, of queries [tokens, heads x dim] and then of keys."""
    return torch.cat([heads.float().square().sum(dim=-1) for heads in (query, key)])


def norm_by_squares(
    query: torch.Tensor,
    key: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    squares: torch.Tensor,
    num_ranks: int = 1,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys normed over the heads of all ranks. `squares`: `sum_of_squares` of all ranks together."""

    def normed(heads: torch.Tensor, weight: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        mean = own[:, None] / (heads.shape[-1] * num_ranks)
        return (heads.float() * torch.rsqrt(mean + eps) * weight).to(heads.dtype)

    of_query, of_key = squares.chunk(2)
    return normed(query, query_weight, of_query), normed(key, key_weight, of_key)
