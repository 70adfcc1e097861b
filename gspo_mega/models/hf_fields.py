"""The fields of a Hugging Face `config.json` that need more than a look-up.

`ConfigReader` has typed look-ups and collects every problem instead of raising at the first. With it are read: the
rotary positions (their base, and how they were stretched after training); the attention, router and experts of
DeepSeek-V3; and of gpt-oss the windows, the clamped activation and MXFP4. A setting is refused by name if Megatron's
layers would compute something else than transformers does for the same config.json.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeGuard

from gspo_mega.models.families import Family, listed_dense_layers
from gspo_mega.models.spec import LatentAttention, MoeSpec, RopeScaling, SlidingWindow, YarnScaling

# The largest values of numbers that are counted up to, or multiplied: far beyond any model.
_LARGEST = {
    **dict.fromkeys(("num_hidden_layers", "first_k_dense_replace", "max_window_layers"), 4096),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), 2**16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), 2**14),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group"), 2**14),
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 2**24),
    **dict.fromkeys(("shared_expert_intermediate_size",), 2**24),
    "vocab_size": 2**28,
}
_LARGEST_SIZE = 2**31
_LARGEST_NUMBER = 1e30
MOST_EXPERTS_OF_ALL_LAYERS = 2**18


def shown(value: Any) -> str:
    """The beginning of a value's `repr`, or its type if it is nested too deeply."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= 80 else f"{text[:80]}..."


