"""ModelSpec: the content of a Hugging Face `config.json` in this package's own words.

This module has only the records. `huggingface.py` reads a folder; tensor names and shapes are in `tensors.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal


@dataclass(frozen=True)
class MoeSpec:
    """The experts of a model. `score_function`: that of the router. `expert_bias`: each expert has a bias, which is
    added to its score when experts are chosen, but not when their outputs are weighted. Experts are chosen from the
    best `groups_per_token` of `num_groups` equal groups; one group means no grouping. `scaling_factor` multiplies the
    weights of the chosen experts. `shared_intermediate_size`: the total width of the experts that every token goes to,
    0 if there are none. `shared_gate`: their output is multiplied by the sigmoid of a row's product with the token. The
    first `num_dense_layers` layers have an MLP of `intermediate_size` instead of experts.
    """

    num_experts: int
    experts_per_token: int
    expert_intermediate_size: int
    norm_topk_prob: bool = True
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    expert_bias: bool = False
    num_groups: int = 1
    groups_per_token: int = 1
    scaling_factor: float = 1.0
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    num_dense_layers: int = 0

    @property
    def route_bytes(self) -> int:
        """Bytes of an expert's number in routes that are sent or stored: those of `records.route_type`."""
        return 1 if self.num_experts <= 256 else 2


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention: queries and keys and values are projected up from a few numbers per token.

    `query_rank`: the number for queries, None if queries are projected from the hidden state. `key_value_rank`: the
    number for keys and values. A head's query and key have `content_dim` elements from there and `rotary_dim` elements
    with positions, which for keys all heads share. A head's value has `value_dim` elements.
    """

    query_rank: int | None
    key_value_rank: int
    content_dim: int
    rotary_dim: int
    value_dim: int


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of rotary wavelengths, in tokens: those above `original_positions` / `low_frequency_factor`
    become `factor` times as long, those below `original_positions` / `high_frequency_factor` stay, and in between the
    factor changes smoothly.
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_positions: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv:2309.00071): wavelengths that turn less than `beta_slow` times in `original_positions` tokens become
    `factor` times as long, those that turn more than `beta_fast` times stay. With m(a) = 1 + 0.1 a ln(factor), cosines
    and sines are multiplied by m(`attention_scale`) / m(`attention_scale_all`), and attention scores also by
    m(`attention_scale_all`)^2. `rounds`: the range between the two is in whole dimensions.
    """

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    attention_scale: float
    attention_scale_all: float
    rounds: bool = True


@dataclass(frozen=True)
class SlidingWindow:
    """`layers` says for each layer whether it has the window. There a token attends to the last `tokens` tokens, itself
    among them.
    """

    tokens: int
    layers: tuple[bool, ...]


