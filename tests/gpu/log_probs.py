"""Log-probs of each precision against fp32, per token and per sequence; and an unchanged policy's ratio against the
clip.

    python tests/gpu/log_probs.py [--device cpu --shapes tiny-dense,tiny-moe]

The same weights and the same packs in all precisions. Bounds, in nats: mean |difference| of a token; and of |log s| of
a policy that has not changed since its old pass, a tenth of GSPO's clip range. FP8 must also differ from bf16
somewhere: equal numbers would mean that it was not computed in FP8.
"""

from __future__ import annotations

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

# A mixture's router may send a token elsewhere in another precision, which moves that token much more.
MOST_DIFFERENT = {("bf16", False): 0.05, ("bf16", True): 0.1, ("fp8", False): 0.25, ("fp8", True): 0.4}


def measure(
    shape: str, precision: str, lengths: list[int], per_pack: int
) -> tuple[list[torch.Tensor], dict[str, float]]:
    """(log-probs [R] float64 of each sequence, largest |log s| of the unchanged policy: between two old passes, and
    between old pass and training pass).
    """
    config, spec = (
        precision_config(precision, batch=dict(prompts_per_step=4, group_size=4, micro_batch_tokens=8192)),
        SHAPES[shape],
    )
    with engine(spec, config, same_weights=True) as policy:
        batch = recorded_batch(spec, config, lengths, per_pack, prompt=4)
        again = _tokens(policy.old_pass(batch))
        old = policy.old_pass(batch)
        report = policy.policy_gradients(
            batch, ObjectiveSettings(clip_low=CLIP_LOW, clip_high=CLIP_HIGH), float(len(lengths)), old
        )
        tokens = _tokens(old)
    sizes = [length - 4 for length in lengths]
    repeated = max(float((a - b).mean().abs()) for a, b in zip(tokens.split(sizes), again.split(sizes), strict=True))
    unchanged = dict(repeated_log_s=repeated, unchanged_log_s=float(abs(report.columns["log_s"]).max()))
    return list(tokens.split(sizes)), unchanged


def _tokens(old) -> torch.Tensor:
    """[R] float64, all active tokens of an old pass, nats."""
    return torch.cat([part.log_probs.double().cpu() for part in old.micro_batches])


def main() -> None:
    args = arguments(__doc__, shapes="small-dense,small-moe", longest=2048, only="")
    lengths = [max(8, args.longest * k // 8) for k in (8, 1, 5, 3, 7, 2, 6, 4)]
    rows, failures = Rows(), []
    with one_rank():
        for shape in args.shapes.split(","):
            found: dict[str, list[torch.Tensor]] = {}
            for precision in precisions(args.only):
                found[precision], unchanged = measure(shape, precision, lengths, per_pack=3)
                row = dict(shape=shape, precision=precision) | differences(found[precision], found["fp32"]) | unchanged
                rows.append(row)
                failures += judge(row, SHAPES[shape].moe is not None)
                if precision.startswith("fp8") and all(map(torch.equal, found[precision], found["bf16"])):
                    failures.append(f"{shape} {precision}: the very log-probs of bf16")
    finish("log_probs", rows, failures)


def differences(ours: list[torch.Tensor], reference: list[torch.Tensor]) -> dict[str, float]:
    token = torch.cat([(a - b).abs() for a, b in zip(ours, reference)])
    sequence = torch.stack([(a - b).mean().abs() for a, b in zip(ours, reference)])
    return dict(
        token_mean=float(token.mean()),
        token_max=float(token.max()),
        sequence_mean=float(sequence.mean()),
        sequence_max=float(sequence.max()),
    )


def judge(row: dict, moe: bool) -> list[str]:
    name, failures = f"{row['shape']} {row['precision']}", []
    if row["precision"] != "fp32":
        bound = MOST_DIFFERENT[row["precision"].split("-")[0], moe]
        if not row["token_mean"] <= bound:
            failures.append(
                f"{name}: a token's log-prob is {row['token_mean']:.3g} nats from fp32 on average; at most {bound}"
            )
    if not row["unchanged_log_s"] <= (CLIP_LOW + CLIP_HIGH) / 10:
        failures.append(
            f"{name}: |log s| of an unchanged policy is {row['unchanged_log_s']:.3g}; at most"
            f" {(CLIP_LOW + CLIP_HIGH) / 10:.1g}"
        )
    return failures


if __name__ == "__main__":
    main()
