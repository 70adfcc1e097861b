"""The number of tokens that a pack's length must be a multiple of, so that FP8 products fit the recipe's blocks.

Owns only the numbers; the packer adds the filler that brings a pack to such a length.
"""

from __future__ import annotations

from gspo_mega.config.schema import Config

# Rows of one rank's slice of a pack. delayed and tensorwise: FP8 products want the row count, which is the inner
# dimension of the weight's gradient, in sixteens. mxfp8: one scale serves 32 values, along rows too in the backward
# pass. blockwise: one scale serves 128 rows there.
RECIPE_ROWS = {"delayed": 16, "tensorwise": 16, "mxfp8": 32, "blockwise": 128}


def alignment_tokens(config: Config) -> int:
    """Tokens that the length of every pack must be a multiple of; 1 without FP8.

    The recipe's rows x context size x (tensor size, with sequence parallelism): a pack is cut over those ranks before
    its rows meet an FP8 product. It is always a multiple of what single sequences are padded to, so filler of whole
    sequence multiples reaches it.
    """
    if config.precision != "fp8":
        return 1
    parallel = config.parallel
    return RECIPE_ROWS[config.fp8.recipe] * parallel.context * (parallel.tensor if parallel.sequence else 1)
