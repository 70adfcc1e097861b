"""What GSPO bears of the mismatch that GRPO does not, and the other way round, on a pretrained model and real text.

    launch/setup.sh && launch/smollm2_model.sh               the model, runs/models/smollm2
    python tests/soak/pretrained_study.py --plan             the runs in their order, and which have a row
    python tests/soak/pretrained_study.py [--hours 1] [--seeds 1 2 3] [--model FOLDER] [--runs FOLDER]
    python tests/soak/pretrained_study.py --table            the table in tests/benchmarks/RESULTS.md, from the rows

Every finished run appends a row to docs/studies/pretrained_runs.csv at once. Started again, the study skips runs that have
a row and makes the run in flight anew. Rows are never removed: a run that ends because its numbers are no longer finite
has one, one that fails for want of a machine has none. Of a run that has a row, its metrics and its journal are kept.

The protocol, written before the first row. A change of it is a new PROTOCOL, whose rows are compared among themselves.

**Question.** With the server's log-probs as old ones (`old_log_probs: rollout`, as the paper's section 5.4 proposes) the
ratio contains the gap between trainer and server. Which gap does GSPO's ratio of whole responses bear that GRPO's ratio
of tokens does not, and which does GRPO bear that GSPO does not? `tolerance.py` asked it of 1.6 M parameters on sums.

**Arms.** {GSPO, GRPO} x {server in bf16, server in FP8}, the trainer in bf16. The FP8 is `server.quantization: fp8`:
e4m3, one scale for each output channel of a weight and each token of an input (docs/server_precision.md), emulated on a
CPU; blocks of 128 do not fit this model's projections of 576 and 192. Clip ranges: GSPO that of the file, 3e-3 / 4e-3,
ten times the paper's, for responses of some 25 tokens; GRPO the one it was published with in the GSPO paper, .2 / .27,
and the mean of sequences' token means. No arm has a correction of the mismatch: it would act on what is measured. GSPO
with the range of its file and GRPO with its own is what a user would have; another range of either is not tried.

**Model and task.** SmolLM2-135M-Instruct, the JSON task of configs/smollm2_json.yaml in the model's own chat template, two
ranks, one server, lr 1e-5. 8 steps of 8 prompts x 8 responses, 2 optimizer steps each: the steep part of
the curve, since after 12 steps of twice as many responses every run solves .98 or more. `batch.share_prefixes: prompts`
and SGLang's policy `lpm` in every arm: trainer and server compute what prompts begin with once. The problems are those of `make_short_task.py --seed 1` for all runs.

**Seeds.** Three, in the order seed 1 of all arms, seed 2, seed 3, so that the arms stay balanced wherever the study stops. A seed changes
the order of prompts and every random number of a run; SGLang's sampling is not reproducible. All runs start with the
same weights, whose checksum the rows carry; the study refuses to mix two.

**Measured** (`Row`). First, sampled accuracy, temperature 1, of the exported weights on a bf16 server for every arm: 192
held-out problems, standard error up to .036. It asks what was learnt. Second, the area: the mean reward of all 8 steps,
which the run's own server sampled. Beside them, of the first mini-batch, where the ratio is the mismatch alone: k3 of
KL(server || trainer), mean |d| of a token, the standard deviation of log s, clip fractions by sign of A and the share of
|A| that is left; the clip fractions of the second mini-batch; entropy; minutes. The study refuses an FP8 arm whose k3
before any update is under .005, and a bf16 arm above it: it would not be what it is called.

**Collapse.** As in `tolerance.py`, over 3 steps in place of 10: the weights solve fewer problems than the model did by two
standard errors, the reward of the last 3 steps is under half of its best 3, or the numbers are no longer finite.

**Bears more.** An algorithm loses what its bf16 arm has above its FP8 arm. GSPO bears more than GRPO if it loses less
accuracy, by at least what is detectable between two losses; GRPO bears more than GSPO by the same rule. The area is
reported in the same way and decides nothing: two servers sampled it.

**What can be seen.** The spread s between seeds is pooled over the arms without a collapse. A difference is detectable
(two-sided 5 %, power 80 %) from (t.975 + t.80) s sqrt(sum of 1/n) on. With 12 runs (8 degrees of freedom): two arms 2.61 s,
two losses 3.69 s; with s = .05, .13 and .18, with s = .10, .26 and .37. With two seeds of each arm (4 degrees): 3.72 s and
5.26 s. Sampling alone makes s .03 or so, so two losses are never told apart below .11. A smaller difference is "not seen",
never absent, whichever algorithm it favours.

**Expected.** A measurement of this model (gspo_mega/verify/mismatch/RESULTS.md) has k3 some 7e-4 with a bf16 server and .03
with FP8, where the mean |log s| is five times GSPO's range. So with FP8 GSPO clips half of the responses with A != 0
before any update, GRPO a few percent of its tokens; GSPO learns more slowly and loses more, .2 of accuracy or so, GRPO
under .1. With bf16 GSPO clips a tenth to a third. That would say that GRPO bears this gap better at these ranges: against
the claim that sequences tolerate the server's log-probs. No arm collapses in 16 updates. The opposite is reported alike.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Literal, get_args

import tolerance
from claims_figures import said
from study_rows import append_row, compared_spread, of_other_starts, read_table, smallest_detectable
from study_runs import REPOSITORY, Failed, call, commit, product, version
from tolerance_arms import CLIP
from tolerance_figures import RESULTS, with_table
from tolerance_rows import has_collapsed, trained_steps
from tolerance_rows import measured as measured_of_steps

from gspo_mega.base.errors import NumericsError
from gspo_mega.base.run_folder import RunFolder

ROWS = REPOSITORY / "docs" / "studies" / "pretrained_runs.csv"
CONFIG = REPOSITORY / "configs" / "smollm2_json.yaml"
MODEL = REPOSITORY / "runs" / "models" / "smollm2"
PROTOCOL = 1
SEEDS = (1, 2, 3)
NUM_HELDOUT = 192
NUM_MINI_BATCHES = 2
WINDOW = 3  # steps of a mean of rewards
LEAST_FP8_GAP = 5e-3  # k3 before any update that an FP8 server has at least, and a bf16 server at most
SHARED_PROMPTS = "server.options={schedule_policy: lpm}"  # the server reads what prompts begin with once
COMMON = (
    "train.num_steps=8",
    "batch.prompts_per_step=8",
    f"batch.num_mini_batches={NUM_MINI_BATCHES}",
    "batch.share_prefixes=prompts",
    "precision=bf16",
    "old_log_probs=rollout",
    "mismatch.correction=none",
    SHARED_PROMPTS,
    "eval=null",  # weights are measured after the run, on one kind of server
)

Algorithm = Literal["gspo", "grpo"]
Server = Literal["bf16", "fp8"]


@dataclass(frozen=True)
class Arm:
    """What one run of the study does differently."""

    algorithm: Algorithm
    server: Server

    @property
    def name(self) -> str:
        return f"{self.algorithm}-{self.server}"

    def overrides(self) -> list[str]:
        """The arm as overrides of configs/smollm2_json.yaml."""
        low, high = CLIP[self.algorithm]
        return [
            f"algorithm={self.algorithm}",
            f"objective.clip_low={low}",
            f"objective.clip_high={high}",
            f"server.quantization={'fp8' if self.server == 'fp8' else 'none'}",
            *COMMON,
        ]


ARMS = tuple(Arm(algorithm, server) for server in get_args(Server) for algorithm in get_args(Algorithm))


def in_order(seeds: Sequence[int]) -> list[tuple[Arm, int]]:
    """(arm, seed) of all runs, seed after seed."""
    return [(arm, seed) for seed in seeds for arm in ARMS]


@dataclass(frozen=True)
class Row:
    """One finished run. Accuracies are of the held-out problems on a bf16 server, each ± its standard error of sampling.

    `area`: the mean reward of all steps; `reward_first`: of the first, which the untrained weights have. The other columns
    are as in `tolerance_rows.Row`, for two mini-batches and windows of three steps; `abs_log_ratio`: mean |d| of a token in
    the first mini-batch, over all steps. `outcome`: trained, collapsed, not finite.
    """

    protocol: int
    arm: str
    seed: int
    num_steps: int
    before: float
    before_se: float
    accuracy: float
    accuracy_se: float
    area: float
    reward_first: float
    reward_best: float
    reward_last: float
    k3_first: float
    k3: float
    k3_last: float
    abs_log_ratio: float
    abs_log_ratio_max: float
    log_s_mismatch_sd: float
    clip: float
    clip_positive_0: float
    clip_positive_1: float
    clip_negative_0: float
    clip_negative_1: float
    positive_left: float
    negative_left: float
    kept: float
    entropy_last: float
    minutes: float
    outcome: str
    date: str
    commit: str
    cold_start: str
    torch: str
    sglang: str
    megatron: str


def finished(rows: Sequence[Row]) -> set[tuple[str, int]]:
    """(arm, seed) of the runs that need not be made again."""
    return {(row.arm, row.seed) for row in rows if row.protocol == PROTOCOL}


def measured(lines: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The columns that come from a run's metrics.jsonl, its lines in order of steps, at least one of them of training."""
    trained = trained_steps(lines)
    rewards = [line["reward/mean"] for line in trained]
    gaps = [line.get("mismatch/abs_log_ratio_mean") for line in trained]
    return {
        **measured_of_steps(lines, WINDOW, NUM_MINI_BATCHES),
        "area": fmean(rewards),
        "reward_first": rewards[0],
        "abs_log_ratio": fmean(math.nan if gap is None else gap for gap in gaps),
    }