class ConfigReader:
    """Typed look-ups in a config.json. Problems are collected, and a bad size is 0 until they are raised."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self.raw = raw
        self.problems: list[str] = []

    def problem(self, key: str, text: str) -> None:
        """Add a problem of `key`."""
        self.problems.append(f"{key}: {text}")

    def is_omitted(self, key: str, family: Family) -> bool:
        """Whether the key is absent, and this family allows that."""
        return self.raw.get(key) is None and key in family.may_omit

    def size(self, *keys: str) -> int:
        """The positive whole number under the first of these keys that is there; 0 with a problem."""
        key = next((key for key in keys if self.raw.get(key) is not None), keys[0])
        value = self.raw.get(key)
        most = _LARGEST.get(key, _LARGEST_SIZE)
        if isinstance(value, int) and not isinstance(value, bool) and value > most:
            self.problem(key, f"is {shown(value)}; no model has more than {most}")
            return 0
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        self.problem(
            key,
            "missing; a positive whole number"
            if value is None
            else f"is {shown(value)}; must be a positive whole number",
        )
        return 0

    def count(self, key: str) -> int:
        """A whole number that may be 0, and is 0 if the key is absent."""
        value = self.raw.get(key)
        return 0 if value in (None, 0) and not isinstance(value, bool) else self.size(key)

    def number(self, key: str) -> float:
        """The positive number under this key; 1.0 with a problem."""
        return self.check_number(key, self.raw.get(key))

    def check_number(self, key: str, value: Any) -> float:
        """`value`, which the folder has under `key`, if it is a positive number; else 1.0 with a problem."""
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < _LARGEST_NUMBER:
            return float(value)
        self.problem(
            key, "missing; a positive number" if value is None else f"is {shown(value)}; must be a positive number"
        )
        return 1.0

    def flag(self, key: str, default: bool) -> bool:
        """The boolean under this key; `default` if it is absent, or with a problem."""
        value = self.raw.get(key, default)
        if isinstance(value, bool):
            return value
        self.problem(key, f"is {shown(value)}; must be true or false")
        return default


# --- Rotary positions ----------------------------------------------------------------------------------------


def read_rope(reader: ConfigReader, family: Family) -> tuple[float, RopeScaling | YarnScaling | None, float]:
    """(rotary base, scaling, the part of a head that positions rotate). The base is at the top level (transformers 4.x)
    or in `rope_parameters` (5.x). The scaling is that of the family (Llama 3's, or YaRN with latent attention and in
    gpt-oss); any other is refused.
    """
    theta = reader.raw.get("rope_theta")
    shares = {"partial_rotary_factor": reader.raw.get("partial_rotary_factor")}
    scalings: list[RopeScaling | YarnScaling] = []
    has_yarn = family.latent or family.gpt_oss or family.windows == "three of four"
    own = "yarn" if has_yarn else "llama3"
    known = "'default'" if family.rotary_share < 1 else f"'default', {own!r}"
    for key in ("rope_parameters", "rope_scaling"):
        rope = reader.raw.get(key)
        if rope is None:
            continue
        if isinstance(rope, dict) and family.windows == "three of four" and "full_attention" in rope:
            rope = _of_full_layers(reader, rope)
        if not isinstance(rope, dict):
            reader.problem(key, f"is {rope!r}; must be an object")
            continue
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == own and family.rotary_share == 1:
            scalings.append(_yarn(reader, key, rope, family) if has_yarn else _llama3(reader, key, rope))
        elif kind != "default":
            reader.problem(key, f"rotary scaling {kind!r} is not supported; supported: {known}")
        theta = rope.get("rope_theta", theta)
        shares[key] = rope.get("partial_rotary_factor")
    if family.windows == "three of four" and "rope_theta" in reader.raw and reader.raw["rope_theta"] != _OLMO_THETA:
        reader.problem(
            "rope_theta",
            f"{reader.raw['rope_theta']!r}: transformers gives layers with a window {_OLMO_THETA} in any case;"
            f" supported: {_OLMO_THETA}, or rope_parameters for both kinds of layers",
        )
    if len(set(scalings)) > 1:
        reader.problem("rope_scaling", "contradicts rope_parameters; keep one of them")
    if theta is None and "rope_theta" in family.may_omit:
        theta = 10000.0
    return (
        reader.check_number("rope_theta", theta),
        scalings[0] if scalings else None,
        _share(reader, family, {key: share for key, share in shares.items() if share is not None}),
    )


def unsectioned_positions(text: dict[str, Any]) -> dict[str, Any]:
    """The keys that give SGLang the rotary positions of a config.json without `mrope_section`, which divides a head's
    elements among an image's time, height and width. Empty if they have no sections.
    """
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    if not isinstance(rope, dict) or "mrope_section" not in rope:
        return {}
    kept = {key: rope.get(key, text.get(key)) for key in ("rope_theta", "partial_rotary_factor")}
    return {"rope_parameters": None} | {key: value for key, value in kept.items() if value is not None}


def _share(reader: ConfigReader, family: Family, given: dict[str, Any]) -> float:
    """`partial_rotary_factor`, from the places that name it. As in transformers, a value among the rotary parameters
    counts, and not the one at the top level, where transformers also writes its default.
    """
    for key, share in given.items():
        if family.rotary_share == 1:
            if share != 1.0:
                text = "" if key == "partial_rotary_factor" else "partial_rotary_factor "
                reader.problem(key, f"{text}{share!r} is not supported; supported: 1.0")
        elif not _is_number(share) or not 0 < share <= 1:
            reader.problem(key, f"partial_rotary_factor is {share!r}; must be above 0 and at most 1")
    if family.rotary_share == 1:
        return 1.0
    if "rotary_dim" in family.served:
        given = _with_rotary_dim(reader, given)
    inside = [share for key, share in given.items() if key != "partial_rotary_factor"]
    if len(set(map(str, inside))) > 1:
        reader.problem("rope_scaling", "has another partial_rotary_factor than rope_parameters; keep one of them")
    share = inside[0] if inside else given.get("partial_rotary_factor", family.rotary_share)
    return float(share) if _is_number(share) else 1.0


def _with_rotary_dim(reader: ConfigReader, given: dict[str, Any]) -> dict[str, Any]:
    """The shares with that of `rotary_dim`, which published folders of MiniMax have: SGLang reads only this key, and
    transformers takes it if there is no share.
    """
    if reader.raw.get("rotary_dim") is None:
        if not given:
            reader.problem("rotary_dim", "missing, and so is partial_rotary_factor; one of them")
        return given
    share = reader.size("rotary_dim") / max(1, reader.size("head_dim"))
    for key, other in given.items():
        if other != share:
            reader.problem("rotary_dim", f"{share:g} of head_dim, and partial_rotary_factor of {key} is {other!r}")
    return given or {"partial_rotary_factor": share}


def _llama3(reader: ConfigReader, key: str, rope: dict[str, Any]) -> RopeScaling:
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    values = [value for name in names if _is_number(value := rope.get(name)) and value > 0]
    if len(values) < len(names):
        wanted = "factor, low_freq_factor, high_freq_factor and original_max_position_embeddings"
        reader.problem(key, f"'llama3' needs positive numbers {wanted}")
        return RopeScaling(1.0, 1.0, 2.0, 1)
    factor, low, high, positions = values
    if low >= high:
        reader.problem(key, f"low_freq_factor {low} is not below high_freq_factor {high}")
    return RopeScaling(float(factor), float(low), float(high), int(positions))


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _yarn(reader: ConfigReader, key: str, rope: dict[str, Any], family: Family) -> YarnScaling:
    """YaRN, as far as Megatron and transformers compute the same. With latent attention the range of wavelengths must
    be in whole dimensions. Cosines must be scaled only by `mscale` and `mscale_all_dim`, both or neither.
    """
    values = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.0, "mscale_all_dim": 0.0} | {
        n: v for n, v in rope.items() if v is not None
    }
    wanted = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
    for name in (*wanted, "mscale", "mscale_all_dim"):
        value = values.get(name)
        if not _is_number(value) or value < 0 or (name in wanted and value == 0):
            reader.problem(key, f"'yarn' needs a positive number {name}, not {value!r}")
            return YarnScaling(1.0, 1, 32.0, 1.0, 1.0, 0.0)
    rounds = values.get("truncate", True)
    if not isinstance(rounds, bool):
        reader.problem(key, f"truncate is {rounds!r}; must be true or false")
    if family.latent and rounds is not True:
        reader.problem(
            key,
            "truncate false: Megatron's YaRN with latent attention always rounds to whole dimensions; supported: true",
        )
    if values.get("attention_factor") == 0.1 * math.log(values["factor"]) + 1:
        del values["attention_factor"]  # the default, written out
    if "attention_factor" in values:
        reader.problem(
            key,
            f"attention_factor {values['attention_factor']!r} is not supported; supported: mscale and mscale_all_dim",
        )
    scale, scale_all = float(values["mscale"]), float(values["mscale_all_dim"])
    if scale_all and not scale:
        reader.problem(
            key,
            f"mscale_all_dim {scale_all} without mscale: transformers then scales scores and not cosines, Megatron"
            " both",
        )
    if not scale_all:
        scale = 1.0  # transformers reads mscale only together with mscale_all_dim
    return YarnScaling(
        float(values["factor"]),
        int(values["original_max_position_embeddings"]),
        float(values["beta_fast"]),
        float(values["beta_slow"]),
        scale,
        scale_all,
        rounds is True,
    )


_OLMO_THETA = 500000


def _of_full_layers(reader: ConfigReader, rope: dict[str, Any]) -> dict[str, Any]:
    """The positions of layers without a window. Those with a window must have the same base and no scaling."""
    full, windowed = rope["full_attention"], rope.get("sliding_attention") or {}
    if windowed.get("rope_type", "default") != "default" or windowed.get("rope_theta") != full.get("rope_theta"):
        reader.problem(
            "rope_parameters",
            f"sliding_attention is {shown(windowed)}; supported: rope_type 'default' with the rope_theta of"
            " full_attention",
        )
    return full


# --- Sliding windows -----------------------------------------------------------------------------------------

_KINDS = ("full_attention", "sliding_attention")


def read_window(reader: ConfigReader, family: Family, num_layers: int) -> SlidingWindow | None:
    """The window of a family that may have one; None where none acts. Absent keys are those of transformers."""
    if family.windows is None or (not family.gpt_oss and reader.raw.get("sliding_window", 4096) is None):
        return None
    if family.windows == "every layer":
        layers = (True,) * num_layers
    else:
        every = 4 if family.windows == "three of four" else 2
        layers = _windowed_layers(reader, num_layers, lambda layer: (layer + 1) % every != 0)
    if not any(layers):
        return None
    is_default = not family.gpt_oss and "sliding_window" not in reader.raw
    tokens = 4096 if is_default else reader.size("sliding_window")
    return SlidingWindow(tokens, layers) if 0 < tokens < reader.size("max_position_embeddings") else None


def _windowed_layers(reader: ConfigReader, num_layers: int, default: Callable[[int], bool]) -> tuple[bool, ...]:
    """Whether each layer has the window: what `layer_types` says, or `default` of transformers."""
    kinds = reader.raw.get("layer_types")
    if kinds is None:
        return tuple(default(layer) for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in _KINDS for kind in kinds):
        reader.problem("layer_types", f"is {shown(kinds)}; must be one of {', '.join(_KINDS)} for each layer")
        return ()
    return tuple(kind == _KINDS[1] for kind in kinds)


# --- DeepSeek-V3 ---------------------------------------------------------------------------------------------

# transformers gives the norms of the latents this epsilon, for any rms_norm_eps.
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


def read_experts(
    reader: ConfigReader, num_experts: int, experts_per_token: int, intermediate_size: int, lists_layers: bool
) -> MoeSpec:
    """The router with sigmoid scores, bias and groups; shared experts; the first dense layers, which are numbered or
    listed one by one (`lists_layers`).
    """
    raw = reader.raw
    for key, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
        if raw.get(key, only) != only:
            reader.problem(key, f"{raw[key]!r} is not supported; supported: {only!r}")
    # Megatron divides sigmoid scores by their sum if a token goes to several experts, and never if it goes to one.
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
    num_layers = reader.size("num_hidden_layers")
    num_dense = listed_dense_layers(raw) if lists_layers else reader.count("first_k_dense_replace")
    if lists_layers and raw.get("mlp_layer_types") not in (None, _listed(num_dense, num_layers)):
        reader.problem("mlp_layer_types", "dense layers after the first with experts are not supported")
    if lists_layers and raw.get("first_k_dense_replace", num_dense) != num_dense:
        reader.problem(
            "first_k_dense_replace",
            f"{raw['first_k_dense_replace']}: SGLang reads this key, and transformers mlp_layer_types, of which"
            f" {num_dense} are dense (absent: 1); supported: the same number",
        )
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


def _listed(num_dense: int, num_layers: int) -> list[str]:
    return ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense)


def _groups_agree(group_size: int, experts_per_token: int, groups_per_token: int) -> bool:
    return (
        experts_per_token // groups_per_token == 2
        and group_size >= 2
        and group_size * groups_per_token >= experts_per_token
    )


# --- MiniMax-M2 ----------------------------------------------------------------------------------------------

# The keys that transformers does not read, with the only value for which SGLang computes the same.
_MINIMAX = {
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "use_routing_bias": True,
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    **dict.fromkeys(("layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta"), 1.0),
}


def read_minimax(reader: ConfigReader, num_experts: int, experts_per_token: int, intermediate_size: int) -> MoeSpec:
    """The router with sigmoid scores and a bias, whose chosen scores are divided by their sum."""
    for key, only in _MINIMAX.items():
        if reader.raw.get(key, only) != only:
            reader.problem(key, f"{reader.raw[key]!r} is not supported; supported: {only!r}")
    if any(kind != 1 for kind in reader.raw.get("attn_type_list") or []):
        reader.problem("attn_type_list", "has layers with linear attention; supported: 1 for every layer")
    if experts_per_token == 1:
        text = "1: Megatron does not divide the score of a single expert by itself; supported: 2 or more"
        reader.problem("num_experts_per_tok", text)
    return MoeSpec(
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        expert_intermediate_size=intermediate_size,
        score_function="sigmoid",
        expert_bias=True,
    )


# --- gpt-oss -------------------------------------------------------------------------------------------------

# Megatron's activation has this gain and this offset only.
_ALPHA = 1.702
_FP4_CONFIG = {"quant_method", "modules_to_not_convert", "dequantize"}


def read_gpt_oss(reader: ConfigReader) -> dict[str, Any]:
    """The fields of a ModelSpec that only this family has."""
    raw = reader.raw
    if raw.get("attention_bias", True) is not True:
        reader.problem("attention_bias", f"{raw['attention_bias']!r} is not supported in this family; supported: true")
    for key in ("swiglu_alpha", "hidden_act_alpha"):
        if raw.get(key, _ALPHA) != _ALPHA:
            reader.problem(key, f"{raw[key]!r} is not supported; supported: {_ALPHA}, Megatron's only gain")
    if raw.get("rope_scaling") is None and raw.get("rope_parameters") is None:
        reader.problem("rope_scaling", "missing; transformers then takes YaRN with a factor of 32: write it out")
    return dict(
        linear_bias=True,
        sinks=True,
        swiglu_limit=reader.number("swiglu_limit") if "swiglu_limit" in raw else 7.0,
        stored_fp4=_is_fp4(reader),
    )


def is_fp4(raw: dict[str, Any]) -> bool:
    """Whether a config.json says that weights are MXFP4."""
    config = raw.get("quantization_config")
    return isinstance(config, dict) and config.get("quant_method") == "mxfp4"


def needs_plain_copy(raw: dict[str, Any], dtype: str) -> bool:
    """Whether a server of this dtype (`bfloat16`) must start from a plain copy of the folder with this config.json.
    SGLang would keep MXFP4 weights as they are, and nothing can be published to those. It also makes the linear layers
    of gpt-oss in the dtype that config.json names.
    """
    if "GptOssForCausalLM" not in (raw.get("architectures") or []):
        return False
    return is_fp4(raw) or (raw.get("dtype") or raw.get("torch_dtype")) != dtype


def _is_fp4(reader: ConfigReader) -> bool:
    if not is_fp4(reader.raw):
        return False
    if unknown := sorted(reader.raw["quantization_config"].keys() - _FP4_CONFIG):
        reader.problem("quantization_config", f"of mxfp4: not known: {', '.join(unknown)}")
    return True
