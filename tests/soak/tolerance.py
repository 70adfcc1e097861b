"""What the sequence ratio tolerates: the FP8 quickstart's task, trained in many pairings of precisions.

    python tests/soak/tolerance.py --plan                     the runs in their order, and which have a row
    python tests/soak/tolerance.py [--hours 2] [--block NAME ...] [--seeds 1 2 3]
    python tests/soak/tolerance.py --breaking 1               what follows at the dose that breaks training
    python tests/soak/tolerance_figures.py                    table and figures of the rows

Every finished run appends a row to docs/studies/tolerance_runs.csv at once. Started again, the study skips runs that have a
row and makes the run in flight anew. Rows are never removed: a run that fails for want of a machine has none, one that ends
because its numbers are no longer finite has one.

The protocol, written before the first row. A change of it is a new PROTOCOL, whose rows are compared among themselves.
Made more exact since, when the first anchor's run was the only row, whose numbers stay as they were: how two losses are
compared, that a collapse counts the cold start's error too, means over steps of what only some steps have, and what is
written of a run that ends in its first step. Protocol 2 differs from 1 in its cold start alone, made by a later version
of the package whose layers add in another order; three runs of seed 1 have rows of protocol 1. Protocol 3 differs from
2 in its cold start alone: the same commands and code, on a processor of another maker without AVX-512, where they make
other bytes. Five arms of protocol 2 had not all seeds when its machine was gone: FP8 on both sides with an FP8 KV
cache, and the four of `breaking`. Protocol 3 has these anew, all seeds, and the anchors that they are compared with.
Since its first seed one cold start is asked of the runs of a seed, not of all seeds: machines come and go, and arms are
compared seed by seed. How, was written before its second seed: what a cold start adds to where runs end is the mean over
the arms that have runs from every one; it is taken off before arms are compared and their spread is pooled, and every
cold start but one costs a degree of freedom. Accuracies in the table are as they were measured.

**Task and model.** Four-digit additions with a scratchpad. Qwen3 of 2 layers, hidden 256, 2 heads of 128, intermediate
512, 1.57 M parameters: every matrix that FP8 rounds consists of whole 128 x 128 blocks, and q, k and v of a head are
blocks of their own. One rank, one SGLang server, configs/quickstart_fp8.yaml: 32 prompts x 8 responses of some 35
tokens, 4 optimizer steps each, lr 3e-5, 40 steps. On two idle cores a run in fp32 takes under five minutes.

**Cold start.** One for all runs: configs/quickstart_fp8_sft.yaml, seed 1, stopped after 220 optimizer steps in fp32. One
rank on one thread makes the same bytes each time on one kind of machine; rows carry the start of its checksum, and the
study refuses to mix two.

**Arms** (`tolerance_arms.py`), three seeds each, in this order, which is that of what they decide. A seed changes the
order of prompts and every random number of a run; SGLang's sampling is not reproducible.
    anchors    fp32 with an fp32 server, GSPO and GRPO; FP8 (blockwise) with an FP8 (block) server, GSPO.
               `old_log_probs: trainer`
    dose       trainer fp32; the server's weights rounded to 0, 3, 2, 1 explicit mantissa bits (FP8 has 3). `old_log_probs: rollout`,
               so that the ratio carries the gap; GSPO and GRPO
    direct     trainer fp32; server FP8 block, and with FP8 KV cache. `old_log_probs: rollout`; GSPO and GRPO
    grid       the other four of: trainer fp32, FP8 x server same, FP8 block, FP8 block + FP8 KV. GSPO, old from the trainer
    breaking   at the largest number of bits at which an algorithm collapses: old from the trainer, with no correction
               and with the one of CORRECTION; GSPO and GRPO (`--breaking BITS`)
No arm but `breaking` has a correction of the mismatch: it would act on what is measured.

**Measured** (`tolerance_rows.py`). First: sampled accuracy, temperature 1, of the exported weights on an fp32 server,
512 held-out problems x 2 samples, standard error about .015. It asks what was learnt, not what the run's own server
makes of it; that is a column of its own. Beside it k3 of KL(server || trainer) at the first step and over the run, clip
fractions by sign of A and mini-batch, the share of |A| left in the first mini-batch, the share of sequences kept,
entropy, rewards.

**Collapse.** A run has collapsed if its weights are worse than the cold start by two standard errors of that difference
(sampling, of both accuracies), if the reward of its last ten steps is under half of its best ten, or if its numbers stop
being finite. If they do in the first step, the row says `ended` and nothing else: whether the arm had its gap is then
not known. An arm collapses if at least two of its three seeds do. "Training breaks at a dose" means that.

**Bears more.** An algorithm's loss at a dose is the mean accuracy of its own anchor less that of the arm. GSPO bears a
dose better than GRPO if its loss is smaller by what is detectable between two losses, and it bears a larger dose if it
breaks at fewer bits.

**What can be seen.** The spread s between seeds is pooled over arms without a collapse. Two arms of three seeds differ
detectably (two-sided 5 %, power 80 %) by (t.975 + t.80) s sqrt(2/3) with the pooled degrees of freedom: with s = .03,
which quickstart's three seeds suggest, .091 with 4 degrees of freedom and .072 with 20 (two arms, ten arms). Two losses
have four arms between them, s sqrt(4/3): .129 and .102. "Within two standard errors" compares means of three seeds:
|difference| <= 2 s sqrt(2/3). A difference below what is detectable is reported as not seen, never as absent.

**Expected.** (1) FP8 with FP8 ends within two standard errors of fp32: KL of some 1e-3 from the server, old log-probs
from the trainer. (2) Used directly as old, FP8 log-probs make GSPO clip a third to a half of all sequences before any
update, because log s of 35 tokens then has a standard deviation of sqrt(2 KL / 35), some .007, against a band of .003
and .004; it learns slower, and does not collapse. GRPO's band of .2 clips next to none. (3) So on the dose, GRPO's
clip fraction stays small and its accuracy falls where the gap makes tokens leave its band, at a k3 above .02; GSPO
loses earlier in accuracy, by clipping, and collapses later or not at all. The opposite would speak against the claim
that the sequence ratio tolerates more. (4) With old log-probs from the trainer, the dose that breaks is survived.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from study_rows import of_other_starts
from study_runs import REPOSITORY, Failed, call, commit, product, version
from tolerance_arms import ARMS, BLOCKS, SEEDS, Arm, breaking_arms, in_order
from tolerance_rows import NO_GAP, Row, append_row, finished, has_collapsed, measured, read_rows, trained_steps

from gspo_mega.base.errors import NumericsError
from gspo_mega.base.run_folder import RunFolder, atomic_write_json, read_json

ROWS = REPOSITORY / "docs" / "studies" / "tolerance_runs.csv"
CONFIG = REPOSITORY / "configs" / "quickstart_fp8.yaml"
COLD_START = REPOSITORY / "configs" / "quickstart_fp8_sft.yaml"
PROTOCOL = 3
COLD_START_STEPS = 220
CORRECTION = ("mismatch.correction=mask",)
# The first measurement: plain fp32, whatever the run was trained in.
EXACT = ("precision=fp32", "server.quantization=none", "server.kv_cache=auto", "eval.samples_per_prompt=2")


@dataclass(frozen=True)
class Study:
    """The folder of the study: `files/` the random model and the data, `cold/` the cold start, `arms/` the runs.
    `config` and `exact` are what accuracies are measured with.
    """

    folder: Path
    exact: ClassVar[tuple[str, ...]] = EXACT

    @property
    def config(self) -> Path:
        return CONFIG

    @property
    def data(self) -> Path:
        return self.folder / "files" / "data"

    def places(self, run_dir: Path, name: str, model: Path) -> list[str]:
        paths = {
            "run.dir": run_dir,
            "model.path": model,
            "data.path": self.data / "train.jsonl",
            "eval.path": self.data / "heldout.jsonl",
        }
        return [f"run.name={name}", *(f"{key}={json.dumps(str(path))}" for key, path in paths.items())]

    def cold_start(self) -> tuple[Path, str, tuple[float, float]]:
        """The cold start's Hugging Face folder, the start of its checksum, and its accuracy with the standard error;
        made where missing.
        """
        run = RunFolder(self.folder / "cold" / "sft")
        if not (run.huggingface_dir / "config.json").is_file():
            tool = [sys.executable, str(REPOSITORY / "tools" / "make_quickstart.py"), str(self.folder / "files")]
            call([*tool, "--wide", "--seed", "1"], self.folder / "make.log")
            # Measured once, after its last step: what is sampled there must not decide where the cold start ends.
            once = [f"sft.eval_from_step={COLD_START_STEPS}", f"sft.eval_every_steps={COLD_START_STEPS}"]
            once += ["sft.stop_accuracy_low=0.01", "sft.stop_accuracy_high=0.99"]
            places = self.places(run.path.parent, run.path.name, self.folder / "files" / "model")
            call([*product("sft"), str(COLD_START), *places, *once], self.folder / "cold.log")
        return self.measured_start(run.huggingface_dir)

    def measured_start(self, model: Path) -> tuple[Path, str, tuple[float, float]]:
        """As `cold_start`, of weights that are there; measured once."""
        weights = b"".join(path.read_bytes() for path in sorted(model.glob("*.safetensors")))
        checksum = hashlib.sha256(weights).hexdigest()[:12]
        record = self.folder / f"cold-{checksum}.json"
        measurement = read_json(record)
        if measurement is None:
            measurement = self.accuracy(model, "cold-eval")
            atomic_write_json(record, measurement)
        return model, checksum, (float(measurement["accuracy"]), float(measurement["standard_error"]))

    def accuracy(self, model: Path, name: str) -> dict[str, float]:
        """Sampled accuracy of a Hugging Face folder on the exact server."""
        places = [p for p in self.places(self.folder / "evals", name, model) if not p.startswith("model.path")]
        run = RunFolder(self.folder / "evals" / name)
        shutil.rmtree(run.path, ignore_errors=True)
        command = [*product("eval"), str(model), "--config", str(self.config), *self.exact, *places]
        call(command, self.folder / "eval.log")
        attempt = run.latest_attempt()
        result = read_json(attempt.result_file) if attempt is not None else None
        assert result is not None  # the command ended with 0
        return result

    def run(self, arm: Arm, seed: int) -> Row:
        """Train and measure one arm with one seed, from the start. Raises Failed where it is not the numbers' fault."""
        cold, checksum, before = self.cold_start()
        name = run_name(arm, seed)
        run, log = RunFolder(self.folder / "arms" / name), self.folder / f"{name}.log"
        shutil.rmtree(run.path, ignore_errors=True)
        began = time.monotonic()
        places = [*self.places(run.path.parent, name, cold), f"run.seed={seed}", "train.max_restarts=0"]
        train = product("train") if arm.bits is None else [sys.executable, str(DOSE), str(arm.bits)]
        code = call([*train, str(CONFIG), *places, *arm.overrides(CORRECTION)], log, (0, NumericsError.exit_code))
        minutes = (time.monotonic() - began) / 60
        metrics = run.path / "metrics.jsonl"  # written with the first step
        steps = [json.loads(line) for line in (metrics.read_text() if metrics.exists() else "").splitlines()]
        columns, trained = measured(steps), trained_steps(steps)
        if code == 0 and not trained:
            raise Failed(f"{name}: the command ended well, and {metrics} has no step; see {log}")
        if trained and arm.has_gap == (columns["k3_first"] < NO_GAP):
            raise Failed(
                f"{name}: k3 {columns['k3_first']:.2g} before any update: the arm is not what it is called; see {log}"
            )
        if code == 0:
            final = self.accuracy(run.huggingface_dir, "final")
            own = [line for line in steps if "eval/accuracy" in line][-1]
        else:
            final = {"accuracy": 0.0, "standard_error": 0.0}
            own = {"eval/accuracy": 0.0, "eval/accuracy_standard_error": 0.0}
        accuracy, error = final["accuracy"], final["standard_error"]
        if code:
            outcome = "not finite" if trained else "ended"
        else:
            worse = has_collapsed(before, (accuracy, error), columns["reward_best"], columns["reward_last"])
            outcome = "collapsed" if worse else "trained"
        return Row(
            protocol=PROTOCOL,
            arm=arm.name,
            block=arm.block,
            seed=seed,
            num_steps=int(trained[-1]["step"]) if trained else 0,
            before=before[0],
            before_se=before[1],
            accuracy=accuracy,
            accuracy_se=error,
            server_accuracy=own["eval/accuracy"],
            server_accuracy_se=own["eval/accuracy_standard_error"],
            minutes=minutes,
            outcome=outcome,
            date=time.strftime("%Y-%m-%d", time.gmtime()),
            commit=commit(),
            cold_start=checksum,
            torch=version("torch"),
            sglang=version("sglang"),
            megatron=version("megatron-core"),
            transformer_engine=version("transformer_engine") if arm.trainer == "fp8" else "-",
            **columns,
        )


