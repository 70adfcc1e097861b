"""The block-FP8 layout of a Hugging Face folder, as DeepSeek-V3 and Qwen3-FP8 are published: which tensors are
quantised, the names of their scales, and `quantization_config`.

A quantised `X.weight` of [n, m] is float8 e4m3 and stands for `X.weight[i, j] * X.weight_scale_inv[i // b0, j // b1]`;
the scales have the shape [ceil(n / b0), ceil(m / b1)]. Rounding is in `gspo_mega.algorithm`, reading and writing of
tensors in `gspo_mega.checkpoint`. This module imports no torch.
"""

from __future__ import annotations

from typing import Any

from gspo_mega.config.precision import BLACKWELL, WEIGHT_BLOCK, has_powers_of_two, loads_quantized
from gspo_mega.config.schema import Cluster, Config, Fp8
from gspo_mega.models import delta_net
from gspo_mega.models.hf_fields import ConfigReader
from gspo_mega.models.spec import BlockFp8
from gspo_mega.models.tensors import TensorEntry

SCALE_SUFFIX = "_scale_inv"
SERVED_BLOCK = WEIGHT_BLOCK  # rows and columns of a block as servers hold it
KEY = "quantization_config"

_ONLY = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
# All keys that such a configuration may have. Some have no meaning for the stored weights.
_UNDERSTOOD = {*_ONLY, "weight_block_size", "scale_fmt", "modules_to_not_convert", "ignored_layers", "dequantize"}
_OTHERS = ("weight_per_tensor", "act_per_tensor")  # other scales than those of blocks, which Qwen3.8-FP8 denies
_GATES = (".router.weight", ".shared_experts.gate_weight")
_BLACKWELL_NAMES = ("B200",)


def read_block_fp8(reader: ConfigReader) -> BlockFp8 | None:
    """The layout that a config.json names, or None if its weights are plain. Another quantisation is added to the
    problems of `reader`.
    """
    raw = reader.raw.get(KEY)
    if not raw:
        return None
    if not isinstance(raw, dict):
        reader.problem(KEY, f"is {raw!r}; must be an object")
        return None
    # `fmt` has only one value so far, and some folders leave it out.
    found = {key: raw.get(key, only if key == "fmt" else None) for key, only in _ONLY.items()}
    if found["fmt"] == "float8_e4m3fn":  # torch's name, as MiniMax-M2 has it
        found["fmt"] = _ONLY["fmt"]
    wrong = [f"{key} is {value!r}, supported: {_ONLY[key]!r}" for key, value in found.items() if value != _ONLY[key]]
    block = raw.get("weight_block_size")
    sizes = block if isinstance(block, list) and len(block) == 2 else [0, 0]
    if not all(type(size) is int and size > 0 for size in sizes):
        wrong.append(
            f"weight_block_size is {block!r}, supported: rows and columns of a block such as [128, 128], not one scale"
            " per tensor or per row"
        )
    scale_format = raw.get("scale_fmt")
    if scale_format not in (None, "ue8m0"):
        wrong.append(f"scale_fmt is {scale_format!r}, supported: none (any float32) or 'ue8m0' (powers of two)")
    kept = raw.get("modules_to_not_convert") or raw.get("ignored_layers") or []
    if not isinstance(kept, list) or not all(isinstance(name, str) for name in kept):
        wrong.append(f"modules_to_not_convert is {kept!r}, supported: a list of names of modules")
    wrong += [f"{key} is {raw[key]!r}, supported: False" for key in _OTHERS if raw.get(key)]
    wrong += [f"{key} is not known" for key in sorted(raw.keys() - _UNDERSTOOD - {*_OTHERS})]
    if wrong:
        reader.problem(KEY, f"of quantised weights only FP8 in blocks can be read: {'; '.join(wrong)}")
        return None
    return BlockFp8((sizes[0], sizes[1]), tuple(kept), scale_format == "ue8m0")


def quantization_config(stored: BlockFp8) -> dict[str, Any]:
    """The value of config.json's `quantization_config` for this layout."""
    value: dict[str, Any] = _ONLY | {"weight_block_size": list(stored.block)}
    if stored.power_of_two:
        value["scale_fmt"] = "ue8m0"
    if stored.kept:
        value["modules_to_not_convert"] = list(stored.kept)
    return value


def served_layout(config: Config) -> BlockFp8 | None:
    """The layout in which the run's servers get their weights, or None if these are plain."""
    if not loads_quantized(config.server):
        return None
    return BlockFp8(WEIGHT_BLOCK, power_of_two=publishes_powers_of_two(config.fp8, config.cluster))


def publishes_powers_of_two(fp8: Fp8, cluster: Cluster) -> bool:
    """Whether the scales of published blocks are powers of two. `fp8.block_scales` decides, for any precision of the
    trainer. With `auto` the GPUs of `cluster.gpu` decide, because every process of the run, with and without a GPU,
    must come to the same answer.
    """
    return has_powers_of_two(fp8.block_scales, BLACKWELL if cluster.gpu in _BLACKWELL_NAMES else None)


def is_quantizable(entry: TensorEntry) -> bool:
    """Whether blocks may hold it: the weight of a linear layer, except those of betas and alphas of gated delta nets,
    whose few rows published folders leave plain.
    """
    return is_linear(entry) and entry.role not in delta_net.UNROUNDED


def is_rounded(quantization: str, entry: TensorEntry) -> bool:
    """Whether servers with this `server.quantization` round the tensor. What they quantise while they load it are all
    linear layers.
    """
    return quantization != "none" and (is_quantizable if quantization == "fp8_block" else is_linear)(entry)


def is_linear(entry: TensorEntry) -> bool:
    """Whether this is the weight of a linear layer. Norms, biases, embeddings, the LM head, the router and the gate of
    shared experts are never quantised, nor are experts that files stack.
    """
    if entry.stack is not None or not entry.parameter.endswith(".weight"):
        return False
    return entry.stage == "layer" and len(entry.shape) == 2 and not entry.parameter.endswith(_GATES)


def is_quantized(stored: BlockFp8 | None, entry: TensorEntry) -> bool:
    """Whether a folder of this layout holds the tensor as FP8 with scales."""
    if stored is None or not is_quantizable(entry):
        return False
    module = entry.name.rpartition(".")[0]
    return not any(module == name or module.startswith(f"{name}.") for name in stored.kept)


def scale_name(name: str) -> str:
    """The name of the scales of a quantised weight."""
    return f"{name}{SCALE_SUFFIX}"


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """The shape of the scales of a quantised weight of [n, m]."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def stored_bytes(stored: BlockFp8 | None, entries: list[TensorEntry], plain_bytes: int) -> int:
    """The bytes of these tensors in a folder of this layout. A plain element has `plain_bytes`, that of a buffer 4."""
    total = 0
    for entry in entries:
        if stored is not None and is_quantized(stored, entry):
            rows, columns = scale_shape(entry.shape, stored.block)
            total += entry.num_elements + 4 * rows * columns
        else:
            total += entry.num_elements * (4 if entry.is_buffer else plain_bytes)
    return total
