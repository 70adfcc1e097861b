"""What a gpt-oss `config.json` says besides other families' keys: windows, the clamped activation, MXFP4.

A setting is refused by name where Megatron's layers would compute something else than transformers does for the same
config.
"""

from __future__ import annotations

from typing import Any

from gspo_mega.models.config_reader import ConfigReader
from gspo_mega.models.spec import SlidingWindow

# Megatron's activation has this gain and this offset only.
_ALPHA = 1.702
_KINDS = ("full_attention", "sliding_attention")
_FP4_CONFIG = {"quant_method", "modules_to_not_convert", "dequantize"}


def read_gpt_oss(reader: ConfigReader, num_layers: int) -> dict[str, Any]:
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
        window=_window(reader, num_layers),
        stored_fp4=_is_fp4(reader),
    )


def _window(reader: ConfigReader, num_layers: int) -> SlidingWindow | None:
    kinds = reader.raw.get("layer_types")
    if kinds is None:  # as transformers has it
        kinds = [_KINDS[(layer + 1) % 2] for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in _KINDS for kind in kinds):
        reader.problem("layer_types", f"is {kinds!r}; must be one of {', '.join(_KINDS)} for each layer")
        return None
    layers = tuple(kind == _KINDS[1] for kind in kinds)
    return SlidingWindow(reader.size("sliding_window"), layers) if any(layers) else None


def is_fp4(raw: dict[str, Any]) -> bool:
    """Does a config.json say that weights are MXFP4?"""
    config = raw.get("quantization_config")
    return isinstance(config, dict) and config.get("quant_method") == "mxfp4"


def needs_plain_copy(raw: dict[str, Any], dtype: str) -> bool:
    """Must a server of this dtype (`bfloat16`) start from a plain copy of the folder with this config.json? SGLang
    would keep MXFP4 as it is, to which nothing can be published, and it makes the linear layers of gpt-oss in the dtype
    that config.json names.
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
