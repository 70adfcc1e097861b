"""The families: every tensor of a Hugging Face checkpoint, where Megatron keeps it, and what config.json leaves unsaid.

This module has only declarations: the types of a family table, the rows that families share, and at the end the table
`FAMILIES`. `tensors.py` derives a model's tensors from it and how they are cut over ranks; `huggingface.py` reads
config.json. docs/families.md says how to add a family.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

# How a tensor lies in its parameter. `q`, `k`, `v`: interleaved by key-value group, [q heads of the group, k, v].
# `gate`, `up`: every rank's share of the gate, then its share of up. Those of gated delta nets are in `delta_net.py`.
OfDeltaNet = Literal["delta_qkvz", "delta_ba", "delta_qkv", "delta_z", "delta_b", "delta_a", "delta_conv"]
Role = Literal["whole", "q", "k", "v", "gate", "up"] | OfDeltaNet
# How a tensor is cut over a tensor-parallel group: rows (column-parallel layer), columns (row-parallel layer),
# vocabulary rows (padded), or not at all.
Sharding = Literal["replicated", "rows", "columns", "vocabulary"]
# Which pipeline stage holds it.
Stage = Literal["first", "layer", "last"]
# Where a row applies: in layers without or with experts, in models whose queries have a latent or have none, in models
# that have the norms or the biases, in layers with attention or with a gated delta net.
InALayer = Literal["dense layer", "expert layer", "attention", "delta net"]
Where = Literal["query latent", "no query latent", "qk norm", "qkv bias"] | InALayer
# The keys that a config.json may leave out. Then head_dim is hidden_size / num_attention_heads, num_key_value_heads is
# num_attention_heads, and rope_theta is 10000.
Omissible = Literal["head_dim", "num_key_value_heads", "rope_theta"]


@dataclass(frozen=True)
class TensorRule:
    """One row of a family table. `{layer}` and `{expert}` are filled in; sizes are named as in `tensors.py`.

    `where`: None for everywhere. `is_buffer`: Megatron keeps it as a buffer, without gradient and optimizer, and in
    fp32 for any precision of the model. `served_wide`: SGLang holds it in fp32, also if it is sent in another dtype.
    `stack`: the checkpoint has no such tensor, but a tensor of all experts that contains it; `name` is then this
    package's own.
    """

    name: str
    shape: tuple[str, ...]
    parameter: str
    role: Role
    sharding: Sharding
    stage: Stage
    where: Where | None = None
    is_buffer: bool = False
    served_wide: bool = False
    stack: Stack | None = None


@dataclass(frozen=True)
class Stack:
    """A tensor `name` of all experts of a layer: [experts, columns, rows] with every expert's matrix transposed, or
    [experts, rows] for biases; `transposed` false: [experts, rows, columns].

    An expert's tensor is every `step`-th of these rows, starting with `first`. `in_turn` false: `step` tensors of an
    expert follow each other, and this one is the `first`, counted from 0.
    """

    name: str
    first: int = 0
    step: int = 1
    transposed: bool = True
    in_turn: bool = True


@dataclass(frozen=True)
class ExpertKeys:
    """The keys under which a family's config.json describes its experts: their number under any of `num_experts`, their
    width under `intermediate_size`. `norm_topk_prob`: the value for the whole family, or None if the key of that name
    has it (absent: `normalises`). `gated_shared`: the key for the width of a shared expert whose output a gate
    multiplies, None without one. `deepseek`: DeepSeek-V3's router (sigmoid scores, a bias, groups), shared experts and
    first dense layers, under its keys. `minimax`: MiniMax-M2's router, which is DeepSeek-V3's without groups and
    factor, and no shared experts. `lists_layers`: transformers reads the dense layers from `mlp_layer_types`, not from
    `first_k_dense_replace`.
    """

    num_experts: tuple[str, ...]
    intermediate_size: str
    norm_topk_prob: bool | None = None
    normalises: bool = False
    gated_shared: str | None = None
    deepseek: bool = False
    minimax: bool = False
    lists_layers: bool = False


@dataclass(frozen=True)
class Family:
    """One architecture. `architecture` is the class name in config.json. `qk_norm` and `qkv_bias` are values for every
    model of the family, or a key of config.json that has the value (absent: false). `rotary_share`: the part of a head
    that positions rotate if config.json has no partial_rotary_factor; only families with less than 1 may have one.

    `refused`: keys of config.json with their meaning; if one is set, the model needs maths that is not implemented for
    this family. `understood`: keys that other families refuse. `latent`: multi-head latent attention. `gpt_oss`: the
    model has biases everywhere, sinks, windows and a clamped activation, which `hf_fields.py` reads. `delta_net`: most
    layers have a gated delta net in place of attention, attention multiplies its output by a gate, and norms multiply
    by 1 + weight (`delta_net.py`). `text_part`: the text part of a vision-language model, which config.json describes
    under `text_config`. `carried`: the beginnings of names of tensors that a checkpoint may have besides,
    such as layers for multi-token prediction under names of their own, or a vision tower. `may_stack`: a folder may
    have its experts in stacks (`in_stack`), as Qwen3.5 and Qwen3-VL are published, or one by one; whether the matrices
    in stacks are transposed.

    `windows`: which layers have the sliding window of config.json if it lists none: every one, which only the key
    `sliding_window` decides (Mistral), every other (gpt-oss), or three of four (OLMo-3), whose positions are never
    scaled. `serves_windows`: SGLang has the window, too.

    `served`: what SGLang's model code reads from config.json and transformers does not write there, with the value that
    every model here has, or a function from config.json to it. `own_head`: SGLang never ties the output layer to
    the embedding, no matter what config.json says, so a folder without lm_head.weight leaves it at random values.
    """

    architecture: str
    tensors: tuple[TensorRule, ...]
    qk_norm: bool | str = False
    qkv_bias: bool | str = False
    rotary_share: float = 1.0
    experts: ExpertKeys | None = None
    may_omit: frozenset[Omissible] = frozenset()
    refused: Mapping[str, str] = field(default_factory=dict)
    understood: frozenset[str] = frozenset()
    latent: bool = False
    gpt_oss: bool = False
    delta_net: bool = False
    text_part: bool = False
    carried: tuple[str, ...] = ()
    may_stack: Literal["plain", "transposed"] | None = None
    windows: Literal["every layer", "every other", "three of four"] | None = None
    serves_windows: bool = True
    served: Mapping[str, Any] = field(default_factory=dict)
    own_head: bool = False

    @property
    def norms_all_heads(self) -> bool:
        """Whether a norm of queries or keys is over all heads together, and not over each head."""
        return _ALL_HEADS_NORM[0] in self.tensors

    @property
    def norms_outputs(self) -> bool:
        """Whether the outputs of attention and MLP are normed, and not their inputs."""
        return _OUTPUT_NORMS[0] in self.tensors

    @property
    def drafts(self) -> bool:
        """Whether checkpoints may have layers for multi-token prediction."""
        return "num_nextn_predict_layers" in self.understood


def rotary_dim(config: Mapping[str, Any]) -> int:
    """The elements of a head that positions rotate by `partial_rotary_factor` of a config.json; all if it is absent."""
    rope = config.get("rope_parameters") or {}
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    return int(config["head_dim"] * share)


def full_positions(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary parameters of layers without a window, of an OLMo-3 as transformers 5 writes it: for each kind."""
    return dict((config.get("rope_parameters") or {}).get("full_attention") or {})


