"""Every algorithm, run as docs/objectives.md says: `python tests/soak/every_recipe.py FOLDER [ALGORITHM ...]`.

Each of its lines for two steps, on the tests' small untrained model, with two ranks and a real SGLang server. What is
looked at: the run ends in order, trained in both steps with a finite gradient, and published. Some forty seconds each
on two idle cores. A second call leaves out what is there.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "integration"), str(TESTS / "support")]

from documented_runs import documented_runs
from run_support import REPOSITORY, Command, make_quickstart, small_overrides

NUM_STEPS = 2
REWARD = (
    "reward.functions=[{function: 'run_support:distinct'}]"  # of an untrained model, nearly every response has another
)
SHOWN = ("optimizer/grad_norm", "reward/mean", "policy/objective", "publish/weight_version", "critic/grad_norm")


def main() -> None:
    folder, chosen = Path(sys.argv[1]).absolute(), sys.argv[2:]
    quickstart = folder / "quickstart"
    if not quickstart.exists():
        make_quickstart(quickstart)
    for algorithm, file, overrides in documented_runs(REPOSITORY):
        if (not chosen or algorithm in chosen) and not (folder / f"{algorithm}.json").exists():
            found = run(folder, quickstart, algorithm, file, overrides)
            (folder / f"{algorithm}.json").write_text(json.dumps(found) + "\n")
            print(algorithm, *(f"{key} {value:.3g}" for key, value in found.items()), flush=True)


def run(folder: Path, quickstart: Path, algorithm: str, file: str, overrides: list[str]) -> dict[str, float]:
    small = [
        *small_overrides(quickstart, folder / "runs", algorithm),
        "eval=null",
        REWARD,
        f"train.num_steps={NUM_STEPS}",
    ]
    if algorithm == "ppo":
        small += ["critic.warmup_steps=1", "batch.group_size=1", "batch.num_mini_batches=2"]
    command = Command(folder, "train", str(REPOSITORY / file), *small, *overrides)
    try:
        command.finish()
        assert command.process.returncode == 0, command.out + command.err
        assert command.left_running(folder / "runs" / algorithm) == []
    finally:
        command.end()
    lines = [json.loads(line) for line in (folder / "runs" / algorithm / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == NUM_STEPS, lines
    norms = [line["optimizer/grad_norm_max"] for line in lines if "optimizer/grad_norm_max" in line]
    assert norms and all(map(math.isfinite, norms)) and max(norms) > 0, norms
    return {key: value for key, value in lines[-1].items() if key in SHOWN}


if __name__ == "__main__":
    main()
