"""What FP8 products demand of sizes: multiples for a linear layer's sides on a rank, and for the length of a pack.

Owns only the numbers; the packer adds the filler that brings a pack to such a length.
"""

from __future__ import annotations

from gspo_mega.config.schema import Config

# What a product of Transformer Engine needs of either side of a layer, and of a rank's rows of a pack. Its forward pass
# checks 16 for a row's length and 8 for the number of rows; the backward pass turns either side, and the rows, into a
# row's length. One scale of mxfp8 serves 32 values in both directions. Blockwise takes a ragged last block.
RECIPE_SIDES = {"delayed": 16, "tensorwise": 16, "mxfp8": 32, "blockwise": 16}
# Rows of one block in the backward pass. With sequence parallelism Transformer Engine gathers a layer's input in FP8
# where a rank has whole blocks. Elsewhere it gathers bf16, twice the bytes, and quantises for the backward pass what it
# has rounded once already.
_BLOCK_ROWS = 128


def alignment_tokens(config: Config) -> int:
    """Tokens that the length of every pack must be a multiple of; 1 without FP8.

    A rank's rows x context size x (tensor size, with sequence parallelism): a pack is cut over those ranks before its
    rows meet an FP8 product. It is always a multiple of what single sequences are padded to, so filler of whole
    sequence multiples reaches it.
    """
    if config.precision != "fp8":
        return 1
    parallel = config.parallel
    tensor = parallel.tensor if parallel.sequence else 1
    rows = _BLOCK_ROWS if config.fp8.recipe == "blockwise" and tensor > 1 else RECIPE_SIDES[config.fp8.recipe]
    return rows * parallel.context * tensor
