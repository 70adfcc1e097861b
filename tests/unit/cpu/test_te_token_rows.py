"""Tokens moved to their experts' rows by masks: the plain functions against Transformer Engine's own Triton kernels,
which Triton's interpreter runs on a CPU, and Megatron's fused path against its unfused one.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from te_process import in_te_process

TOKENS, EXPERTS, WIDTH = 11, 5, 16


def test_the_plain_functions_are_transformer_engines_own_kernels():
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("te_triton_interpreted.py")],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip() == "the kernels agree", done.stderr[-3000:]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@in_te_process
def test_megatrons_fused_permutation_is_its_plain_one(dtype):
    from megatron.core.transformer.moe.moe_utils import permute, unpermute

    generator = torch.Generator().manual_seed(1)
    kind = getattr(torch, dtype)
    chosen = torch.rand(TOKENS, EXPERTS, generator=generator).topk(2, dim=1).indices
    mask = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter_(1, chosen, True)
    weights = torch.rand(TOKENS, EXPERTS, generator=generator) * mask
    outer = torch.randn(TOKENS, WIDTH, generator=generator).to(kind)
    values = torch.randn(TOKENS, WIDTH, generator=generator).to(kind)
    results = []
    for fused in (False, True):
        x, probs = values.clone().requires_grad_(), weights.clone().requires_grad_()
        rows, row_weights, order = permute(x, mask, probs=probs, num_out_tokens=2 * TOKENS, fused=fused)
        back = unpermute(
            (rows * row_weights[:, None]).to(kind), order, restore_shape=x.shape, routing_map=mask, fused=fused
        )
        back.backward(outer)
        results.append((rows, row_weights, back, x.grad, probs.grad))
    for plain, fused in zip(*results, strict=True):
        assert plain.dtype == fused.dtype and plain.shape == fused.shape
        # Two rows are added per token, in bf16 or in fp32 rounded once.
        bound = (1e-6 if dtype == "float32" else 2**-7) * plain.detach().abs().max()
        assert (plain.detach().double() - fused.detach().double()).abs().max() <= bound
    assert torch.equal(results[0][0], results[1][0]), "the order of rows"