@dataclass(frozen=True)
class Study(tolerance.Study):
    """The folder of the study: `files/data` the problems, `arms/` the runs. `model`: the Hugging Face folder of all."""

    model: Path = MODEL
    exact: ClassVar[tuple[str, ...]] = (
        *("precision=bf16", "server.quantization=none", SHARED_PROMPTS),
        f"eval.num_prompts={NUM_HELDOUT}",
    )

    @property
    def config(self) -> Path:
        return CONFIG

    def cold_start(self) -> tuple[Path, str, tuple[float, float]]:
        """The model's folder, the start of its checksum, and its accuracy with the standard error."""
        data = self.folder / "files" / "data"
        if not (data / "heldout.jsonl").is_file():
            tool = str(REPOSITORY / "tools" / "make_short_task.py")
            arguments = [str(data), "--seed", "1", "--num-heldout", str(NUM_HELDOUT)]
            call([sys.executable, tool, *arguments], self.folder / "make.log")
        return self.measured_start(self.model)

    def train(self, arm: Arm, seed: int) -> Row:
        """Train and measure one arm with one seed, from the start. Raises Failed where it is not the numbers' fault."""
        model, checksum, before = self.cold_start()
        name, made_of = f"{arm.name}-seed{seed}", commit()
        run, log = RunFolder(self.folder / "arms" / name), self.folder / f"{name}.log"
        shutil.rmtree(run.path, ignore_errors=True)
        places = [one for one in self.places(run.path.parent, name, model) if not one.startswith("eval.")]
        command = [*product("train"), str(CONFIG), *places, f"run.seed={seed}", "train.max_restarts=0"]
        began = time.monotonic()
        code = call([*command, *arm.overrides()], log, (0, NumericsError.exit_code))
        minutes = (time.monotonic() - began) / 60
        metrics = run.path / "metrics.jsonl"
        lines = [json.loads(line) for line in (metrics.read_text() if metrics.exists() else "").splitlines()]
        trained = trained_steps(lines)
        if not trained:
            raise Failed(f"{name}: {metrics} has no step; see {log}")
        columns = measured(lines)
        if (arm.server == "fp8") == (columns["k3_first"] < LEAST_FP8_GAP):
            raise Failed(f"{name}: k3 {columns['k3_first']:.2g} before any update: not what it is called; see {log}")
        final = self.accuracy(run.huggingface_dir, "final") if code == 0 else {"accuracy": 0.0, "standard_error": 0.0}
        after = final["accuracy"], final["standard_error"]
        worse = has_collapsed(before, after, columns["reward_best"], columns["reward_last"])
        for part in ("checkpoints", "weights", "hf"):
            shutil.rmtree(run.path / part, ignore_errors=True)
        return Row(
            protocol=PROTOCOL,
            arm=arm.name,
            seed=seed,
            num_steps=int(trained[-1]["step"]),
            before=before[0],
            before_se=before[1],
            accuracy=after[0],
            accuracy_se=after[1],
            minutes=minutes,
            outcome="not finite" if code else "collapsed" if worse else "trained",
            date=time.strftime("%Y-%m-%d", time.gmtime()),
            commit=made_of,
            cold_start=checksum,
            torch=version("torch"),
            sglang=version("sglang"),
            megatron=version("megatron-core"),
            **columns,
        )


