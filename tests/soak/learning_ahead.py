"""Does sampling ahead learn as well? The quickstart with several bounds of staleness, three seeds each.

    python tests/soak/learning_ahead.py [--seeds 1 2 3] [--arm NAME ...] [--hours 2] [--folder DIR]
    python tests/soak/learning_ahead.py --table              what the rows say

Every finished run appends a row to docs/studies/ahead_runs.csv at once; a run that has a row is not made again. All runs
begin with one cold start, that of configs/quickstart_sft.yaml with seed 1; a seed changes the order of prompts and every
random number of a run. SGLang's sampling is not reproducible.

Arms (overrides of configs/quickstart.yaml, 80 steps):
    k0             each batch is sampled from the newest weights while the trainer waits
    k1-wait        at most one version old; a publish waits for the responses that are open
    k1             at most one version old; partial rollouts: a publish ends open responses, which go on with new weights
    k4             at most four versions old, partial rollouts, five batches at a time on the server, without which a
                   trainer that is faster than its server would never meet samples so old

    k4-completion  the same with `rollout.order: completion`

Accuracy: 512 held-out problems, twice each, at temperature 1, after the last step. An arm's mean over the seeds is
compared with that of k0: standard error = sqrt(2/3) x the spread between seeds, pooled over all arms. "Within two
standard errors" is that. A difference is reported as found.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import fmean, variance

from tolerance import REPOSITORY, call, commit, product

from gspo_mega.base.run_folder import RunFolder

ROWS = REPOSITORY / "docs" / "studies" / "ahead_runs.csv"
AHEAD = {"k0": 0, "k1-wait": 1, "k1": 1, "k4": 4, "k4-completion": 4}
ARMS = {
    "k0": [],
    "k1-wait": ["rollout.max_staleness=1", "rollout.on_publish=wait"],
    "k1": ["rollout.max_staleness=1", "rollout.on_publish=continue"],
    "k4": [
        "rollout.max_staleness=4",
        "rollout.on_publish=continue",
        "rollout.max_concurrent_requests=1280",
        "server.max_total_tokens=98304",
    ],
}
ARMS["k4-completion"] = [*ARMS["k4"], "rollout.order=completion"]
MEANS = {
    "staleness_mean": "rollout/staleness_mean",
    "multi_version": "rollout/multi_version_fraction",
    "clip": "policy/clip_fraction",
    "kept": "policy/kept_fraction",
    "length": "response/length_mean",
    "wait_seconds": "rollout/trainer_wait_seconds",
    "step_seconds": "time/step_seconds",
}
COLUMNS = (
    *("arm", "seed", "steps", "after", "after_se", "staleness_max", *MEANS),
    *("minutes", "date", "commit"),
)


def places(folder: Path) -> list[str]:
    data = folder / "data"
    return [
        f"data.path={json.dumps(str(data / 'train.jsonl'))}",
        f"eval.path={json.dumps(str(data / 'heldout.jsonl'))}",
    ]


def cold_start(folder: Path) -> Path:
    """The Hugging Face folder that every run begins with, made where missing."""
    result = folder / "sft" / "hf"
    if not result.is_dir():
        make = [sys.executable, str(REPOSITORY / "tools" / "make_quickstart.py"), str(folder), "--seed", "1"]
        call(make, folder / "make.log")
        where = [
            f"run.dir={json.dumps(str(folder))}",
            f"model.path={json.dumps(str(folder / 'model'))}",
            *places(folder),
        ]
        call([*product("sft"), str(REPOSITORY / "configs/quickstart_sft.yaml"), *where], folder / "sft.log")
    return result


def train(folder: Path, arm: str, seed: int) -> dict[str, object]:
    """One run from its start; its row."""
    model, run = cold_start(folder), RunFolder(folder / "arms" / f"{arm}-seed{seed}")
    shutil.rmtree(run.path, ignore_errors=True)
    began = time.monotonic()
    where = [f"run.dir={json.dumps(str(run.path.parent))}", f"run.name={run.path.name}", f"run.seed={seed}"]
    where += [f"model.path={json.dumps(str(model))}", *places(folder)]
    same = ["eval.every_steps=80", "eval.samples_per_prompt=2", "metrics.sinks=[jsonl]"]
    config = str(REPOSITORY / "configs/quickstart.yaml")
    call([*product("train"), config, *where, *same, *ARMS[arm]], folder / f"{run.path.name}.log")
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line.get("reward/mean") is not None]
    measured = [line for line in lines if "eval/accuracy" in line][-1]
    oldest = max(line["rollout/staleness_max"] for line in steps)
    if not AHEAD[arm] / 2 < oldest + 0.5 <= AHEAD[arm] + 0.5:
        raise SystemExit(
            f"{arm} seed {seed}: the oldest token was {oldest:.0f} versions old: not what the arm is called"
        )
    return {
        "arm": arm,
        "seed": seed,
        "steps": len(steps),
        "after": measured["eval/accuracy"],
        "after_se": measured["eval/accuracy_standard_error"],
        "staleness_max": oldest,
        **{column: fmean(line[name] for line in steps) for column, name in MEANS.items()},
        "minutes": (time.monotonic() - began) / 60,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit(),
    }


def read_rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def append_row(path: Path, row: dict[str, object]) -> None:
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if file.tell() == 0:
            writer.writeheader()
        writer.writerow({name: f"{value:.6g}" if isinstance(value, float) else value for name, value in row.items()})


def table(rows: list[dict[str, str]]) -> str:
    """Markdown: every arm's accuracies, and how far its mean is from that of k0."""
    after: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        after[row["arm"]].append(float(row["after"]))
    spread = [(len(values) - 1, variance(values)) for values in after.values() if len(values) > 1]
    degrees = sum(count for count, _ in spread)
    deviation = (sum(count * value for count, value in spread) / degrees) ** 0.5 if degrees else float("nan")
    lines = ["| arm | seeds | accuracy after, per seed | mean | difference from k0 |", "|---|---|---|---|---|"]
    for arm in (arm for arm in ARMS if arm in after):
        values = after[arm]
        each = " ".join(f"{value:.3f}" for value in values)
        error = deviation * (1 / len(values) + 1 / len(after.get("k0", values))) ** 0.5
        apart = "" if arm == "k0" or "k0" not in after else f"{fmean(values) - fmean(after['k0']):+.3f} ± {error:.3f}"
        lines.append(f"| {arm} | {len(values)} | {each} | {fmean(values):.3f} | {apart} |")
    return "\n".join([*lines, "", f"spread between seeds, pooled: {deviation:.4f} with {degrees} degrees of freedom"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "runs" / "learning_ahead", help="of the runs")
    parser.add_argument("--rows", type=Path, default=ROWS, help="CSV file of the rows")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--arm", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--hours", type=float, default=float("inf"), help="start no run after this time")
    parser.add_argument("--table", action="store_true", help="show what the rows say, and start nothing")
    options = parser.parse_args()
    if not options.table:
        began = time.monotonic()
        for arm, seed in ((arm, seed) for seed in options.seeds for arm in options.arm):
            done = {(row["arm"], int(row["seed"])) for row in read_rows(options.rows)}
            if (arm, seed) not in done and time.monotonic() - began < options.hours * 3600:
                row = train(options.folder.absolute(), arm, seed)
                append_row(options.rows, row)
                print({name: round(v, 4) if isinstance(v, float) else v for name, v in row.items()}, flush=True)
    print(table(read_rows(options.rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
