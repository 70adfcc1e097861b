"""The input projection of gated delta nets in FP8: its rows of betas and alphas are not rounded, the others are."""

import pytest
import torch
from te_process import in_te_process

HEADS, ROWS, HIDDEN, TOKENS = 16, 96, 64, 32


def _layer(recipe: str, **settings):
    """A layer of one rank and its settings."""
    import torch.distributed as dist
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear
    from megatron.core.transformer.transformer_config import TransformerConfig

    from gspo_mega.engine.delta_net import with_plain_gates

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        linear_num_value_heads=HEADS,
        params_dtype=torch.bfloat16,
        bf16=True,
        fp8="hybrid",
        fp8_recipe=recipe,
        **settings,
    )
    torch.manual_seed(0)
    layer = with_plain_gates(TEColumnParallelLinear)(
        HIDDEN,
        ROWS + 2 * HEADS,
        config=config,
        init_method=torch.nn.init.normal_,
        bias=False,
        gather_output=False,
        skip_bias_add=False,
        is_expert=False,
        tp_group=dist.group.WORLD,
    )
    return layer, config


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
@in_te_process
def test_betas_and_alphas_are_products_of_unrounded_numbers(recipe):
    """In both passes; all other rows are FP8's, which differ."""
    from megatron.core.fp8_utils import get_fp8_context

    layer, config = _layer(recipe)
    x = torch.randn(TOKENS, 1, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    outer = torch.randn(TOKENS, 1, ROWS + 2 * HEADS, dtype=torch.bfloat16)
    with get_fp8_context(config):
        out, bias = layer(x)
    out.backward(outer)

    def wrong(found: torch.Tensor, want: torch.Tensor) -> float:
        return float((found.double() - want).norm() / want.norm())

    weight, inner, rows = layer.weight.detach().double(), x.detach().double()[:, 0], outer.double()[:, 0]
    want, gradient = inner @ weight.T, rows.T @ inner
    assert bias is None and out.shape == outer.shape
    for found, exact, dim in ((out[:, 0], want, 1), (layer.weight.grad, gradient, 0)):
        (rounded, plain), (by_fp8, by_bf16) = (t.split([ROWS, 2 * HEADS], dim) for t in (found, exact))
        assert wrong(plain, by_bf16) < 2**-8 < 1e-2 < wrong(rounded, by_fp8) < 2**-4
    assert 1e-3 < wrong(x.grad[:, 0], rows @ weight) < 2**-4
    # A change of a beta's row moves its own output only.
    with torch.no_grad(), get_fp8_context(config):
        layer.weight[ROWS] *= 1000
        moved = (layer(x)[0] != out).any(dim=0)[0]
    assert moved[ROWS] and not moved[:ROWS].any() and not moved[ROWS + 1 :].any()


@in_te_process
def test_the_weight_is_never_stored_in_fp8_and_its_gradient_never_fused():
    import transformer_engine.pytorch as te
    from megatron.core.fp8_utils import get_fp8_context

    _, config = _layer("blockwise", fp8_param=True, gradient_accumulation_fusion=True)
    with get_fp8_context(config, is_init=True):
        layer, _ = _layer("blockwise", fp8_param=True, gradient_accumulation_fusion=True)
        stored = te.Linear(HIDDEN, HIDDEN, bias=False, params_dtype=torch.bfloat16, device="cpu")
    assert type(layer.weight) is torch.nn.Parameter and not layer.fuse_wgrad_accumulation
    assert type(stored.weight) is not torch.nn.Parameter, "another layer in the same place is"