# Where a stack of Qwen's experts has the tensor of one: its name, and its place among those of the expert.
_PLACES_IN_STACKS = {"gate": ("gate_up_proj", 0, 2), "up": ("gate_up_proj", 1, 2), "whole": ("down_proj", 0, 1)}


def in_stack(rule: TensorRule, transposed: bool) -> TensorRule:
    """A row of an expert in a folder of a family that `may_stack`, if it has stacks; any other row as it is."""
    block, expert, _ = rule.name.partition(".{expert}.")
    if not expert:
        return rule
    name, first, step = _PLACES_IN_STACKS[rule.role]
    return replace(rule, stack=Stack(f"{block}.{name}", first, step, transposed, in_turn=False))


def has_stacks(names: Iterable[str], carried: tuple[str, ...]) -> bool:
    """Whether the tensors of a folder have experts in such stacks, other than those that are `carried`."""
    return any(name.endswith(".experts.gate_up_proj") and not name.startswith(carried) for name in names)


def listed_dense_layers(config: Mapping[str, Any]) -> int:
    """The number of dense layers in `mlp_layer_types` of a config.json, as transformers counts them if it is absent."""
    kinds = config.get("mlp_layer_types")
    return 1 if kinds is None else list(kinds).count("dense")


def _layer(
    name: str,
    shape: tuple[str, ...],
    parameter: str,
    role: Role,
    sharding: Sharding,
    where: Where | None = None,
    is_buffer: bool = False,
) -> TensorRule:
    return TensorRule(
        f"model.layers.{{layer}}.{name}",
        shape,
        f"decoder.layers.{{layer}}.{parameter}",
        role,
        sharding,
        "layer",
        where,
        is_buffer,
    )


