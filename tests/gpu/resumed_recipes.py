"""A checkpoint in each precision: two optimizer steps, a save, a new engine with other weights, a load, two more steps;
against the engine that went on.

    python tests/gpu/resumed_recipes.py [--device cpu --shapes tiny-moe --longest 32]

Bound: right after the load the same loss, and after two more steps no further from it than a share of the first loss.
`equal` says whether the losses are the same to the bit, which a GPU's kernels need not be. FP8's scales, histories and
parameters are what a resume loses first.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from gpu_engine import SHAPES, Rows, arguments, engine, finish, one_rank, precision_config, precisions, recorded_batch

from gspo_mega.base.records import MicroBatch
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.checkpoint.load import TrainState, find_checkpoint, load_checkpoint
from gspo_mega.checkpoint.save import Saver
from gspo_mega.config.schema import Checkpoint
from gspo_mega.engine.policy import PolicyEngine

FURTHEST = {"fp32": 1e-5, "bf16": 1e-3, "fp8": 5e-3}
STEPS = 2


def steps(policy: PolicyEngine, batch: list[MicroBatch]) -> list[float]:
    """Mean negative log-prob per token, nats, before each of STEPS optimizer steps."""
    tokens = float(sum(micro.loss_mask.sum() for micro in batch))
    found = []
    for _ in range(STEPS):
        result, report = policy.train_supervised(batch, tokens)
        if result.skipped:
            raise SystemExit(f"gradient norm {result.grad_norm}")
        found.append(-float(report.totals["supervised_sums"][0]) / tokens)
    return found


def measure(shape: str, precision: str, longest: int, parameters: bool, folder: Path) -> dict:
    spec = SHAPES[shape]
    extra = dict(fp8=dict(recipe=precision[4:], parameters=True)) if parameters else {}
    config = precision_config(precision, optimizer=dict(lr=3e-4, weight_decay=0.1), **extra)
    run_folder = RunFolder(folder)
    with engine(spec, config, same_weights=True) as policy:
        batch = recorded_batch(spec, config, [longest, longest // 2, longest // 4, longest], per_pack=2)
        first = steps(policy, batch)[0]
        saver = Saver(run_folder, policy, Checkpoint(asynchronous=False))
        (report,) = saver.save(TrainState(step=STEPS, num_optimizer_steps=STEPS, weight_version=STEPS))
        went_on = steps(policy, batch)
    with engine(spec, config, same_weights=False) as policy:
        found, warnings = find_checkpoint(run_folder, policy.groups)
        if found is None or warnings:
            raise SystemExit(f"no intact checkpoint: {warnings}")
        state = load_checkpoint(found, policy)
        resumed = steps(policy, batch)
    size = sum(file.stat().st_size for file in found.rglob("*") if file.is_file())
    return dict(
        step=state.step,
        first=first,
        resumed=resumed[0],
        after_load=abs(resumed[0] - went_on[0]) / first,
        furthest=max(abs(a - b) for a, b in zip(resumed, went_on)) / first,
        equal=resumed == went_on,
        gigabytes=size / 1e9,
        write_seconds=report.write_seconds,
    )


def main() -> None:
    args = arguments(__doc__, shapes="small-dense,small-moe", longest=1024, only="")
    rows, failures = Rows(), []
    with one_rank(), tempfile.TemporaryDirectory() as name:
        available = [name for name in precisions() if not args.only or name in args.only.split(",")]
        with_parameters = [f"{p}+parameters" for p in available if p.startswith("fp8") and p != "fp8-mxfp8"]
        for shape in args.shapes.split(","):
            for kind in [*available, *with_parameters]:
                precision, _, parameters = kind.partition("+")
                try:
                    row = measure(shape, precision, args.longest, bool(parameters), Path(name, f"{shape}-{kind}"))
                except Exception as error:  # the next recipe may resume
                    failures.append(f"{shape} {kind}: {type(error).__name__}: {error}")
                    continue
                rows.append(dict(shape=shape, precision=kind) | row)
                bound = FURTHEST[precision.split("-")[0]]
                if not row["after_load"] <= bound or not row["furthest"] <= 2 * bound:
                    failures.append(
                        f"{shape} {kind}: {row['after_load']:.2g} of the first loss away right after the load, and"
                        f" {row['furthest']:.2g} at most afterwards; {bound:g} and {2 * bound:g} are allowed"
                    )
    finish("resume", rows, failures)


if __name__ == "__main__":
    main()
