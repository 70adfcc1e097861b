"""Transformer Engine's linear layer alone: every recipe against bf16, error and time. The first thing to run on a chip.

    python tests/gpu/products.py

"no kernel image" from here means that the library was built for other chips. Bounds: relative error of the output
and of both gradients against the product in fp32; eight mantissa bits in bf16, three (e4m3) or two (e5m2) in FP8.
"""

from __future__ import annotations

import torch
from gpu_engine import Rows, arguments, finish, one_rank, precision_config, precisions
from throughput import seconds

MOST_ERROR = {"bf16": 0.01, "fp8": 0.08}


def measure(precision: str, size: int, rows: int, times: int) -> dict:
    # Needs a GPU from its import on.
    import transformer_engine.common.recipe as recipes
    import transformer_engine.pytorch as te

    torch.manual_seed(0)
    layer = te.Linear(size, size, bias=False, params_dtype=torch.bfloat16, device="cuda")
    x = torch.randn(rows, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(rows, size, device="cuda", dtype=torch.bfloat16)
    recipe = None
    if precision.startswith("fp8"):
        hybrid, e4m3 = recipes.Format.HYBRID, recipes.Format.E4M3
        recipe = {
            "delayed": lambda: recipes.DelayedScaling(fp8_format=hybrid, amax_history_len=16, amax_compute_algo="max"),
            "tensorwise": lambda: recipes.Float8CurrentScaling(fp8_format=hybrid),
            "blockwise": lambda: recipes.Float8BlockScaling(fp8_format=e4m3),
            "mxfp8": lambda: recipes.MXFP8BlockScaling(fp8_format=e4m3),
        }[precision_config(precision).fp8.recipe]()

    def both() -> torch.Tensor:
        x.grad = layer.weight.grad = None
        with te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            out = layer(x)
        out.backward(gradient)
        return out

    took = seconds(both, times)
    out = both()
    wide_x, wide_weight, wide_gradient = x.detach().float(), layer.weight.detach().float(), gradient.float()
    expected = (wide_x @ wide_weight.t(), wide_gradient @ wide_weight, wide_gradient.t() @ wide_x)
    errors = [float((a.float() - b).norm() / b.norm()) for a, b in zip((out, x.grad, layer.weight.grad), expected)]
    names = ("output_error", "input_gradient_error", "weight_gradient_error")
    return dict(precision=precision, milliseconds=took * 1e3, tflops=3 * 2.0 * rows * size * size / took / 1e12) | dict(
        zip(names, errors)
    )


def main() -> None:
    args = arguments(__doc__, size=4096, rows=8192, times=20)
    if args.device == "cpu":
        raise SystemExit("Transformer Engine has no CPU code")
    rows, failures = Rows(), []
    with one_rank():
        for precision in precisions():
            if precision == "fp32":
                continue
            rows.append(row := measure(precision, args.size, args.rows, args.times))
            bound = MOST_ERROR[precision.split("-")[0]]
            failures += [
                f"{precision}: {key} is {value:.3g}; at most {bound}"
                for key, value in row.items()
                if key.endswith("_error") and not value <= bound
            ]
    finish("products", rows, failures)


if __name__ == "__main__":
    main()