_INPUT_NORMS = (
    _layer("input_layernorm.weight", ("hidden",), "input_layernorm.weight", "whole", "replicated"),
    _layer("post_attention_layernorm.weight", ("hidden",), "pre_mlp_layernorm.weight", "whole", "replicated"),
)
# OLMo's: of what attention and MLP return.
_OUTPUT_NORMS = (
    _layer(
        "post_attention_layernorm.weight",
        ("hidden",),
        "post_self_attn_layernorm.weight",
        "whole",
        "replicated",
    ),
    _layer("post_feedforward_layernorm.weight", ("hidden",), "post_mlp_layernorm.weight", "whole", "replicated"),
)


def _attention(*own: TensorRule, norms: tuple[TensorRule, TensorRule] = _INPUT_NORMS) -> tuple[TensorRule, ...]:
    """Norms and attention of one layer. `own`: further rows of a family."""
    return (
        norms[0],
        _layer("self_attn.q_proj.weight", ("query", "hidden"), "self_attention.linear_qkv.weight", "q", "rows"),
        _layer("self_attn.k_proj.weight", ("key_value", "hidden"), "self_attention.linear_qkv.weight", "k", "rows"),
        _layer("self_attn.v_proj.weight", ("key_value", "hidden"), "self_attention.linear_qkv.weight", "v", "rows"),
        *own,
        _layer("self_attn.o_proj.weight", ("hidden", "query"), "self_attention.linear_proj.weight", "whole", "columns"),
        norms[1],
    )


_QK_NORM = (
    _layer("self_attn.q_norm.weight", ("head",), "self_attention.q_layernorm.weight", "whole", "replicated", "qk norm"),
    _layer("self_attn.k_norm.weight", ("head",), "self_attention.k_layernorm.weight", "whole", "replicated", "qk norm"),
)
# Over all heads together, in place of one norm for each head.
_ALL_HEADS_NORM = (
    _layer("self_attn.q_norm.weight", ("query",), "self_attention.q_layernorm.weight", "whole", "rows"),
    _layer("self_attn.k_norm.weight", ("key_value",), "self_attention.k_layernorm.weight", "whole", "rows"),
)
_QKV_BIAS = (
    _layer("self_attn.q_proj.bias", ("query",), "self_attention.linear_qkv.bias", "q", "rows", "qkv bias"),
    _layer("self_attn.k_proj.bias", ("key_value",), "self_attention.linear_qkv.bias", "k", "rows", "qkv bias"),
    _layer("self_attn.v_proj.bias", ("key_value",), "self_attention.linear_qkv.bias", "v", "rows", "qkv bias"),
)


