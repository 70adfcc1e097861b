"""A recorded run trained with whole rows and with shared prefixes, compared step by step.

    python tests/soak/shared_steps.py RUN FOLDER [--steps N] [--modes off prompts full] [key=value ...]

RUN is a run with a journal; N of its steps are trained again in FOLDER, once for each mode, with one mini-batch a step, so
that all train on the same rows. For each step it prints what differs from whole rows: the largest difference of a token's
log-prob beyond the step of the float16 in which gaps are recorded, the objective's, and the gradient norm's as a share
of it. The first step begins with equal weights and must agree within the tolerances of certificates. Later ones begin
with what AdamW made of rounding; they must agree within `LATER` of these. It also prints processor-independent times: seconds of the old pass and of training, all steps.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from pathlib import Path

import numpy as np

from gspo_mega.base.run_folder import RunFolder
from gspo_mega.data.journal.journal import Journal
from gspo_mega.data.journal.steps import TokenGaps
from gspo_mega.metrics.writer import read_metrics

# Of log-probs in nats, of the objective, and of the gradient norm as a share.
FIRST = (1e-5, 1e-5, 1e-5)
LATER = 1e2
SECONDS = ("time/old_log_probs_seconds", "time/train_seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--modes", nargs="+", default=["off", "prompts", "full"])
    arguments, overrides = parser.parse_known_args()
    source, folder = arguments.run.absolute(), arguments.folder.absolute()
    for mode in arguments.modes:
        train(source, folder, mode, arguments.steps, overrides)
    whole = steps_of(RunFolder(folder / arguments.modes[0]))
    assert len(whole) == arguments.steps, f"{len(whole)} steps"
    is_equal = True
    for mode in arguments.modes[1:]:
        shared = steps_of(RunFolder(folder / mode))
        worst = np.zeros(3)
        for step, (one, other) in enumerate(zip(whole, shared, strict=True), 1):
            found = differences(one, other)
            bounds = np.array(FIRST) * (1 if step == 1 else LATER)
            is_equal &= bool((found <= bounds).all())
            worst = np.maximum(worst, found)
            print(f"{mode} step {step}: " + shown(found), flush=True)
        line = shared[-1][0]
        print(
            f"{mode}, {arguments.steps} steps: {shown(worst)}; shared {line['speed/shared_prefix_fraction']:.3f} of the"
            f" positions; old pass and training {seconds(shared):.2f} s, whole rows {seconds(whole):.2f} s"
        )
    print("equal" if is_equal else "NOT EQUAL")
    sys.exit(not is_equal)


def train(source: Path, folder: Path, mode: str, num_steps: int, overrides: list[str]) -> None:
    if RunFolder(folder / mode).metrics_file.exists():
        return
    given = {
        "run.dir": folder,
        "run.name": mode,
        "train.from_rollouts": source,
        "train.num_steps": num_steps,
        "batch.num_mini_batches": 1,
        "batch.share_prefixes": mode,
        "diagnostics.token_mismatch": "true",
        "journal.keep_last": num_steps,
        "checkpoint.every_steps": num_steps,
        "eval": "null",
    }
    command = [sys.executable, "-m", "gspo_mega", "train", str(source / "config.resolved.yaml")]
    command += [f"{key}={value}" for key, value in given.items()] + overrides
    with (folder.parent / f"{folder.name}-{mode}.log").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)


def steps_of(run: RunFolder) -> list[tuple[dict[str, float], np.ndarray]]:
    """(metrics, the gap of every trained token to its server's log-prob) of each step."""
    journal, found = Journal(run.journal_dir), []
    for line in read_metrics(run.metrics_file):
        if line["step"] > 0:
            gaps = TokenGaps(journal.folder, line["step"] - 1)
            batch = journal.read(line["step"] - 1).batch.scored()
            values = [v for episode in batch.episodes for v in gaps.of(episode).values()]
            found.append((line, np.concatenate(values).astype(np.float64)))
    return found


def differences(one: tuple[dict[str, float], np.ndarray], other: tuple[dict[str, float], np.ndarray]) -> np.ndarray:
    (whole, gaps), (shared, own_gaps) = one, other
    assert np.isfinite(gaps).all() and gaps.size > 0, "diagnostics.token_mismatch records them"
    # The record has them as float16: what is nearer than its step there is the same number to it.
    step = np.spacing(np.maximum(np.abs(gaps), np.abs(own_gaps)).astype(np.float16)).astype(np.float64)
    log_prob = float(np.maximum(np.abs(gaps - own_gaps) - step, 0.0).max())
    objective = abs(whole["policy/objective"] - shared["policy/objective"])
    norm = abs(1 - shared["optimizer/grad_norm"] / whole["optimizer/grad_norm"])
    assert math.isfinite(norm)
    return np.array([log_prob, objective, norm])


def shown(found: np.ndarray) -> str:
    return "log-prob {:.1e} nats, objective {:.1e}, gradient norm {:.1e} of it".format(*found)


def seconds(steps: list[tuple[dict[str, float], np.ndarray]]) -> float:
    return sum(line.get(name, 0.0) for line, _ in steps for name in SECONDS)


if __name__ == "__main__":
    main()
