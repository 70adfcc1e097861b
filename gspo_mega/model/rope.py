"""The rotary positions of a `config.json`: their base, and how they were stretched after training."""

from __future__ import annotations

from typing import Any, TypeGuard

from gspo_mega.model.config_reader import ConfigReader
from gspo_mega.model.spec import RopeScaling, YarnScaling
from gspo_mega.model.tables import Family


def read_rope(reader: ConfigReader, family: Family) -> tuple[float, RopeScaling | YarnScaling | None]:
    """The rotary base, at the top level (4.x) or in `rope_parameters` (5.x), and the family's scaling (Llama 3's, or
    YaRN with latent attention); any other is refused.
    """
    theta = reader.raw.get("rope_theta")
    scalings: list[RopeScaling | YarnScaling] = []
    own = "yarn" if family.latent else "llama3"
    for key in ("rope_parameters", "rope_scaling"):
        rope = reader.raw.get(key)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            reader.problem(key, f"is {rope!r}; must be an object")
            continue
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == own:
            scalings.append((_yarn if family.latent else _llama3)(reader, key, rope))
        elif kind != "default":
            reader.problem(key, f"rotary scaling {kind!r} is not supported; supported: 'default', {own!r}")
        theta = rope.get("rope_theta", theta)
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            reader.problem(
                key, f"partial_rotary_factor {rope['partial_rotary_factor']!r} is not supported; supported: 1.0"
            )
    if len(set(scalings)) > 1:
        reader.problem("rope_scaling", "contradicts rope_parameters; keep one of them")
    if reader.raw.get("partial_rotary_factor", 1.0) != 1.0:
        reader.problem(
            "partial_rotary_factor", f"{reader.raw['partial_rotary_factor']!r} is not supported; supported: 1.0"
        )
    if theta is None and "rope_theta" in family.may_omit:
        theta = 10000.0
    return reader.check_number("rope_theta", theta), scalings[0] if scalings else None


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


def _yarn(reader: ConfigReader, key: str, rope: dict[str, Any]) -> YarnScaling:
    """YaRN where Megatron and transformers compute the same: the range of wavelengths in whole dimensions, and cosines
    scaled by `mscale` and `mscale_all_dim` alone, both or neither.
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
    if values.get("truncate", True) is not True:
        reader.problem(
            key,
            "truncate false: Megatron's YaRN with latent attention always rounds to whole dimensions; supported: true",
        )
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
        scale = 1.0  # transformers reads mscale only beside mscale_all_dim
    return YarnScaling(
        float(values["factor"]),
        int(values["original_max_position_embeddings"]),
        float(values["beta_fast"]),
        float(values["beta_slow"]),
        scale,
        scale_all,
    )