def _latent_attention() -> tuple[TensorRule, ...]:
    """Norms and latent attention of one layer. Up-projections lie head by head on both sides: [content, rotary] of a
    query, [content, value] of a key and its value. Down-projections are on every tensor rank.
    """
    whole: tuple[Role, Sharding] = ("whole", "rows")
    copied: tuple[Role, Sharding] = ("whole", "replicated")
    return (
        _layer("input_layernorm.weight", ("hidden",), "input_layernorm.weight", *copied),
        _layer(
            "self_attn.q_proj.weight",
            ("query", "hidden"),
            "self_attention.linear_q_proj.weight",
            *whole,
            "no query latent",
        ),
        _layer(
            "self_attn.q_a_proj.weight",
            ("query_rank", "hidden"),
            "self_attention.linear_q_down_proj.weight",
            *copied,
            "query latent",
        ),
        _layer(
            "self_attn.kv_a_proj_with_mqa.weight",
            ("latent", "hidden"),
            "self_attention.linear_kv_down_proj.weight",
            *copied,
        ),
        _layer(
            "self_attn.q_b_proj.weight",
            ("query", "query_rank"),
            "self_attention.linear_q_up_proj.weight",
            *whole,
            "query latent",
        ),
        _layer(
            "self_attn.kv_b_proj.weight",
            ("content_value", "key_value_rank"),
            "self_attention.linear_kv_up_proj.weight",
            *whole,
        ),
        _layer(
            "self_attn.q_a_layernorm.weight",
            ("query_rank",),
            "self_attention.q_layernorm.weight",
            *copied,
            "query latent",
        ),
        _layer("self_attn.kv_a_layernorm.weight", ("key_value_rank",), "self_attention.kv_layernorm.weight", *copied),
        _layer("self_attn.o_proj.weight", ("hidden", "value"), "self_attention.linear_proj.weight", "whole", "columns"),
        _layer("post_attention_layernorm.weight", ("hidden",), "pre_mlp_layernorm.weight", *copied),
    )


def _mlp(
    block: str, ours: str, width: str, names: tuple[str, str, str], where: Where | None = None
) -> tuple[TensorRule, ...]:
    """A gated MLP under the checkpoint's names for gate, up and down."""
    gate, up, down = (f"{block}.{name}.weight" for name in names)
    return (
        _layer(gate, (width, "hidden"), f"{ours}.linear_fc1.weight", "gate", "rows", where),
        _layer(up, (width, "hidden"), f"{ours}.linear_fc1.weight", "up", "rows", where),
        _layer(down, ("hidden", width), f"{ours}.linear_fc2.weight", "whole", "columns", where),
    )


_NAMES = ("gate_proj", "up_proj", "down_proj")
_DENSE_MLP = _mlp("mlp", "mlp", "intermediate", _NAMES)


def _router(block: str) -> TensorRule:
    return _layer(
        f"{block}.gate.weight", ("experts", "hidden"), "mlp.router.weight", "whole", "replicated", "expert layer"
    )


def _experts(block: str, names: tuple[str, str, str] = _NAMES) -> tuple[TensorRule, ...]:
    """The experts of one layer. `names`: the checkpoint's names for gate, up and down."""
    return _mlp(f"{block}.experts.{{expert}}", "mlp.experts.{expert}", "expert_intermediate", names, "expert layer")


_EXPERT_BIAS = _layer(
    "mlp.gate.e_score_correction_bias",
    ("experts",),
    "mlp.router.expert_bias",
    "whole",
    "replicated",
    "expert layer",
    is_buffer=True,
)
_SHARED_EXPERTS = _mlp("mlp.shared_experts", "mlp.shared_experts", "shared_intermediate", _NAMES, "expert layer")
_GATED_SHARED_EXPERT = (
    _layer(
        "mlp.shared_expert_gate.weight",
        ("one", "hidden"),
        "mlp.shared_experts.gate_weight",
        "whole",
        "replicated",
        "expert layer",
    ),
    *_mlp("mlp.shared_expert", "mlp.shared_experts", "shared_intermediate", _NAMES, "expert layer"),
)
_FIRST_DENSE = _mlp("mlp", "mlp", "intermediate", _NAMES, "dense layer")
# gpt-oss: the parts of its layers that other families lack, and its experts, which its checkpoints stack.
_SINKS = _layer("self_attn.sinks", ("heads",), "self_attention.core_attention.softmax_offset", "whole", "rows")
_OUTPUT_BIAS = _layer("self_attn.o_proj.bias", ("hidden",), "self_attention.linear_proj.bias", "whole", "replicated")
_BIASED_ROUTER = (
    _layer("mlp.router.weight", ("experts", "hidden"), "mlp.router.weight", "whole", "replicated"),
    _layer("mlp.router.bias", ("experts",), "mlp.router.bias", "whole", "replicated"),
)


