"""Gated delta nets (Qwen3-Next, Qwen3.5): their keys in config.json, and the place of their tensors in Megatron.

Megatron fuses all projections of a layer into `in_proj`. A tensor rank has, one after the other, its queries, keys,
values, gates (z), betas (b) and alphas (a), and in `conv1d` its queries, keys and values. Heads are cut in order, a key
head together with its value heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gspo_mega.models.spec import DeltaNet, ModelSpec

if TYPE_CHECKING:
    from gspo_mega.models.hf_fields import ConfigReader
    from gspo_mega.models.tensors import TensorEntry

ROLES = ("delta_qkvz", "delta_ba", "delta_qkv", "delta_z", "delta_b", "delta_a", "delta_conv")
IN_PROJ = "self_attention.in_proj."
"""In the name of the parameter of all projections, which is never stored in FP8, because betas and alphas are not."""
UNROUNDED = frozenset({"delta_ba", "delta_b", "delta_a"})
"""Roles of tensors that neither the trainer nor a server's FP8 blocks round, as in published FP8 folders."""
_UNROUNDED_MODULES = ("in_proj_b", "in_proj_a", "in_proj_ba")
_DELTA, _FULL = "linear_attention", "full_attention"


def read_delta_net(reader: ConfigReader, num_layers: int) -> dict[str, Any]:
    """The fields of a ModelSpec that only these families have."""
    raw = reader.raw
    for key, only in (("attn_output_gate", True), ("output_gate_type", None), ("linear_conv_bias", False)):
        if raw.get(key, only) not in (only, *(("silu", "swish") if key == "output_gate_type" else ())):
            reader.problem(key, f"{raw[key]!r} is not supported; supported: {'absent' if only is None else only}")
    sizes = {
        name: reader.size(f"linear_{key}")
        for name, key in (
            ("key_heads", "num_key_heads"),
            ("value_heads", "num_value_heads"),
            ("key_dim", "key_head_dim"),
            ("value_dim", "value_head_dim"),
            ("kernel", "conv_kernel_dim"),
        )
    }
    if sizes["key_heads"] and sizes["value_heads"] % sizes["key_heads"]:
        reader.problem(
            "linear_num_value_heads",
            f"{sizes['value_heads']} is no multiple of linear_num_key_heads {sizes['key_heads']}",
        )
    kinds = raw.get("layer_types")
    if kinds is None:
        kinds = _kinds_every(
            reader.size("full_attention_interval") if "full_attention_interval" in raw else 4, num_layers
        )
    known = (_DELTA, _FULL)
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        reader.problem("layer_types", f"must be one of {', '.join(known)} for each of the {num_layers} layers")
        kinds = [_FULL] * num_layers
    layers = tuple(kind == _DELTA for kind in kinds)
    return dict(
        delta=DeltaNet(layers=layers, **sizes) if any(layers) else None, output_gate=True, zero_centred_norms=True
    )


def _kinds_every(every: int, num_layers: int) -> list[str]:
    """The kinds of layers if config.json does not list them, as transformers' default is."""
    return [_FULL if every and (layer + 1) % every == 0 else _DELTA for layer in range(num_layers)]


def attention_interval(layers: tuple[bool, ...]) -> int | None:
    """The number n for which every n-th layer, and no other, has attention; None if there is none. `layers`: whether a
    layer has a gated delta net.
    """
    every = layers.index(False) + 1 if False in layers else len(layers) + 1
    return every if layers == tuple((layer + 1) % every != 0 for layer in range(len(layers))) else None


def read_by_sglang(text: dict[str, Any]) -> dict[str, Any]:
    """The values that SGLang's code for these models reads from a config.json and that transformers 5 writes in another
    form: where attention is, and the rotary base.
    """
    values: dict[str, Any] = {}
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and (every := attention_interval(tuple(kind == _DELTA for kind in kinds))):
        values["full_attention_interval"] = every
    rope = text.get("rope_parameters")
    if isinstance(rope, dict):
        values |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    return values


def unrounded_modules(raw: dict[str, Any]) -> tuple[str, ...]:
    """The modules that a folder of FP8 blocks leaves plain, for `quantization_config`, by its config.json; none for
    other models. SGLang fuses betas and alphas, and published folders name both forms.
    """
    text = raw.get("text_config") or raw
    if "linear_num_value_heads" not in text:
        return ()
    layers = "model.language_model.layers" if "text_config" in raw else "model.layers"
    kinds = text.get("layer_types") or _kinds_every(text.get("full_attention_interval", 4), text["num_hidden_layers"])
    return tuple(
        f"{layers}.{layer}.linear_attn.{name}"
        for layer, kind in enumerate(kinds)
        if kind == _DELTA
        for name in _UNROUNDED_MODULES
    )


def has_norm_around_zero(spec: ModelSpec, entry: TensorEntry) -> bool:
    """Whether it is the weight of a norm that multiplies by 1 + weight: any but those inside gated delta nets."""
    return spec.zero_centred_norms and entry.name.endswith("norm.weight") and ".linear_attn." not in entry.name


def sizes(delta: DeltaNet) -> dict[str, int]:
    """The sizes that the family tables name."""
    return {
        "delta_qkvz": 2 * delta.keys + 2 * delta.values,
        "delta_ba": 2 * delta.value_heads,
        "delta_conv": 2 * delta.keys + delta.values,
        "delta_value": delta.values,
        "delta_heads": delta.value_heads,
        "delta_head": delta.value_dim,
        "delta_kernel": delta.kernel,
    }


def fused_rows(delta: DeltaNet, role: str) -> int:
    """Rows of the whole parameter that holds tensors of this role."""
    convolved = 2 * delta.keys + delta.values
    return convolved if role == "delta_conv" else convolved + delta.values + 2 * delta.value_heads


def _head_rows(delta: DeltaNet) -> dict[str, int]:
    """The rows of one key head in each section of Megatron's fused projection, in its order."""
    values = delta.value_heads // delta.key_heads
    key, value = delta.key_dim, values * delta.value_dim
    return dict(q=key, k=key, v=value, z=value, b=values, a=values)


def section_rows(delta: DeltaNet, parts: int) -> dict[str, int]:
    """The rows of each section of the fused projection on one of `parts` tensor ranks, in its order."""
    return {name: delta.key_heads // parts * rows for name, rows in _head_rows(delta).items()}


def rank_rows(delta: DeltaNet, role: str, parts: int, rank: int) -> Iterator[tuple[int, int, int]]:
    """(start in the tensor, start in the rank's parameter, number of rows) of what rank `rank` of `parts` holds.

    A file of Qwen3-Next has the tensors `delta_qkvz` and `delta_ba` key head by key head: its query, key, values and
    gates; its betas and alphas. All other tensors have their sections one after the other. `parts` divides the key
    heads.
    """
    heads = delta.key_heads // parts
    of_head = _head_rows(delta)
    local, place = {}, 0
    for name, rows in of_head.items():
        local[name] = place
        place += heads * rows
    names = {"delta_conv": "qkv"}.get(role, role.removeprefix("delta_"))
    if role in ("delta_qkvz", "delta_ba"):
        width = sum(of_head[name] for name in names)
        for head in range(heads):
            start = (rank * heads + head) * width
            for name in names:
                yield start, local[name] + head * of_head[name], of_head[name]
                start += of_head[name]
        return
    start = 0
    for name in names:
        yield start + rank * heads * of_head[name], local[name], heads * of_head[name]
        start += delta.key_heads * of_head[name]
