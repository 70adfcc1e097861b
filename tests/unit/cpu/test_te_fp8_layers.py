"""Transformer Engine's FP8 layers on a CPU, forward and backward, against plain products of explicitly quantised
operands (`fp8_layers_by_numpy.py`), for each recipe.
"""

import contextlib

import numpy as np
import pytest
import torch
from fp8_by_numpy import nearest_fp8
from fp8_layers_by_numpy import Product, linear
from te_process import in_te_process

RECIPES = ["tensorwise", "blockwise", "blockwise_power_of_two", "mxfp8"]
ROWS, COLUMNS, OUTPUTS = 160, 256, 384  # a ragged block of rows, two and three whole ones


def recipe_of(name):
    from transformer_engine.common import recipe

    if name == "delayed":
        return recipe.DelayedScaling(fp8_format=recipe.Format.HYBRID, amax_history_len=4, amax_compute_algo="max")
    if name == "tensorwise":
        return recipe.Float8CurrentScaling(fp8_format=recipe.Format.HYBRID)
    if name == "mxfp8":
        return recipe.MXFP8BlockScaling(fp8_format=recipe.Format.E4M3)
    made = recipe.Float8BlockScaling(fp8_format=recipe.Format.E4M3)
    for part in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        setattr(made, part, recipe.QParams(power_2_scale=name == "blockwise_power_of_two", amax_epsilon=0.0))
    return made


@contextlib.contextmanager
def fp8(name, recipe=None):
    import transformer_engine.pytorch as te

    from gspo_mega.cpu.te_device import compute_as_gpu_of

    compute_as_gpu_of(name)
    try:
        with te.autocast(enabled=True, recipe=recipe or recipe_of(name)):
            yield
    finally:
        compute_as_gpu_of(None)


def expected(x, weight, gradient, name):
    return linear(x, weight, gradient, name.removesuffix("_power_of_two"), name.endswith("_power_of_two"))