def _stacked(
    name: str, shape: tuple[str, ...], parameter: str, role: Role, sharding: Sharding, stack: Stack
) -> TensorRule:
    own = _layer(f"mlp.experts.{{expert}}.{name}", shape, f"mlp.experts.{{expert}}.{parameter}", role, sharding)
    return replace(own, stack=replace(stack, name=f"model.layers.{{layer}}.mlp.experts.{stack.name}"))


def _gate_and_up(kind: str, shape: tuple[str, ...], stack: str) -> tuple[TensorRule, ...]:
    parameter = f"linear_fc1.{kind}"
    return (
        _stacked(f"gate_proj.{kind}", shape, parameter, "gate", "rows", Stack(stack, 0, 2)),
        _stacked(f"up_proj.{kind}", shape, parameter, "up", "rows", Stack(stack, 1, 2)),
    )


_WIDTH = "expert_intermediate"
_STACKED_EXPERTS = (
    *_gate_and_up("weight", (_WIDTH, "hidden"), "gate_up_proj"),
    *_gate_and_up("bias", (_WIDTH,), "gate_up_proj_bias"),
    _stacked("down_proj.weight", ("hidden", _WIDTH), "linear_fc2.weight", "whole", "columns", Stack("down_proj")),
    _stacked("down_proj.bias", ("hidden",), "linear_fc2.bias", "whole", "replicated", Stack("down_proj_bias")),
)
# Qwen3-Next and Qwen3.5: attention whose q_proj has a query and a gate for each head, and gated delta nets.
_GATED_ATTENTION = tuple(
    replace(row, where="attention", shape=("gated_query", "hidden") if row.role == "q" else row.shape)
    if ".self_attn." in row.name
    else row
    for row in _attention(*_QK_NORM)
)


def _delta(name: str, shape: tuple[str, ...], parameter: str, role: Role, sharding: Sharding = "rows") -> TensorRule:
    return _layer(f"linear_attn.{name}", shape, f"self_attention.{parameter}", role, sharding, "delta net")


def _delta_net(*projections: TensorRule) -> tuple[TensorRule, ...]:
    return (
        *projections,
        _delta("conv1d.weight", ("delta_conv", "one", "delta_kernel"), "conv1d.weight", "delta_conv"),
        _delta("dt_bias", ("delta_heads",), "dt_bias", "whole"),
        replace(_delta("A_log", ("delta_heads",), "A_log", "whole"), served_wide=True),
        _delta("norm.weight", ("delta_head",), "out_norm.weight", "whole", "replicated"),
        _delta("out_proj.weight", ("hidden", "delta_value"), "out_proj.weight", "whole", "columns"),
    )


_IN_PROJ = "in_proj.weight"
_QWEN3_NEXT_DELTA = _delta_net(
    _delta("in_proj_qkvz.weight", ("delta_qkvz", "hidden"), _IN_PROJ, "delta_qkvz"),
    _delta("in_proj_ba.weight", ("delta_ba", "hidden"), _IN_PROJ, "delta_ba"),
)
_QWEN3_5_DELTA = _delta_net(
    _delta("in_proj_qkv.weight", ("delta_conv", "hidden"), _IN_PROJ, "delta_qkv"),
    _delta("in_proj_z.weight", ("delta_value", "hidden"), _IN_PROJ, "delta_z"),
    _delta("in_proj_b.weight", ("delta_heads", "hidden"), _IN_PROJ, "delta_b"),
    _delta("in_proj_a.weight", ("delta_heads", "hidden"), _IN_PROJ, "delta_a"),
)
_DEEPSEEK_KEYS = ExpertKeys(("n_routed_experts", "num_local_experts"), "moe_intermediate_size", deepseek=True)


_VOCABULARY = ("vocabulary", "hidden")
EMBEDDING = TensorRule(
    "model.embed_tokens.weight", _VOCABULARY, "embedding.word_embeddings.weight", "whole", "vocabulary", "first"
)
_FINAL_NORM = TensorRule(
    "model.norm.weight", ("hidden",), "decoder.final_layernorm.weight", "whole", "replicated", "last"
)
HEAD = TensorRule("lm_head.weight", _VOCABULARY, "output_layer.weight", "whole", "vocabulary", "last")


