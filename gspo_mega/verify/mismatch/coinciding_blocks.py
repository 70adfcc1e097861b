"""Where the trainer's FP8 blocks are the servers', to the bit, and where they cannot be: a named cause of mismatch.

Owns the comparison of two ways to cut the same weight into blocks of 128 x 128: Transformer Engine's, from the first
row and column of each rank's share of a fused parameter, and the published one, from those of each Hugging Face tensor.
No torch. The quantiser itself is the same on both sides (`gspo_mega.algorithm`), so equal blocks mean equal bits.
"""

from __future__ import annotations

from gspo_mega.config.schema import Config
from gspo_mega.models.block_fp8 import SERVED_BLOCK, is_quantizable, publishes_powers_of_two
from gspo_mega.models.families import Block, TensorEntry, hf_tensors, parameter_blocks, parameter_shape
from gspo_mega.models.spec import ModelSpec


def differing_blocks(config: Config, spec: ModelSpec) -> dict[str, str]:
    """From each quantised tensor whose rounded values in the servers are not the trainer's to the reason; empty where
    all are. They are then the same bits as well, but with `fp8.parameters`: there FP8 values are rounded once more, by
    which a block may come out with half the scale and twice the elements.

    For a trainer that computes in FP8 blocks, and servers of `fp8_block`; for any other pair every tensor has a reason.
    """
    whole = _pair_difference(config)
    entries = [entry for entry in hf_tensors(spec) if is_quantizable(entry)]
    if whole is not None:
        return {entry.name: whole for entry in entries}
    sizes = config.parallel
    seen: dict[tuple, str | None] = {}
    found = {}
    for entry in entries:
        size = sizes.tensor if entry.expert is None else (sizes.expert_tensor or sizes.tensor)
        key = (entry.role, entry.sharding, entry.shape, size)
        if key not in seen:
            seen[key] = block_difference(spec, entry, size)
        if (why := seen[key]) is not None:
            found[entry.name] = why
    return found


def _pair_difference(config: Config) -> str | None:
    if config.server.quantization != "fp8_block":
        return f"server.quantization {config.server.quantization}: servers do not hold FP8 blocks"
    if config.precision != "fp8":
        return f"precision {config.precision}: the trainer multiplies weights that are not rounded to FP8"
    if config.fp8.recipe != "blockwise":
        return f"fp8.recipe {config.fp8.recipe}: the trainer rounds with other scales than one per 128 x 128 block"
    if config.fp8.parameters and not publishes_powers_of_two(config):
        return (
            "fp8.parameters: what is published is rounded a second time from the trainer's FP8 values, whose float32"
            " scales do not come back to the bit (fp8.block_scales power_of_two gives the same values)"
        )
    return None


def block_difference(spec: ModelSpec, entry: TensorEntry, tensor_parallel: int) -> str | None:
    """Why the tensor's blocks are cut otherwise in the trainer than in a published folder; None where they are equal.

    `tensor_parallel`: the size of the group over which the tensor is cut (an expert's: the expert-tensor group).
    """
    local = parameter_shape(spec, entry, tensor_parallel)
    for rank in range(tensor_parallel if entry.sharding != "replicated" else 1):
        for block in parameter_blocks(spec, entry, tensor_parallel, rank):
            if not _is_on_the_grid(block, entry.shape[block.dim], local[block.dim]):
                return _reason(spec, entry, block, tensor_parallel)
    return None


def _is_on_the_grid(block: Block, whole: int, local: int) -> bool:
    """Do both cuts have the same edges here? The last block of a side may be smaller, if it is the last of both."""
    side = SERVED_BLOCK[block.dim]
    if block.start % side or block.local_start % side:
        return False
    ends_both = block.start + block.length == whole and block.local_start + block.length == local
    return block.length % side == 0 or ends_both


def _reason(spec: ModelSpec, entry: TensorEntry, block: Block, size: int) -> str:
    side = SERVED_BLOCK[block.dim]
    if entry.role in ("q", "k", "v") and (spec.head_dim % side or size <= spec.num_kv_heads):
        heads = spec.num_heads // spec.num_kv_heads
        return (
            f"Megatron interleaves q, k and v by key-value group ({heads} + 1 + 1 heads of {spec.head_dim}): a block of"
            f" {side} rows there has rows of more than one of them, or of other heads (head_dim {spec.head_dim} is no"
            f" multiple of {side})"
        )
    what = "columns" if block.dim == 1 else "rows"
    beside = " and gate lies above up in one parameter" if entry.role in ("gate", "up") else ""
    return (
        f"a tensor-parallel rank's share of {block.length} {what} (of {entry.shape[block.dim]} over {size}) is no"
        f" multiple of {side}{beside}"
    )