@dataclass(frozen=True)
class DeltaNet:
    """Gated delta nets (arXiv:2412.06464) in place of attention in the layers for which `layers` is true.

    A layer has `key_heads` queries and keys of `key_dim` elements, and `value_heads` values of `value_dim` elements, as
    many for each key. A causal convolution over `kernel` tokens comes before them.
    """

    layers: tuple[bool, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def keys(self) -> int:
        """Elements of all keys of a layer."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Elements of all values of a layer."""
        return self.value_heads * self.value_dim

    @property
    def state_elements(self) -> int:
        """Elements of what a layer remembers of a sequence: a matrix for each value head, and the last inputs of the
        convolution.
        """
        return self.values * self.key_dim + (2 * self.keys + self.values) * (self.kernel - 1)


@dataclass(frozen=True)
class BlockFp8:
    """How a folder holds the weights of linear layers: one byte (e4m3) per element, and one scale for each block of
    `block` rows and columns. `kept`: names of modules that are stored plain, in addition to those that always are.
    `power_of_two`: every scale is a power of two.
    """

    block: tuple[int, int] = (128, 128)
    kept: tuple[str, ...] = ()
    power_of_two: bool = False


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, gated SiLU MLP or MoE.

    `family` is the key of the table in `families.py` (`qwen3`, `llama`). Sizes are global, before any parallelism.
    `head_dim` is that of a query; with latent attention (`latent`) there are as many key-value heads as heads.
    `attention_bias`: the query, key and value projections add a bias. `rotary_share`: positions rotate this first part
    of a head's elements, and the rest stays. `torch_dtype` is that of the checkpoint (`float32`, `bfloat16`).
    `num_ignored_layers`: layers for multi-token prediction after the last one that a checkpoint may hold; they are not
    loaded. `stored`: how the folder holds quantised weights, None if all are plain. `stored_fp4`: the weights of
    experts are MXFP4 in the folder. `stacks_experts`: the folder has a layer's experts in one tensor, which its family
    may have. `raw` is config.json as read.

    `linear_bias`: the output projection, the router and both products of an expert add a bias too. `sinks`: the softmax
    of every head has one more term, which is trained and has no value. `swiglu_limit`: an expert multiplies
    g sigmoid(1.702 g) by u + 1, with its gate g at most the limit and u within the limit on both sides; None for
    SiLU(g) u. `window`: None if every layer attends to everything.

    `delta`: gated delta nets in place of attention, None without them. `output_gate`: the query projection has a gate
    for each head, whose sigmoid multiplies the head's output. `zero_centred_norms`: norms of hidden states, queries and
    keys multiply by 1 + weight.
    """

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    qk_norm: bool
    attention_bias: bool
    torch_dtype: str
    eos_token_ids: tuple[int, ...]
    moe: MoeSpec | None = None
    rope_scaling: RopeScaling | YarnScaling | None = None
    rotary_share: float = 1.0
    latent: LatentAttention | None = None
    linear_bias: bool = False
    sinks: bool = False
    swiglu_limit: float | None = None
    window: SlidingWindow | None = None
    delta: DeltaNet | None = None
    output_gate: bool = False
    zero_centred_norms: bool = False
    num_ignored_layers: int = 0
    stored: BlockFp8 | None = None
    stored_fp4: bool = False
    stacks_experts: bool = False
    raw: dict[str, Any] | None = None

    @property
    def value_head_dim(self) -> int:
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def num_moe_layers(self) -> int:
        """The number of layers with experts."""
        return 0 if self.moe is None else self.num_layers - self.moe.num_dense_layers

    def has_experts(self, layer: int) -> bool:
        """Whether this layer, counted from 0, has experts in place of one MLP."""
        return self.moe is not None and layer >= self.moe.num_dense_layers

    def has_delta_net(self, layer: int) -> bool:
        """Whether this layer, counted from 0, has a gated delta net in place of attention."""
        return self.delta is not None and self.delta.layers[layer]

    @property
    def num_attention_layers(self) -> int:
        """The number of layers with attention."""
        return self.num_layers - (0 if self.delta is None else sum(self.delta.layers))

    @property
    def cache_elements_per_token(self) -> int:
        """Elements of the server's cache per token: a key and a value per head and layer, or one latent per layer."""
        if self.latent is not None:
            return self.num_layers * (self.latent.key_value_rank + self.latent.rotary_dim)
        return 2 * self.num_attention_layers * self.num_kv_heads * self.head_dim


# The fields on which neither the weights of a model nor its log-probs depend.
_IMMATERIAL = (
    *("raw", "torch_dtype", "eos_token_ids", "max_position_embeddings", "num_ignored_layers"),
    *("stored", "stored_fp4", "stacks_experts"),
)


def shape_differences(theirs: ModelSpec, ours: ModelSpec) -> list[str]:
    """The differences because of which one model's weights cannot replace the other's, one text per field; empty for
    models of the same shape.
    """
    return [
        f"{field.name} {getattr(theirs, field.name)!r} instead of {getattr(ours, field.name)!r}"
        for field in fields(ModelSpec)
        if field.name not in _IMMATERIAL and getattr(theirs, field.name) != getattr(ours, field.name)
    ]