DOSE = Path(__file__).with_name("tolerance_dose.py")


def run_name(arm: Arm, seed: int) -> str:
    """What the run of an arm is called: as the arm, in letters that the name of a run may have."""
    return f"{arm.name}-seed{seed}".replace("+", "_with_")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=REPOSITORY / "runs" / "tolerance", help="where the runs are kept"
    )
    parser.add_argument("--rows", type=Path, default=ROWS, help="CSV file of the rows")
    parser.add_argument("--block", nargs="+", choices=BLOCKS, default=list(BLOCKS), help="only these blocks of arms")
    parser.add_argument("--arm", nargs="+", metavar="NAME", help="only the arms of these names, in the study's order")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--breaking", type=int, metavar="BITS", help="the arms at the dose that breaks, instead")
    parser.add_argument("--hours", type=float, default=float("inf"), help="start no run after this time")
    parser.add_argument("--plan", action="store_true", help="show the runs and start none")
    options = parser.parse_args(arguments)
    if options.breaking is None:
        arms = tuple(arm for arm in ARMS if arm.block in options.block)
    else:
        arms = breaking_arms(options.breaking)
    if unknown := set(options.arm or ()) - {arm.name for arm in arms}:
        parser.error(f"no such arm: {', '.join(sorted(unknown))}; --plan shows them")
    arms = tuple(arm for arm in arms if options.arm is None or arm.name in options.arm)
    rows = read_rows(options.rows)
    done, runs = finished(rows, PROTOCOL), in_order(arms, tuple(options.seeds))
    if options.plan:
        for arm, seed in runs:
            print(f"{arm.block:<9} {arm.name:<48} seed {seed}  {'has a row' if (arm.name, seed) in done else ''}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    study, began = Study(options.folder.absolute()), time.monotonic()
    checksum = study.cold_start()[1]
    if mixed := of_other_starts([row for row in rows if row.protocol == PROTOCOL], [s for _, s in runs], checksum):
        print(f"{options.rows} has rows of another cold start (here {checksum}): {mixed}; name other seeds or a file")
        return 2
    for arm, seed in runs:
        if (arm.name, seed) in done:
            continue
        if time.monotonic() - began > options.hours * 3600:
            break
        row = study.run(arm, seed)
        append_row(options.rows, row)
        print(
            f"{row.block:<9} {row.arm:<48} seed {seed}  {row.outcome:<10} accuracy {row.accuracy:.3f} ±"
            f" {row.accuracy_se:.3f}  k3 {row.k3:.2g}  clip {row.clip:.3f}  {row.minutes:.1f} min",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