# --- the table ------------------------------------------------------------------------------------------------------

# What is compared: a sum of arms' means, each with its sign.
_LOSS = {name: {(name, "bf16"): 1, (name, "fp8"): -1} for name in get_args(Algorithm)}
COMPARED: dict[str, dict[tuple[str, str], int]] = {
    "GSPO loses (bf16 less FP8)": _LOSS["gspo"],
    "GRPO loses (bf16 less FP8)": _LOSS["grpo"],
    "GSPO's loss less GRPO's": _LOSS["gspo"] | {arm: -sign for arm, sign in _LOSS["grpo"].items()},
    "GSPO less GRPO, bf16 server": {("gspo", "bf16"): 1, ("grpo", "bf16"): -1},
    "GSPO less GRPO, FP8 server": {("gspo", "fp8"): 1, ("grpo", "fp8"): -1},
}


def table(rows: Sequence[Row]) -> str:
    """The rows by arm as Markdown, and what can be said between the arms."""
    lines = [
        "| arm | accuracy | area | k3, first step | mean \\|d\\| | sd of log s | A>0 clipped, first and second mini-batch"
        " | A<0 clipped | \\|A\\| left of A>0, A<0 | entropy, last | minutes | collapsed |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for arm in ARMS:
        mine = [row for row in rows if row.arm == arm.name]
        if not mine:
            continue

        def mean(*names: str, form: str = ".2f", of: Sequence[Row] = mine) -> str:
            """Each column's mean over the runs that have a number."""
            known = [[getattr(row, name) for row in of if not math.isnan(getattr(row, name))] for name in names]
            return ", ".join(format(fmean(values), form) if values else "-" for values in known)

        cells = [
            f"`{arm.name}`",
            f"{said([row.accuracy for row in mine])} ({' '.join(f'{row.accuracy:.3f}' for row in mine)})",
            said([row.area for row in mine]),
            mean("k3_first", form=".1e"),
            mean("abs_log_ratio", form=".3f"),
            mean("log_s_mismatch_sd", form=".4f"),
            mean("clip_positive_0", "clip_positive_1"),
            mean("clip_negative_0", "clip_negative_1"),
            mean("positive_left", "negative_left"),
            mean("entropy_last"),
            mean("minutes", form=".1f"),
            f"{sum(row.outcome != 'trained' for row in mine)} of {len(mine)}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, *comparisons(rows)]) + "\n"


def comparisons(rows: Sequence[Row]) -> list[str]:
    """What is compared, by accuracy and by area, against what can be detected, and the protocol's verdict."""
    groups = {(arm.algorithm, arm.server): [row for row in rows if row.arm == arm.name] for arm in ARMS}
    cells: dict[str, list[str]] = {name: [] for name in COMPARED}
    spreads, verdict = [], ""
    for column in ("accuracy", "area"):

        def value(row: Row, column: str = column) -> float:
            return getattr(row, column)

        try:
            spread, freedom = compared_spread(rows, value)
        except ValueError:
            return ["", "What can be seen between arms is not known yet: too few runs."]
        if not all(groups.values()):
            return ["", "Not every arm has a run yet."]
        spreads.append(f"{spread:.3f} of {column} ({freedom} degrees of freedom)")
        for name, signs in COMPARED.items():
            found = sum(sign * fmean(value(row) for row in groups[arm]) for arm, sign in signs.items())
            detectable = smallest_detectable(spread, freedom, [len(groups[arm]) for arm in signs])
            is_seen = abs(found) >= detectable
            mark = "**" if is_seen else ""
            cells[name] += [f"{mark}{found:+.3f}{mark}", f"{detectable:.3f}"]
            if (column, name) == ("accuracy", "GSPO's loss less GRPO's"):
                better = "GRPO" if found > 0 else "GSPO"
                verdict = f"{better} bears more" if is_seen else "that either bears more was not seen"
    return [
        "",
        f"{len(rows)} of {len(in_order(SEEDS))} runs. Spread between seeds: {' and '.join(spreads)}. Differences in bold can"
        " be told, the others cannot at this size:",
        "",
        "| compared | accuracy | detectable from | area | detectable from |",
        "|---|---|---|---|---|",
        *(f"| {name} | {' | '.join(found)} |" for name, found in cells.items()),
        "",
        f"By the protocol's rule: {verdict}. The model solves {rows[0].before:.3f} ± {rows[0].before_se:.3f} before training.",
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL, help="the Hugging Face folder of SmolLM2-135M-Instruct")
    runs_folder = REPOSITORY / "runs" / "pretrained-study"
    parser.add_argument("--runs", type=Path, default=runs_folder, help="where the runs are kept")
    parser.add_argument("--rows", type=Path, default=ROWS, help="CSV file of the rows")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--hours", type=float, default=float("inf"), help="start no run after this time")
    parser.add_argument("--plan", action="store_true", help="show the runs and start none")
    parser.add_argument("--table", action="store_true", help="write the table of the rows and start no run")
    parser.add_argument("--page", type=Path, default=RESULTS, help="page that gets the table")
    options = parser.parse_args(arguments)
    rows: list[Any] = read_table(options.rows, Row)
    rows = [row for row in rows if row.protocol == PROTOCOL]
    done, runs = finished(rows), in_order(options.seeds)
    if options.plan:
        for arm, seed in runs:
            print(f"{arm.name:<10} seed {seed}  {'has a row' if (arm.name, seed) in done else ''}")
        return 0
    if options.table:
        if not rows:
            print(f"{options.rows}: no rows of protocol {PROTOCOL}")
            return 1
        page = options.page.read_text(encoding="utf-8")
        options.page.write_text(with_table(page, "pretrained", table(rows)), encoding="utf-8")
        print(table(rows))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    study, began = Study(options.runs.absolute(), options.model.absolute()), time.monotonic()
    checksum = study.cold_start()[1]
    if mixed := of_other_starts(rows, options.seeds, checksum):
        print(f"{options.rows} has rows of other weights (here {checksum}): {mixed}; name other seeds or a file")
        return 2
    for arm, seed in runs:
        if (arm.name, seed) in done:
            continue
        if time.monotonic() - began > options.hours * 3600:
            break
        row = study.train(arm, seed)
        append_row(options.rows, row)
        print(
            f"{row.arm:<10} seed {seed}  {row.outcome:<10} accuracy {row.accuracy:.3f} ± {row.accuracy_se:.3f}"
            f"  area {row.area:.3f}  k3 {row.k3:.2g}  clip {row.clip:.3f}  {row.minutes:.1f} min",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
