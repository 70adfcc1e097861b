"""Seconds, TFLOP/s, MFU and memory of the old pass and of a GSPO training step, dense and MoE, in bf16 and FP8.

    python tests/gpu/throughput.py [--device cpu --shapes tiny-dense --tokens 64]

A model and packs that fill most of one H200. FLOPs are those of the matrix products and attention alone, forward once
and backward twice; the LM head's logits computed again in the backward pass do not count. MFU is of an H200's bf16 peak
without sparsity, for FP8 too, so that rows compare.
"""

from __future__ import annotations

import time

import torch
from gpu_engine import (
    CLIP_HIGH,
    CLIP_LOW,
    SHAPES,
    arguments,
    engine,
    finish,
    one_rank,
    precision_config,
    precisions,
    recorded_batch,
)

from gspo_mega.algorithm.objective import ObjectiveSettings
from gspo_mega.models.tensors import count_parameters, forward_flops_per_token

PEAK_FLOPS = 989e12
WARM_UP = 2


def seconds(call, times: int) -> float:
    """Of one call, averaged after the warm-up."""
    for index in range(WARM_UP + times):
        if index == WARM_UP:
            _wait()
            started = time.perf_counter()
        call()
    _wait()
    return (time.perf_counter() - started) / times


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(shape: str, precision: str, tokens: int, packs: int, times: int) -> dict:
    spec, config = SHAPES[shape], precision_config(precision)
    sequence = max(16, tokens // 4)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with engine(spec, config, same_weights=False) as policy:
        lengths = [sequence] * (tokens // sequence * packs)
        batch = recorded_batch(spec, config, lengths, per_pack=tokens // sequence)
        settings = ObjectiveSettings(clip_low=CLIP_LOW, clip_high=CLIP_HIGH)
        old = policy.old_pass(batch)
        old_seconds = seconds(lambda: policy.old_pass(batch), times)
        step_seconds = seconds(lambda: policy.train_mini_batch(batch, settings, float(len(lengths)), old), times)
    done = sum(lengths)
    forward = forward_flops_per_token(spec, sequence) * done
    return dict(
        shape=shape,
        precision=precision,
        parameters=f"{count_parameters(spec).total / 1e9:.3g}B",
        tokens=done,
        old_seconds=old_seconds,
        step_seconds=step_seconds,
        tokens_per_second=done / step_seconds,
        old_tflops=forward / old_seconds / 1e12,
        step_tflops=3 * forward / step_seconds / 1e12,
        mfu=3 * forward / step_seconds / PEAK_FLOPS if on_gpu else None,
        peak_gib=torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
    )


def main() -> None:
    args = arguments(__doc__, shapes="large-dense,large-moe", tokens=8192, packs=4, times=4)
    rows, failures = [], []
    with one_rank():
        for shape in args.shapes.split(","):
            for precision in precisions():
                if precision == "fp32":
                    continue
                try:
                    rows.append(measure(shape, precision, args.tokens, args.packs, args.times))
                except torch.OutOfMemoryError as error:
                    failures.append(f"{shape} {precision}: {error}")
    finish("throughput", rows, failures)


if __name__ == "__main__":
    main()