def numbers(*shape, seed=0, spread=2.0):
    """bfloat16 over several powers of two, so that blocks have scales of their own."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp(torch.randn(shape, generator=generator) * spread)
    return x.bfloat16()


def plain(tensor):
    return tensor.detach().float().numpy()


@pytest.mark.parametrize("name", RECIPES)
@in_te_process
def test_a_linear_layer_and_its_gradients(name):
    import transformer_engine.pytorch as te

    layer = te.Linear(COLUMNS, OUTPUTS, bias=True, params_dtype=torch.bfloat16, device="cpu")
    with torch.no_grad():
        layer.weight.copy_(numbers(OUTPUTS, COLUMNS, seed=1))
        layer.bias.copy_(numbers(OUTPUTS, seed=2))
    x, gradient = numbers(ROWS, COLUMNS, seed=3).requires_grad_(), numbers(ROWS, OUTPUTS, seed=4)
    with fp8(name):
        y = layer(x)
        y.backward(gradient)
    products = expected(plain(x), plain(layer.weight), plain(gradient), name)
    products["output"].check(plain(y), "output", plain(layer.bias).astype(np.float64))
    products["dgrad"].check(plain(x.grad), "dgrad")
    products["wgrad"].check(plain(layer.weight.grad), "wgrad")
    Product.of(np.ones((1, ROWS)), plain(gradient).astype(np.float64)).check(plain(layer.bias.grad)[None], "bias")


@in_te_process
def test_the_products_are_told_from_those_of_another_recipe():
    """The check above can fail: no recipe's products pass as another's, nor as unquantised ones."""
    x, weight, gradient = (
        plain(numbers(ROWS, COLUMNS, seed=3)),
        plain(numbers(OUTPUTS, COLUMNS)),
        plain(numbers(ROWS, OUTPUTS)),
    )
    exact = {name: expected(x, weight, gradient, name) for name in RECIPES}
    for name, products in exact.items():
        for kind, product in products.items():
            others = [exact[other][kind].exact for other in RECIPES if other != name]
            for wrong in (*others, dict(output=x @ weight.T, dgrad=gradient @ weight, wgrad=gradient.T @ x)[kind]):
                with pytest.raises(AssertionError, match="beyond the bound"):
                    product.check(wrong, kind)


@in_te_process
def test_delayed_scaling_rounds_by_the_scales_of_the_pass_before():
    """The first pass has the scale 1; the second, of the same values, the scales that their own amax gives."""
    import transformer_engine.pytorch as te

    layer = te.Linear(COLUMNS, OUTPUTS, bias=False, params_dtype=torch.bfloat16, device="cpu")
    with torch.no_grad():
        layer.weight.copy_(numbers(OUTPUTS, COLUMNS, seed=1))
    gradient, recipe = numbers(ROWS, OUTPUTS, seed=4), recipe_of("delayed")

    def one_pass():
        x = numbers(ROWS, COLUMNS, seed=3).requires_grad_()
        layer.weight.grad = None
        with fp8("delayed", recipe):
            y = layer(x)
        y.backward(gradient)
        return x, y

    x, y = one_pass()
    first = [nearest_fp8(plain(v), "e4m3").astype(np.float64) for v in (x, layer.weight)]
    rounded = nearest_fp8(plain(gradient), "e5m2").astype(np.float64)
    Product.of(first[0], first[1].T).check(plain(y), "first output")
    Product.of(rounded, first[1]).check(plain(x.grad), "first dgrad")
    Product.of(rounded.T, first[0]).check(plain(layer.weight.grad), "first wgrad")
    x, y = one_pass()
    products = expected(plain(x), plain(layer.weight), plain(gradient), "tensorwise")
    products["output"].check(plain(y), "second output")
    products["dgrad"].check(plain(x.grad), "second dgrad")
    products["wgrad"].check(plain(layer.weight.grad), "second wgrad")


@pytest.mark.parametrize("name", [*RECIPES, "delayed"])
@in_te_process
def test_a_norm_and_a_linear_layer(name):
    """Inputs of one magnitude per row have an exact norm, the gains with the inputs' signs; so has what is quantised,
    whether a recipe rounds the norm to bfloat16 before (all but delayed) or not.
    """
    import transformer_engine.pytorch as te

    layer = te.LayerNormLinear(
        COLUMNS, OUTPUTS, eps=2.0**-60, bias=False, normalization="RMSNorm", params_dtype=torch.bfloat16, device="cpu"
    )
    gains = numbers(COLUMNS, seed=5)
    with torch.no_grad():
        layer.weight.copy_(numbers(OUTPUTS, COLUMNS, seed=1))
        layer.layer_norm_weight.copy_(gains)
    signs = torch.sign(numbers(ROWS, COLUMNS, seed=6))
    size = 2.0 ** (torch.arange(ROWS) % 7 - 3)
    gradient, recipe = numbers(ROWS, OUTPUTS, seed=4), recipe_of(name)
    for _ in range(2 if name == "delayed" else 1):
        x = (signs * size[:, None]).bfloat16().requires_grad_()
        layer.zero_grad()
        with fp8(name, recipe):
            y = layer(x)
        y.backward(gradient)
    normed = plain(signs * gains)
    products = expected(normed, plain(layer.weight), plain(gradient), name.replace("delayed", "tensorwise"))
    products["output"].check(plain(y), "output")
    products["wgrad"].check(plain(layer.weight.grad), "wgrad")
    # The gain's gradient is the sum over rows of dgrad times the signs, of a dgrad that was rounded to bfloat16.
    dgrad = products["dgrad"].exact
    gain = (dgrad * signs.float().numpy()).sum(0)
    bound = (np.abs(dgrad) * 2.0**-8).sum(0) + np.abs(gain) * 2.0**-8 + products["dgrad"].magnitudes.sum(0) * 2.0**-16
    assert (np.abs(plain(layer.layer_norm_weight.grad) - gain) <= bound).all()


@pytest.mark.parametrize("name", [*RECIPES, "delayed"])
@in_te_process
def test_grouped_layers_quantise_each_experts_rows_alone(name):
    import transformer_engine.pytorch as te

    splits = [96, 0, 160]
    layer = te.GroupedLinear(3, COLUMNS, OUTPUTS, bias=False, params_dtype=torch.bfloat16, device="cpu")
    weights = [getattr(layer, f"weight{i}") for i in range(3)]
    with torch.no_grad():
        for i, weight in enumerate(weights):
            weight.copy_(numbers(OUTPUTS, COLUMNS, seed=10 + i))
    gradient, recipe = numbers(sum(splits), OUTPUTS, seed=4), recipe_of(name)
    for _ in range(2 if name == "delayed" else 1):
        x = numbers(sum(splits), COLUMNS, seed=3).requires_grad_()
        layer.zero_grad()
        with fp8(name, recipe):
            y = layer(x, splits)
        y.backward(gradient)
    start = 0
    for rows, weight in zip(splits, weights, strict=True):
        mine = slice(start, start + rows)
        start += rows
        if rows == 0:
            assert weight.grad is None or not weight.grad.any()
            continue
        products = expected(plain(x[mine]), plain(weight), plain(gradient[mine]), name.replace("delayed", "tensorwise"))
        products["output"].check(plain(y[mine]), "output")
        products["dgrad"].check(plain(x.grad[mine]), "dgrad")
        products["wgrad"].check(plain(weight.grad), "wgrad")
