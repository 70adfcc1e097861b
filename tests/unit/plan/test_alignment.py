from math import lcm

import pytest

from gspo_mega.plan.layout import RECIPE_SIDES, Sizes, alignment_tokens


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_without_fp8_nothing_is_aligned(load, precision):
    config = load(f"precision={precision}", "fp8.recipe=delayed").config
    assert alignment_tokens(config.parallel, config.precision, config.fp8) == 1


@pytest.mark.parametrize(
    ("recipe", "parallel", "tokens"),
    [
        ("delayed", "{}", 16),
        ("tensorwise", "{tensor: 2}", 32),
        ("mxfp8", "{tensor: 4}", 128),
        ("blockwise", "{}", 16),
        ("blockwise", "{context: 2}", 32),
        # Whole blocks on a rank only where tensor ranks gather a pack's rows.
        ("blockwise", "{tensor: 2}", 256),
        ("blockwise", "{tensor: 2, sequence: false}", 16),
        ("blockwise", "{tensor: 2, context: 2}", 512),
    ],
)
def test_a_rank_s_slice_of_a_pack_fits_a_product(load, recipe, parallel, tokens):
    config = load("precision=fp8", f"fp8.recipe={recipe}", f"parallel={parallel}").config
    assert alignment_tokens(config.parallel, config.precision, config.fp8) == tokens


@pytest.mark.parametrize("recipe", RECIPE_SIDES)
@pytest.mark.parametrize(
    "parallel", ["{}", "{tensor: 8}", "{tensor: 3, context: 5}", "{tensor: 4, sequence: false, context: 2}"]
)
def test_filler_of_whole_sequence_multiples_reaches_it(load, recipe, parallel):
    config = load("precision=fp8", f"fp8.recipe={recipe}", f"parallel={parallel}").config
    tokens = alignment_tokens(config.parallel, config.precision, config.fp8)
    assert lcm(tokens, Sizes.of(config).sequence_multiple) == tokens
