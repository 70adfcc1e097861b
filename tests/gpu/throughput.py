"""Seconds, TFLOP/s, MFU and memory of the old pass and of a GSPO training step, dense and MoE, in bf16 and FP8.

    python tests/gpu/throughput.py [--device cpu --shapes tiny-dense --tokens 64]

A model and packs that fill most of the GPU: the `medium` shape where the `large` one does not fit. FLOPs are those of the
only matrix products and attention, forward once and backward twice; the LM head's logits computed again in the
backward pass do not count. MFU is of an H200's bf16 peak without sparsity, which an H100 has too, and for FP8 as well,
so that rows compare. `held_gib` is what stays allocated after a step: weights, gradients, moments and FP8 copies.

With --profile, where a step's time goes by kernel: `profile_<shape>_<precision>.txt` in $OUT.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from gpu_engine import (
    CLIP_HIGH,
    CLIP_LOW,
    SHAPES,
    Rows,
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
BYTES_PER_PARAMETER = 18
# For activations, the head's chunks, workspaces and the CUDA context.
WORKING_BYTES = 14 * 2**30


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


def fitting(shape: str) -> str:
    """`shape`, or the `medium` one of its kind where this GPU's memory is too small for it."""
    if not torch.cuda.is_available():
        return shape
    needed = BYTES_PER_PARAMETER * count_parameters(SHAPES[shape]).total + WORKING_BYTES
    if needed <= torch.cuda.get_device_properties(0).total_memory:
        return shape
    smaller = shape.replace("large", "medium")
    print(f"{shape} needs {needed / 2**30:.0f} GiB, more than this GPU has: {smaller} instead")
    return smaller


def profile(step, file: Path) -> None:
    """Write the kernels of one `step` with their time on the GPU to `file`, the longest first."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        step()
        _wait()
    averages = found.key_averages()
    file.write_text(
        averages.table(sort_by="self_device_time_total", row_limit=40, max_name_column_width=90)
        + averages.table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60)
    )


def measure(shape: str, precision: str, tokens: int, packs: int, times: int, profiled: bool = False) -> dict:
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

        def step() -> None:
            policy.train_mini_batch(batch, settings, float(len(lengths)), old)

        step_seconds = seconds(step, times)
        held = torch.cuda.memory_allocated() if on_gpu else 0
        if profiled and os.environ.get("OUT"):
            profile(step, Path(os.environ["OUT"], f"profile_{shape}_{precision}.txt"))
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
        held_gib=held / 2**30 if on_gpu else None,
        peak_gib=torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
    )


def main() -> None:
    args = arguments(__doc__, shapes="large-dense,large-moe", tokens=8192, packs=4, times=4, profile=0, only="")
    rows, failures = Rows(), []
    with one_rank():
        for shape in map(fitting, args.shapes.split(",")):
            for precision in precisions(args.only):
                if precision == "fp32":
                    continue
                try:
                    rows.append(measure(shape, precision, args.tokens, args.packs, args.times, bool(args.profile)))
                except torch.OutOfMemoryError as error:
                    failures.append(f"{shape} {precision}: {error}")
    finish("throughput", rows, failures)


if __name__ == "__main__":
    main()
