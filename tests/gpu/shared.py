"""Packs that compute a group's prompt once (`batch.share_prefixes`), against whole rows: FlexAttention on a GPU.

    python tests/gpu/shared.py [--device cpu --shapes tiny-dense --prompt 32 --response 16]

First the kernel in fp32, with and without a window and sinks, against the same attention on the host, in float64: values and
gradients (a CPU's FlexAttention has no backward pass). Then an engine with the same weights and rows: log-probs, the norm of the
gradient, seconds and memory. Bounds: the kernel 1e-4; a token's log-prob, in nats, and the norm as `MOST_DIFFERENT` says.
"""

from __future__ import annotations

import numpy as np
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
)
from throughput import seconds

from gspo_mega.algorithm.objective import ObjectiveSettings
from gspo_mega.base.records import MicroBatch
from gspo_mega.config.schema import Config
from gspo_mega.cpu import packed_sdpa
from gspo_mega.cpu.forest_attention import ForestNodes, forest_attend
from gspo_mega.data.forest import lay_out
from gspo_mega.data.packing import build_micro_batch
from gspo_mega.engine.flex_attention import flex_attend
from gspo_mega.models.spec import ModelSpec
from gspo_mega.plan.layout import alignment_tokens

MOST_KERNEL = 1e-4
# Of a token's log-prob in the mean, and of the norm of the gradient as a share of it.
MOST_DIFFERENT = {"fp32": (1e-5, 1e-3), "bf16": (0.05, 0.05), "fp8": (0.25, 0.2)}
GROUP, GROUPS = 8, 2


def kernel(window: int | None, has_sinks: bool, device: str) -> dict:
    """The largest difference of values, and of gradients as a share of the largest."""
    forest = lay_out([500, 430, 470, 300], [0, 300, 350, 0])
    nodes = ForestNodes(forest.node_starts.tolist(), forest.node_ends.tolist(), torch.zeros(1))
    count, made = int(forest.node_starts[-1]), torch.Generator().manual_seed(0)
    given = [torch.randn(count, heads, 64, generator=made) for heads in (8, 2, 2)]
    given += [torch.randn(8, generator=made)] if has_sinks else []
    weights = torch.randn(count, 512, generator=made)

    def passed(place: str, dtype: torch.dtype, attend) -> list[torch.Tensor]:
        own = [x.to(place, dtype).requires_grad_(place != "cpu" or attend is not ours) for x in given]
        out = attend(*own[:3], own[3] if has_sinks else None)
        wanted = [out.detach()]
        if own[0].requires_grad:
            wanted += torch.autograd.grad((out * weights.to(place, dtype)).sum(), own)
        return [x.double().cpu() for x in wanted]

    def ours(query, key, value, sinks):
        return flex_attend(query, key, value, nodes, None, sinks, window)

    def host(query, key, value, sinks):
        if window is None:
            return forest_attend(query, key, value, nodes, None, sinks)
        return packed_sdpa._attend_to_windows(query, key, value, nodes, None, sinks, window)

    expected, found = passed("cpu", torch.float64, host), passed(device, torch.float32, ours)
    errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected)]
    name = f"kernel{' window' if window else ''}{' sinks' if has_sinks else ''}"
    return dict(case=name, output_error=errors[0], gradient_error=max(errors[1:], default=None))


def packs(spec: ModelSpec, config: Config, prompt: int, response: int, shares: bool) -> list[MicroBatch]:
    """One pack for each group: random rows that begin with one prompt, advantages of both signs."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(GROUPS):
        tokens = rng.integers(3, spec.vocab_size, prompt)
        for index in range(GROUP):
            rows.append(
                dict(
                    prompt_token_ids=tokens,
                    response_token_ids=rng.integers(3, spec.vocab_size, response - index),
                    response_mask=np.ones(response - index),
                    rollout_log_probs=np.full(response - index, -np.log(spec.vocab_size)),
                    advantage=(-1.3, 0.7, -0.4, 1.6)[index % 4],
                    group_size=GROUP,
                )
            )
    keys, align = ("advantage", "group_size"), alignment_tokens(config.parallel, config.precision, config.fp8)
    return [
        build_micro_batch(
            rows,
            range(start, start + GROUP),
            1,
            keys,
            align,
            share_prefixes="prompts" if shares else "off",
        )
        for start in range(0, len(rows), GROUP)
    ]


def measure(shape: str, precision: str, prompt: int, response: int, times: int) -> dict:
    spec, config, on_gpu = SHAPES[shape], precision_config(precision), torch.cuda.is_available()
    settings, found = ObjectiveSettings(clip_low=CLIP_LOW, clip_high=CLIP_HIGH), {}
    for shares in (False, True):
        with engine(spec, config, same_weights=True) as policy:
            batch = packs(spec, config, prompt, response, shares)
            old = policy.old_pass(batch)
            took = seconds(lambda: policy.policy_gradients(batch, settings, float(GROUP * GROUPS), old), times)
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            result, _ = policy.train_mini_batch(batch, settings, float(GROUP * GROUPS), old)
            # Rows of a pack are in the order of their tree, with one prompt that of their lengths.
            tokens = {
                int(row): part
                for pack, one in zip(batch, old.micro_batches, strict=True)
                for row, part in zip(
                    pack.trajectory_index, one.log_probs.double().cpu().split(pack.sequence["length"].tolist())
                )
            }
            found[shares] = dict(
                tokens=torch.cat([part for _, part in sorted(tokens.items())]),
                norm=result.grad_norm,
                seconds=took,
                computed=sum(pack.num_computed for pack in batch),
                peak=torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
            )
    whole, shared = found[False], found[True]
    return dict(
        case=shape,
        precision=precision,
        whole_positions=whole["computed"],
        computed_positions=shared["computed"],
        token_mean=float((whole["tokens"] - shared["tokens"]).abs().mean()),
        norm=abs(shared["norm"] / whole["norm"] - 1),
        whole_seconds=whole["seconds"],
        seconds=shared["seconds"],
        whole_peak_gib=whole["peak"],
        peak_gib=shared["peak"],
    )


def main() -> None:
    args = arguments(__doc__, shapes="small-dense,small-moe", prompt=1024, response=512, times=3, only="")
    rows, failures = Rows(), []
    for window, has_sinks in ((None, False), (None, True), (100, False), (100, True)):
        rows.append(row := kernel(window, has_sinks, args.device))
        wrong = [
            key for key in ("output_error", "gradient_error") if row[key] is not None and not row[key] <= MOST_KERNEL
        ]
        failures += [f"{row['case']}: {key} is {row[key]:.3g}; at most {MOST_KERNEL:g}" for key in wrong]
    with one_rank():
        for shape in args.shapes.split(","):
            for precision in precisions(args.only):
                rows.append(row := measure(shape, precision, args.prompt, args.response, args.times))
                bounds = MOST_DIFFERENT[precision.split("-")[0]]
                failures += [
                    f"{shape} {precision}: {key} is {row[key]:.3g}; at most {bound:g}"
                    for key, bound in zip(("token_mean", "norm"), bounds)
                    if not row[key] <= bound
                ]
    finish("shared", rows, failures)


if __name__ == "__main__":
    main()
