"""What a row of a family table is, and what a family has beside its rows.

Declarations of types alone; the tables are `tables.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# How a tensor lies in its parameter. `q`, `k`, `v`: interleaved by key-value group, [q heads of the group, k, v].
# `gate`, `up`: every rank's share of the gate, then its share of up.
Role = Literal["whole", "q", "k", "v", "gate", "up"]
# How a tensor is cut over a tensor-parallel group: rows (column-parallel layer), columns (row-parallel layer),
# vocabulary rows (padded), or not at all.
Sharding = Literal["replicated", "rows", "columns", "vocabulary"]
# Which pipeline stage holds it.
Stage = Literal["first", "layer", "last"]
# Where a row holds: in layers without or with experts, in models whose queries have a latent or have none, in models
# that have the norms or the biases.
Where = Literal["dense layer", "expert layer", "query latent", "no query latent", "qk norm", "qkv bias"]
# What a config.json may leave out: head_dim is then hidden_size / num_attention_heads, num_key_value_heads is
# num_attention_heads, rope_theta 10000.
Omissible = Literal["head_dim", "num_key_value_heads", "rope_theta"]


@dataclass(frozen=True)
class TensorRule:
    """One row of a family table; `{layer}` and `{expert}` are filled in, sizes are named as in `families.py`.

    `where`: None for everywhere. `is_buffer`: Megatron keeps it as a buffer: no gradient, no optimizer, and fp32 in
    whatever precision the model is. `served_wide`: SGLang holds it in fp32, whatever it is sent in. `stack`: the
    checkpoint has no such tensor, but one of all experts with this one in it; `name` is then this package's.
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
    [experts, rows] of biases. An expert's tensor has every `step`-th of these rows, from `first` on.
    """

    name: str
    first: int = 0
    step: int = 1


@dataclass(frozen=True)
class ExpertKeys:
    """Where a family's config.json describes its experts: `num_experts` under any of these keys, their width under
    `intermediate_size`. `norm_topk_prob` is the family's own, or None where the key of that name says (absent: false).
    `gated_shared`: the key of the width of a shared expert whose output a gate multiplies, None without one.
    `deepseek`: DeepSeek-V3's router (sigmoid scores, a bias, groups), shared experts and first dense layers, under its
    keys.
    """

    num_experts: tuple[str, ...]
    intermediate_size: str
    norm_topk_prob: bool | None = None
    gated_shared: str | None = None
    deepseek: bool = False


@dataclass(frozen=True)
class Family:
    """One architecture. `architecture` is the class name in config.json; `qk_norm` and `qkv_bias` hold for every model
    of it, or are a key of config.json that says so (absent: false). `rotary_share`: the part of a head that is turned
    where config.json has no partial_rotary_factor; only families with less than 1 may have one.

    `refused`: keys of config.json, and their meaning, that change this family's maths to what is not done here when
    they are set; `understood`: keys that other families refuse. `latent`: multi-head latent attention. `gpt_oss`: what
    `models/gpt_oss.py` reads: biases everywhere, sinks, windows and a clamped activation.
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
