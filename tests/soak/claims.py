"""The claims of the GSPO paper (arXiv:2507.18071), tried at the size of the quickstart.

    python tests/soak/claims.py --plan                     the runs in their order, and which have a row
    python tests/soak/claims.py [--hours 2] [--block NAME ...] [--seeds 1 2 3]
    python tests/soak/claims_figures.py                    table and figures of the rows

Every finished run appends a row to docs/studies/claims_runs.csv at once. Started again, the study skips runs that have a
row and makes the run in flight anew. Rows are never removed: a run that ends because its numbers are no longer finite has
one, one that fails for want of a machine has none.

The protocol, written before the first row. A change of it is a new PROTOCOL, whose rows are compared among themselves.

**Learning** (a, b). The quickstart: four-digit additions with a scratchpad, Qwen3-MoE of 3 layers and 8 experts, two
ranks in expert parallelism, fp32, one SGLang server. GSPO (range .003 / .004, ten times the paper's), GRPO (.2 / .27,
mean of sequences' token means) and PPO (.2 / .2, a critic, one response per prompt), 80 rollout batches of 256
responses each, 4 optimizer steps a batch, lr 1e-4. PPO's first 4 batches train its critic alone, and count as samples.

**Routing** (c). The same task on `claims_moe.json`: 6 layers of 32 experts, 4 of them per token, of which the
quickstart's has 3 layers of 8, 2 per token. 40 rollout batches of 256 responses. (80 before the first row of this
block; halved for the time that 18 runs take.) GSPO and GRPO, each with the trainer's own routes, with those of the old
pass (R2) and with those of the rollout (R3).

**Turns** (e). Sums that are worked out with a calculator, in two or three turns: configs/calculator.yaml, 40 rollout
batches of 256 episodes. A call whose result is needed has a reward of .25 (`claims_turns.py`), a right answer 1. GSPO
and GSPO-token with one advantage per episode, and GSPO-token where a turn's tokens have the advantage of the rewards
from that turn on.
Protocol 2 of this block differs from 1 in its cold start alone: that of 1 (180 steps, on a schedule of 190) solved 1 %,
and the one run that was finished from it had learned nothing. Its row is in the file. The 190 steps of 2 were chosen
by the accuracy of the start alone, before any run from it. A cold start under LEAST_START is refused since.

**Critic.** What of PPO's lead in `learning` (+.089 over GSPO, not expected) comes from its 256 prompts with one response
each, and what from its critic: PPO as there, with 32 prompts of 8 responses as GSPO has, and as there with a critic that
stays at zero, so that a token's advantage is its reward, whitened over the mini-batch. GSPO is the block's first. Written
before the first row of the block. Expected: with 8 responses PPO comes near GSPO, since the critic explains under 1 % of the
variance; frozen it ends where it does unfrozen. What can be told needs about .06 in final accuracy, as in `learning`; a
smaller part is "cannot be told at this size".

**Mini-batches** (f). Where the paper expects token ratios to hurt: long responses, and more optimizer steps per rollout
batch, so that the later ones are further off-policy. GSPO and GRPO with 4 and with 16 mini-batches of the same 40
rollout batches of 128 responses (16 prompts of 8), lr 1e-4: 16 steps move the policy as far as 4 at 4e-4. The task is
`claims_counting.py`: 12 sums after one another, 145 tokens; the reward is the share of sums before the first mistake,
correct is a response with all 12. The model is the quickstart's without experts, on one rank. GRPO's range is .2 / .27.
GSPO's is .0015 / .002, the quickstart's .003 / .004 times sqrt(35 / 145): the mean of T log-ratios that deviate
independently spreads by 1 / sqrt(T), the rule that leads from the paper's range at some thousands of tokens to the
quickstart's. The cold start was chosen only by its accuracy: after 420 steps .47 of 64 held-out problems, .56 of their
sums. Written before the first run; four steps of gspo-16 with seed 99 were run before to time them, and nothing else of
them was looked at.
Protocol 2 differs from 1 only in its learning rate, which was 3e-4 in 1: there the first run, gspo-4 with seed 1, fell
from a reward of .56 to .32 in its first batch and did not come back to .56 in 40, so that there was nothing that 16
mini-batches could cost. It was changed before any other arm was run; the row is in the file. Whole seeds after the
third are added while there is time, no matter what the first three show (written during the first run of protocol 2).
(There was none.) The runs' cold start was made by hand in the search for its number of steps;
`cold_start`, run after them, made the same bytes.
Also measured: the share of sums (mean reward of the held-out responses of the final accuracy), the mean reward over
all steps, the largest fall of the ten-step mean reward (setback), the spread of tokens' log-ratios and of their means
over a sequence, gradient norms, the mean length of responses, which must be >= 128.
Expected: 16 mini-batches cost GRPO more than GSPO. The measure is the difference of differences (GRPO's 16 less its 4,
less the same of GSPO) in final accuracy, and also in share, area and reward. With three seeds and the spread of
the other blocks, .025, it is told from .09 on, a difference of two arms from .065 on; below it is "cannot be told".
That GSPO loses as much or more, by what can be told, speaks against the claim; so does a GSPO-16 that collapses where
GRPO-16 does not. Where 16 cost neither anything, the claim was not tried hard enough here, and this is said.

**Cold start.** One per block and seed of the runs, itself of seed 1, after a fixed number of optimizer steps (START):
one rank pair on one kind of machine makes the same bytes each time, another kind makes other bytes. Rows carry the
start of its checksum, and the study refuses to mix two in a seed. (For the first four rows: in a block.)

**Seeds.** Three, consecutive. A seed changes the order of prompts and every random number of a run; SGLang's sampling
is not reproducible. Arms are compared within cold starts, as in `tolerance.py`. Where the machine is gone before all
arms of a seed have a row, as with seed 2 of `learning`, that seed stays as it is and the next ones are added.

**Measured** (`claims_rows.py`). Sampled accuracy, temperature 1, of the exported weights: 512 held-out problems x 2
samples, standard error about .015. The area under the run's own held-out accuracy, every 10 steps. The share of tokens
that are clipped. The share of choices of experts that the last mini-batch does not make again, in each layer, and of
(token, layer) pairs with another set; the paper puts the first at some 10 % for a model of 48 layers. Collapse is as `tolerance.py` defines it.

**What can be seen** follows from the spread of seeds, as in `tolerance.py`. What is smaller is "cannot be told at this
size".
An arm is compared with the first of its block, one with replay with the same algorithm without, and advantages of turns
with GSPO-token's of episodes. The last two were written when `routing` had 8 of its 18 rows and `turns` none; before, all
were compared with the block's first, which does not answer whether GRPO needs replay.

**Expected.** (a) GSPO ends above GRPO and has the larger area; the quickstart's earlier runs differ by less than their
seeds do, so that it may not be seen. PPO learns more slowly, with no second response to compare a response with.
(b) GSPO clips about two orders of magnitude more tokens than GRPO (the paper: .15 and .0013). (c) More layers and
experts move more routes than the quickstart's .3 to .8 %, less than the paper's 10 %. GRPO gains from replay, GSPO does
not. The opposite speaks against the claim.

(e) GSPO-token with one advantage per episode learns as GSPO does, but for the sampling; on one journal their gradients
are equal (`gspo-mega compare` on a run of this study, whose range both then have). Advantages of turns help, as a call's reward does not depend on
the last turn; with two or three turns by little.

(d), log-probs of the servers used directly, is `tolerance.py`'s block `direct`.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import tolerance
from claims_arms import ARMS, BLOCKS, SEEDS, Arm, in_order
from claims_rows import Row, finished, measured, of_protocol
from study_rows import append_row, of_other_starts, read_table
from study_runs import REPOSITORY, Failed, call, commit, product, version
from tolerance_rows import has_collapsed

from gspo_mega.base.errors import NumericsError
from gspo_mega.base.run_folder import RunFolder

ROWS = REPOSITORY / "docs" / "studies" / "claims_runs.csv"
CONFIGS = REPOSITORY / "configs"
SHAPE = Path(__file__).with_name("claims_moe.json")
COUNTING = Path(__file__).with_name("claims_counting.py")
PROTOCOL = {"learning": 1, "routing": 1, "turns": 2, "critic": 1, "mini_batches": 2}
LEAST_START = 0.05  # of held-out accuracy


class Start(NamedTuple):
    """A block's model and cold start: `<task>.yaml`, its `_sft.yaml` for so many steps, and what makes its files.
    `schedule_steps`: of the learning rate's schedule; 10 more than `num_steps` if None. `data`: a script that makes the
    block's data where that is not the task's, and `overrides` of the cold start, the runs and the measurements.
    """

    task: str
    num_steps: int
    shape: tuple[str, ...] = ()
    schedule_steps: int | None = None
    data: Path | None = None
    overrides: tuple[str, ...] = ()


START = {
    "learning": Start("quickstart", 330),
    "routing": Start("quickstart", 420, ("--shape", str(SHAPE))),
    "critic": Start("quickstart", 330),
    "turns": Start("calculator", 190, ("--task", "calculator"), schedule_steps=400),
    "mini_batches": Start(
        "quickstart",
        420,
        ("--dense",),
        schedule_steps=800,
        data=COUNTING,
        overrides=(
            "cluster.ranks_per_node=1",
            "parallel.expert=1",
            "reward=tests.soak.claims_counting:score",
            "rollout.max_new_tokens=160",
            "batch.micro_batch_tokens=10240",
        ),
    ),
}


@dataclass(frozen=True)
class Study(tolerance.Study):
    """The folder of one block: its files, its cold start and its runs."""

    exact: ClassVar[tuple[str, ...]] = ("eval.samples_per_prompt=2",)

    @property
    def block(self) -> str:
        return self.folder.name

    @property
    def config(self) -> Path:
        return CONFIGS / f"{START[self.block].task}.yaml"

    @property
    def data(self) -> Path:
        return self.folder / "data" if START[self.block].data else super().data

    def places(self, run_dir: Path, name: str, model: Path) -> list[str]:
        return [*super().places(run_dir, name, model), *START[self.block].overrides]

    def cold_start(self) -> tuple[Path, str, tuple[float, float]]:
        """The block's cold start: as of the tolerance study."""
        run = RunFolder(self.folder / "cold" / "sft")
        if not (run.huggingface_dir / "config.json").is_file():
            tool = [sys.executable, str(REPOSITORY / "tools" / "make_quickstart.py"), str(self.folder / "files")]
            start = START[self.block]
            call([*tool, "--seed", "1", *start.shape], self.folder / "make.log")
            if start.data is not None:
                call([sys.executable, str(start.data), str(self.data)], self.folder / "make.log")
            steps = start.num_steps
            once = [f"sft.eval_from_step={steps}", f"sft.eval_every_steps={steps}"]
            once.append(f"sft.max_steps={start.schedule_steps or steps + 10}")
            once += ["sft.stop_accuracy_low=0.01", "sft.stop_accuracy_high=0.99"]
            places = self.places(run.path.parent, run.path.name, self.folder / "files" / "model")
            config = str(CONFIGS / f"{start.task}_sft.yaml")
            call([*product("sft"), config, *places, *once], self.folder / "cold.log")
        return self.measured_start(run.huggingface_dir)

    def train(self, arm: Arm, seed: int) -> Row:
        """Train and measure one arm with one seed, from the start. Raises Failed where it is not the numbers' fault."""
        cold, checksum, before = self.cold_start()
        name = f"{arm.name}-seed{seed}"
        run, log = RunFolder(self.folder / "arms" / name), self.folder / f"{name}.log"
        shutil.rmtree(run.path, ignore_errors=True)
        began = time.monotonic()
        places = [*self.places(run.path.parent, name, cold), f"run.seed={seed}", "train.max_restarts=0"]
        command = [*product("train"), str(CONFIGS / arm.config), *places, *arm.overrides()]
        code = call(command, log, (0, NumericsError.exit_code))
        minutes = (time.monotonic() - began) / 60
        metrics = run.path / "metrics.jsonl"
        lines = [json.loads(line) for line in (metrics.read_text() if metrics.exists() else "").splitlines()]
        trained = [line for line in lines if line.get("reward/mean") is not None]
        if not trained:
            raise Failed(f"{name}: {metrics} has no step; see {log}")
        columns = measured(lines)
        final = self.accuracy(run.huggingface_dir, "final") if code == 0 else {"accuracy": 0.0, "standard_error": 0.0}
        after = final["accuracy"], final["standard_error"]
        worse = has_collapsed(before, after, columns["reward_best"], columns["reward_last"])
        return Row(
            protocol=PROTOCOL[arm.block],
            arm=arm.name,
            block=arm.block,
            seed=seed,
            num_steps=int(trained[-1]["step"]),
            before=before[0],
            before_se=before[1],
            accuracy=after[0],
            accuracy_se=after[1],
            share=final.get("reward_mean", math.nan),
            minutes=minutes,
            outcome="not finite" if code else "collapsed" if worse else "trained",
            date=time.strftime("%Y-%m-%d", time.gmtime()),
            commit=commit(),
            cold_start=checksum,
            torch=version("torch"),
            sglang=version("sglang"),
            megatron=version("megatron-core"),
            **columns,
        )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "runs" / "claims", help="where the runs are kept")
    parser.add_argument("--rows", type=Path, default=ROWS, help="CSV file of the rows")
    parser.add_argument("--block", nargs="+", choices=BLOCKS, default=list(BLOCKS), help="only these blocks of arms")
    parser.add_argument("--arm", nargs="+", metavar="NAME", help="only the arms of these names, in the study's order")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--hours", type=float, default=float("inf"), help="start no run after this time")
    parser.add_argument("--plan", action="store_true", help="show the runs and start none")
    options = parser.parse_args(arguments)
    arms = tuple(arm for arm in ARMS if arm.block in options.block)
    if unknown := set(options.arm or ()) - {arm.name for arm in arms}:
        parser.error(f"no such arm: {', '.join(sorted(unknown))}; --plan shows them")
    arms = tuple(arm for arm in arms if options.arm is None or arm.name in options.arm)
    rows = read_table(options.rows, Row)
    done, runs = finished(rows, PROTOCOL), in_order(arms, tuple(options.seeds))
    if options.plan:
        for arm, seed in runs:
            has = "has a row" if (arm.block, arm.name, seed) in done else ""
            print(f"{arm.block:<9} {arm.name:<18} seed {seed}  {has}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began = time.monotonic()
    for block in dict.fromkeys(arm.block for arm, _ in runs):
        study = Study(options.folder.absolute() / block)
        _, checksum, (before, _) = study.cold_start()
        if before < LEAST_START:
            print(
                f"{study.folder}: the cold start solves {before:.3f}, under {LEAST_START}: nothing is learned from it"
            )
            return 2
        mine = [row for row in of_protocol(rows, PROTOCOL) if row.block == block]
        if mixed := of_other_starts(mine, options.seeds, checksum):
            print(
                f"{options.rows} has rows of another cold start (here {checksum}): {mixed}; name other seeds or a file"
            )
            return 2
        for arm, seed in runs:
            if arm.block != block or (arm.block, arm.name, seed) in done:
                continue
            if time.monotonic() - began > options.hours * 3600:
                return 0
            row = study.train(arm, seed)
            append_row(options.rows, row)
            print(
                f"{row.block:<9} {row.arm:<18} seed {seed}  {row.outcome:<10} accuracy {row.accuracy:.3f} ±"
                f" {row.accuracy_se:.3f}  area {row.area:.3f}  token clip {row.token_clip:.4f}  changed"
                f" {row.changed:.4f}  {row.minutes:.1f} min",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
