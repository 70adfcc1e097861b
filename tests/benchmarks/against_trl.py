"""A step here against a step of TRL, on the same model, prompts, shape and number of tokens, one after the other.

    python tests/benchmarks/against_trl.py [--shapes 0.83M 25M 0.83M-192 25M-192 0.83M-ahead 135M] [--rounds 3] [--steps 10]
        [--trl-venv FOLDER] [--smollm2 FOLDER] [--set key=value ...]

TRL lives in an environment of its own (`--trl-venv`, made where it is missing, with the pins below); nothing is installed
into this one. Each round runs TRL and then this package, so that both see the same neighbours. A model of random weights
hardly ever ends its answers, so both sample as many tokens; rewards differ within groups, so that every answer trains.
Both make one optimizer step with 16 prompts x 8 answers, in float32 on the CPU. `135M` is SmolLM2-135M-Instruct, the
folder that `launch/quickstart.sh --model smollm2` makes, with 8 prompts x 8 answers of at most 64 tokens in bf16: TRL
holds the weights in bf16, this package fp32 copies besides, and it computes each prompt of a group once, as that command
does without a GPU. Printed: the median of all steps but each run's first two,
and the ratios. TRL's generation is its time in `generate`; ours is `time/rollout_seconds`. With `-ahead` this package
samples with `rollout.max_staleness: 1`; TRL has no such thing in this mode. `cpu`: seconds of processor time per step,
mean of the same steps, of all processes of a run; other work on the machine changes them less than seconds on the clock.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
PINS = ("trl==1.16.0", "torch==2.13.0+cpu", "transformers==5.19.0")
SKIPPED_STEPS = 2
SMOLLM2 = REPOSITORY / "runs/models/smollm2"
# What processes of a run are called here, by a part of their name or command.
KINDS = {
    "sglang::schedul": "scheduler",
    "sglang::detoken": "detokenizer",
    "rollout.server.entry": "HTTP server",
    "train.worker": "ranks",
    "gspo_mega\0serve": "supervisor",
}


class Shape(NamedTuple):
    """One line of the result. `model`: what differs from configs/models/quickstart_dense.json."""

    model: dict[str, int] | None  # None: SmolLM2
    new_tokens: int = 48
    max_staleness: int = 0
    num_prompts: int = 16
    precision: str = "fp32"
    settings: tuple[str, ...] = ()  # of this package's runs


SMALL = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
LARGE = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
SHAPES = {
    "0.83M": Shape(SMALL),
    "25M": Shape(LARGE),
    "0.83M-192": Shape(SMALL, new_tokens=192),
    "25M-192": Shape(LARGE, new_tokens=192),
    "0.83M-ahead": Shape(SMALL, max_staleness=1),
    # As the quickstart does without a GPU.
    "135M": Shape(None, new_tokens=64, num_prompts=8, precision="bf16", settings=("batch.share_prefixes=prompts",)),
}


def score(*, prompt: str, response: str, answer: Any, metadata: dict[str, Any]) -> float:
    """A reward that differs between answers of random weights: the share of digits in the answer."""
    return sum(character.isdigit() for character in response) / max(len(response), 1)


def make_model(folder: Path, shape: Shape, smollm2: Path) -> None:
    """A Hugging Face folder with its tokenizer, of random weights or SmolLM2's, and train.jsonl beside it."""
    sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tools")]
    make_quickstart = importlib.import_module("make_quickstart")
    base = json.loads((REPOSITORY / "configs/models/quickstart_dense.json").read_text(encoding="utf-8"))
    task = make_quickstart.TASKS["arithmetic"]
    if shape.model is None:
        if not (smollm2 / "config.json").exists():
            raise SystemExit(
                f"{smollm2} is not there; launch/quickstart.sh --model smollm2 makes it, or name --smollm2"
            )
        (folder / "model").symlink_to(smollm2.resolve())
    else:
        (folder / "shape.json").write_text(json.dumps(base | shape.model), encoding="utf-8")
        make_quickstart.write_model(folder / "model", folder / "shape.json", 1, task.chat_template)
    make_quickstart.write_data(folder / "data", task, {"train": 4000, "heldout": 16}, 1)


def cpu_seconds(root: int) -> dict[str, float]:
    """Seconds of processor time so far of a process and all below it, by kind of process."""
    parents: dict[int, int] = {}
    used: dict[int, tuple[str, float]] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
            command = (folder / "cmdline").read_text()
        except OSError:  # it has ended
            continue
        fields = rest.split()
        seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        kind = next((known for part, known in KINDS.items() if part in name or part in command), "other")
        parents[int(folder.name)], used[int(folder.name)] = int(fields[1]), (kind, seconds)
    total: dict[str, float] = {}
    for process, (kind, seconds) in used.items():
        while process != root and process in parents:
            process = parents[process]
        if process == root:
            total[kind] = total.get(kind, 0.0) + seconds
    return total