def _decoder(*per_layer: TensorRule) -> tuple[TensorRule, ...]:
    """The table of a family in the order of export. `per_layer`: the rows of every layer."""
    return (EMBEDDING, *per_layer, _FINAL_NORM, HEAD)


_QWEN_KEYS = ExpertKeys(("num_experts", "num_local_experts"), "moe_intermediate_size")
_DELTA_FAMILY: dict[str, Any] = dict(
    qk_norm=True, rotary_share=0.25, delta_net=True, carried=("mtp.",), may_omit=frozenset({"head_dim"})
)


TEXT_PART, VISION_TOWER = "model.language_model.", "model.visual."


def _text_part(own: Family, architecture: str, **others: Any) -> Family:
    """The text part of a vision-language model, with the tensors of a family under `model.language_model.`. `others`:
    what else differs from that family.
    """
    tensors = tuple(
        replace(row, name=row.name.replace("model.", TEXT_PART, 1)) if row.name.startswith("model.") else row
        for row in own.tensors
    )
    return replace(
        own,
        architecture=architecture,
        tensors=tensors,
        text_part=True,
        carried=(*own.carried, VISION_TOWER),
        **others,
    )


FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        _decoder(*_attention(), *_DENSE_MLP),
        may_omit=frozenset({"head_dim", "num_key_value_heads", "rope_theta"}),
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        _decoder(*_attention(*_QKV_BIAS), *_DENSE_MLP),
        qkv_bias=True,
        may_omit=frozenset({"head_dim"}),
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _decoder(*_attention(*_QK_NORM), *_DENSE_MLP),
        qk_norm=True,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _decoder(*_attention(*_QK_NORM), _router("mlp"), *_experts("mlp")),
        qk_norm=True,
        experts=ExpertKeys(
            ("num_experts", "num_local_experts"), "moe_intermediate_size"
        ),  # 4.x and 5.x of transformers
        may_omit=frozenset({"head_dim"}),
        own_head=True,
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        _decoder(*_attention(*_QKV_BIAS), _router("mlp"), *_GATED_SHARED_EXPERT, *_experts("mlp")),
        qkv_bias=True,
        experts=ExpertKeys(
            ("num_experts", "num_local_experts"),
            "moe_intermediate_size",
            gated_shared="shared_expert_intermediate_size",
        ),
        may_omit=frozenset({"head_dim"}),
        understood=frozenset({"shared_expert_intermediate_size"}),
        own_head=True,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        _decoder(*_attention(), _router("block_sparse_moe"), *_experts("block_sparse_moe", ("w1", "w3", "w2"))),
        experts=ExpertKeys(("num_local_experts", "num_experts"), "intermediate_size", norm_topk_prob=True),
        may_omit=frozenset({"head_dim"}),
        refused={"sliding_window": "sliding-window attention", "router_jitter_noise": "noise in the router"},
        own_head=True,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        _decoder(*_attention(), *_DENSE_MLP),
        may_omit=frozenset({"head_dim"}),
        windows="every layer",
        serves_windows=False,
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        _decoder(*_attention(*_ALL_HEADS_NORM, norms=_OUTPUT_NORMS), *_DENSE_MLP),
        qk_norm=True,
        may_omit=frozenset({"head_dim"}),
        windows="three of four",
        served={
            "rope_theta": lambda config: full_positions(config).get("rope_theta", 500000.0),
            "rope_scaling": lambda config: full_positions(config) or None,
        },
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        _decoder(*_latent_attention(), *_FIRST_DENSE, _router("mlp"), _EXPERT_BIAS, *_SHARED_EXPERTS, *_experts("mlp")),
        experts=_DEEPSEEK_KEYS,
        may_omit=frozenset({"num_key_value_heads"}),
        understood=frozenset({"n_shared_experts", "num_nextn_predict_layers", "q_lora_rank", "kv_lora_rank"}),
        latent=True,
        served={"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        _decoder(
            *_attention(*_QKV_BIAS, *_QK_NORM),
            *_FIRST_DENSE,
            replace(_router("mlp"), served_wide=True),
            _EXPERT_BIAS,
            *_SHARED_EXPERTS,
            *_experts("mlp"),
        ),
        qk_norm="use_qk_norm",
        qkv_bias="attention_bias",
        rotary_share=0.5,
        experts=_DEEPSEEK_KEYS,
        may_omit=frozenset({"head_dim"}),
        understood=frozenset({"n_shared_experts", "num_nextn_predict_layers"}),
        own_head=True,
    ),
    "glm4_moe_lite": Family(
        "Glm4MoeLiteForCausalLM",
        _decoder(
            *_latent_attention(),
            *_FIRST_DENSE,
            replace(_router("mlp"), served_wide=True),
            _EXPERT_BIAS,
            *_SHARED_EXPERTS,
            *_experts("mlp"),
        ),
        experts=replace(_DEEPSEEK_KEYS, lists_layers=True),
        understood=frozenset({"n_shared_experts", "num_nextn_predict_layers", "q_lora_rank", "kv_lora_rank"}),
        latent=True,
        served={"first_k_dense_replace": listed_dense_layers},
        own_head=True,
    ),
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM",
        _decoder(
            *_attention(*_ALL_HEADS_NORM),
            replace(_router("block_sparse_moe"), served_wide=True),
            replace(_EXPERT_BIAS, name="model.layers.{layer}.block_sparse_moe.e_score_correction_bias"),
            *_experts("block_sparse_moe", ("w1", "w3", "w2")),
        ),
        qk_norm=True,
        rotary_share=0.5,
        experts=ExpertKeys(("num_local_experts", "num_experts"), "intermediate_size", minimax=True),
        refused={
            "router_jitter_noise": "noise in the router",
            "sliding_window": "sliding-window attention",
            "shared_intermediate_size": "shared experts",
        },
        served={
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "use_routing_bias": True,
            "scoring_func": "sigmoid",
            "rotary_dim": rotary_dim,
        },
        own_head=True,
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        _decoder(*_attention(*_QKV_BIAS, _SINKS), _OUTPUT_BIAS, *_BIASED_ROUTER, *_STACKED_EXPERTS),
        qkv_bias=True,
        experts=ExpertKeys(("num_local_experts", "num_experts"), "intermediate_size", norm_topk_prob=True),
        gpt_oss=True,
        windows="every other",
        own_head=True,
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        _decoder(*_GATED_ATTENTION, *_QWEN3_NEXT_DELTA, _router("mlp"), *_GATED_SHARED_EXPERT, *_experts("mlp")),
        experts=replace(_QWEN_KEYS, normalises=True, gated_shared="shared_expert_intermediate_size"),
        understood=frozenset({"shared_expert_intermediate_size"}),
        own_head=True,
        **_DELTA_FAMILY,
    ),
    "qwen3_5": Family(
        "Qwen3_5ForCausalLM",
        _decoder(*_GATED_ATTENTION, *_QWEN3_5_DELTA, *_DENSE_MLP),
        **_DELTA_FAMILY,
    ),
    "qwen3_5_moe": Family(
        "Qwen3_5MoeForCausalLM",
        _decoder(*_GATED_ATTENTION, *_QWEN3_5_DELTA, _router("mlp"), *_GATED_SHARED_EXPERT, *_experts("mlp")),
        experts=replace(_QWEN_KEYS, norm_topk_prob=True, gated_shared="shared_expert_intermediate_size"),
        understood=frozenset({"shared_expert_intermediate_size"}),
        may_stack="plain",
        **_DELTA_FAMILY,
    ),
}
FAMILIES |= {
    "qwen3_5_vl": _text_part(FAMILIES["qwen3_5"], "Qwen3_5ForConditionalGeneration"),
    "qwen3_5_moe_vl": _text_part(FAMILIES["qwen3_5_moe"], "Qwen3_5MoeForConditionalGeneration"),
    "qwen3_vl": _text_part(FAMILIES["qwen3"], "Qwen3VLForConditionalGeneration"),
    "qwen3_vl_moe": _text_part(
        FAMILIES["qwen3_moe"],
        "Qwen3VLMoeForConditionalGeneration",
        experts=replace(_QWEN_KEYS, norm_topk_prob=True),
        may_stack="transposed",
        own_head=False,
    ),
}
