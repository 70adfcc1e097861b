"""The rotary positions of a `config.json`: their base, and how they were stretched after training."""

from __future__ import annotations

from typing import Any, TypeGuard

from gspo_mega.models.config_reader import ConfigReader
from gspo_mega.models.spec import RopeScaling, YarnScaling
from gspo_mega.models.table_rows import Family


def read_rope(reader: ConfigReader, family: Family) -> tuple[float, RopeScaling | YarnScaling | None, float]:
    """The rotary base, at the top level (4.x) or in `rope_parameters` (5.x); the family's scaling (Llama 3's, or YaRN
    with latent attention and in gpt-oss), any other is refused; the part of a head that is turned.
    """
    theta = reader.raw.get("rope_theta")
    shares = {"partial_rotary_factor": reader.raw.get("partial_rotary_factor")}
    scalings: list[RopeScaling | YarnScaling] = []
    has_yarn = family.latent or family.gpt_oss
    own = "yarn" if has_yarn else "llama3"
    known = "'default'" if family.rotary_share < 1 else f"'default', {own!r}"
    for key in ("rope_parameters", "rope_scaling"):
        rope = reader.raw.get(key)
        if rope is None:
            continue
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
    if len(set(scalings)) > 1:
        reader.problem("rope_scaling", "contradicts rope_parameters; keep one of them")
    if theta is None and "rope_theta" in family.may_omit:
        theta = 10000.0
    return (
        reader.check_number("rope_theta", theta),
        scalings[0] if scalings else None,
        _share(reader, family, {key: share for key, share in shares.items() if share is not None}),
    )


def _share(reader: ConfigReader, family: Family, given: dict[str, Any]) -> float:
    """`partial_rotary_factor`, from the places that name it. As in transformers, which writes its default beside it,
    one among the rotary parameters counts and not the one at the top level.
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
    inside = [share for key, share in given.items() if key != "partial_rotary_factor"]
    if len(set(map(str, inside))) > 1:
        reader.problem("rope_scaling", "has another partial_rotary_factor than rope_parameters; keep one of them")
    share = inside[0] if inside else given.get("partial_rotary_factor", family.rotary_share)
    return float(share) if _is_number(share) else 1.0


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
    """YaRN where Megatron and transformers compute the same: with latent attention the range of wavelengths in whole
    dimensions, and cosines scaled by `mscale` and `mscale_all_dim` alone, both or neither.
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
        rounds is True,
    )