def ours(folder: Path, name: str, shape: Shape, num_steps: int, settings: list[str]) -> list[dict[str, float]]:
    """Seconds of each step and of its rollout, and the run's mean processor time per step."""
    overrides = {
        "run.dir": folder,
        "run.name": name,
        "model.path": folder / "model",
        "data.path": folder / "data/train.jsonl",
        "parallel.expert": 1,
        "precision": shape.precision,
        "batch.prompts_per_step": shape.num_prompts,
        "batch.num_mini_batches": 1,
        "rollout.max_new_tokens": shape.new_tokens,
        "rollout.max_staleness": shape.max_staleness,
        "server.max_total_tokens": 65536,
        "train.num_steps": num_steps,
        "reward": "against_trl:score",
        "eval": "null",
        "metrics.sinks": "[jsonl]",
    }
    command = [sys.executable, "-m", "gspo_mega", "train", str(REPOSITORY / "configs/quickstart.yaml")]
    command += [*(f"{key}={value}" for key, value in overrides.items()), *shape.settings, *settings]
    paths = os.pathsep.join((str(REPOSITORY), str(Path(__file__).parent)))
    log, metrics = folder / f"{name}.log", folder / name / "metrics.jsonl"
    used: dict[int, dict[str, float]] = {}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "PYTHONPATH": paths})
        while process.poll() is None:
            num_done = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            if SKIPPED_STEPS <= num_done < num_steps and num_done not in used:
                used[num_done] = cpu_seconds(process.pid)
            time.sleep(0.05)
    if process.returncode:
        raise SystemExit(log.read_text(errors="replace")[-3000:])
    first, last = min(used), max(used)
    per_step = {kind: (used[last][kind] - used[first].get(kind, 0.0)) / max(last - first, 1) for kind in used[last]}
    shown = "  ".join(f"{kind} {seconds:.2f}" for kind, seconds in sorted(per_step.items()))
    print(f"  {name}: processor seconds per step: {shown}", flush=True)
    steps = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    cpu = sum(per_step.values())
    return [{"step": s["time/step_seconds"], "rollout": s["time/rollout_seconds"], "cpu": cpu} for s in steps]


def trls(folder: Path, name: str, shape: Shape, num_steps: int, python: Path) -> list[dict[str, float]]:
    """Seconds of each step and of its generation, from this file run by TRL's Python."""
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        options = shape._asdict() | {"num_steps": num_steps}
        arguments = ["--be-trl", str(folder), json.dumps(options)]
        code = subprocess.run([str(python), __file__, *arguments], stdout=output, stderr=output, cwd=folder).returncode
    if code:
        raise SystemExit(log.read_text(errors="replace")[-3000:])
    return json.loads((folder / "trl.json").read_text(encoding="utf-8"))


def be_trl(folder: Path, num_steps: int, **shape: Any) -> None:
    """GSPO by TRL's GRPOTrainer, in TRL's own environment. `shape`: the fields of a Shape."""
    # Packages of TRL's environment, which this one does not have.
    datasets: Any = importlib.import_module("datasets")
    trl: Any = importlib.import_module("trl")
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    rows = [json.loads(line) for line in (folder / "data/train.jsonl").read_text(encoding="utf-8").splitlines()]
    prompts = datasets.Dataset.from_list([{"prompt": row["prompt"]} for row in rows])
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype={"fp32": "float32", "bf16": "bfloat16"}[shape["precision"]]
    )
    times: list[dict[str, float]] = []
    generating = 0.0
    generate = model.generate

    def timed(*arguments: Any, **options: Any) -> Any:
        nonlocal generating
        started = time.perf_counter()
        try:
            return generate(*arguments, **options)
        finally:
            generating += time.perf_counter() - started

    class Clock(TrainerCallback):
        started = cpu_started = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            nonlocal generating
            generating, self.started, self.cpu_started = 0.0, time.perf_counter(), time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            cpu = time.process_time() - self.cpu_started
            times.append({"step": time.perf_counter() - self.started, "rollout": generating, "cpu": cpu})

    model.generate = timed
    options = trl.GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=8 * shape["num_prompts"],
        num_generations=8,
        max_completion_length=shape["new_tokens"],
        max_steps=num_steps,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        temperature=1.0,
        beta=0.0,
        importance_sampling_level="sequence",
        epsilon=3e-3,
        epsilon_high=4e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [
            score(prompt="", response=text, answer=None, metadata={}) for text in completions
        ],
        args=options,
        train_dataset=prompts,
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[Clock()],
    )
    trainer.train()
    (folder / "trl.json").write_text(json.dumps(times), encoding="utf-8")


def make_venv(folder: Path) -> Path:
    """The Python of TRL's environment, which is made where it is missing."""
    python = folder / "bin/python"
    if not (folder / "made").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PINS], check=True)
        (folder / "made").touch()
    return python


def main() -> None:
    if sys.argv[1:2] == ["--be-trl"]:
        be_trl(Path(sys.argv[2]), **json.loads(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=3, help="runs of each (default: 3)")
    parser.add_argument("--steps", type=int, default=10, help="steps of each run (default: 10)")
    parser.add_argument("--trl-venv", type=Path, default=Path.home() / ".cache/gspo-mega/trl", metavar="FOLDER")
    parser.add_argument("--smollm2", type=Path, default=SMOLLM2, metavar="FOLDER")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of this package's runs")
    arguments = parser.parse_args()
    python = make_venv(arguments.trl_venv)
    for name in arguments.shapes:
        shape = SHAPES[name]
        with tempfile.TemporaryDirectory(prefix="trl-") as text:
            folder = Path(text)
            make_model(folder, shape, arguments.smollm2)
            steps: dict[str, list[dict[str, float]]] = {"ours": [], "TRL": []}
            for index in range(arguments.rounds):
                steps["TRL"] += trls(folder, f"trl-{index}", shape, arguments.steps, python)[SKIPPED_STEPS:]
                steps["ours"] += ours(folder, f"ours-{index}", shape, arguments.steps, arguments.set)[SKIPPED_STEPS:]
        median = {
            (who, what): statistics.median(step[what] for step in those)
            for who, those in steps.items()
            for what in ("step", "rollout", "cpu")
        }
        for what in ("step", "rollout", "cpu"):
            mine, other = median["ours", what], median["TRL", what]
            print(f"{name}: {what} {mine:.2f} s, TRL {other:.2f} s, ratio {mine / other:.2f}", flush=True)


if __name__ == "__main__":
    main()
