"""What the optimizer's memory settings need from a machine; checked before anything is built."""

from __future__ import annotations

from gspo_mega.config.schema import Optimizer

VALID_WITHOUT_GPU = {"optimizer.moments_dtype": "fp32", "optimizer.cpu_offload_fraction": "0"}


def check_optimizer(settings: Optimizer, has_gpu: bool, has_fused_adam: bool) -> list[tuple[str, str]]:
    """(key, what is missing and what to do) of every setting that this machine does not support.

    `has_fused_adam`: Transformer Engine's Adam is there, with moments of any dtype (2.1 and later).
    """
    problems = []
    if settings.moments_dtype != "fp32":
        value = f"{settings.moments_dtype}: moments below fp32 are kept by Transformer Engine's fused Adam"
        if not has_gpu and not has_fused_adam:
            advice = "without a GPU it comes with `precision: fp8`, or bf16 and `engine.transformer_engine: true`"
            problems.append(("optimizer.moments_dtype", f"{value}; {advice}"))
        elif not has_fused_adam:
            advice = "install transformer-engine[pytorch] 2.1 or later, or use fp32"
            problems.append(("optimizer.moments_dtype", f"{value}, which cannot be imported; {advice}"))
    if settings.cpu_offload_fraction > 0 and not has_gpu:
        problems.append(
            (
                "optimizer.cpu_offload_fraction",
                f"{settings.cpu_offload_fraction:g}: there is no GPU to move optimizer state away from",
            )
        )
    return problems
