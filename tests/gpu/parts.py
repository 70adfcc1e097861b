#!/usr/bin/env python3
"""The parts of `tests/gpu/run.sh`: what each runs, its time limit, and what of it runs on a CPU.

    python tests/gpu/parts.py --list
    python tests/gpu/parts.py [--dry] [PART ...]

Owns the order, the limits and the summary. Every part is a program of its own that ends within ten minutes, ends with
77 where it cannot run here and says why, and adds its rows to $OUT/PART.md (`gpu_engine.finish`). Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Below ten minutes, so that one command of a machine that is lent for ten can run any part.
MOST_SECONDS = 590
_CPU = ("--device", "cpu")


@dataclass(frozen=True)
class Part:
    """`file`: in this folder. `dry`: arguments for a CPU, None where nothing of the part runs there. `is_rank`: the
    process gets a rank's variables; one that starts `gspo-mega` or servers must not, as those set their own.
    """

    what: str
    file: str
    seconds: int
    arguments: tuple[str, ...] = ()
    dry: tuple[str, ...] | None = None
    is_rank: bool = True


_SHORT = ("--shapes", "tiny-moe", "--longest", "32")
_FEW = ("--shapes", "tiny-moe", "--tokens", "32", "--packs", "2", "--times", "1")
# In the order of a GPU's first day (docs/gpu_first_day.md): what is most likely to fail comes first.
PARTS = {
    "traced": Part(
        "memory of each phase against what the trace predicted",
        "traced.py",
        180,
        ("--cases", "dense,shared,experts"),
        dry=("--cases", "tiny"),
    ),
    "traced_fp8": Part(
        "the same of FP8 and of adapters", "traced.py", 300, ("--cases", "fp8,adapters"), dry=("--cases", "tiny")
    ),
    "run_r3": Part(
        "gspo-mega train with our server entry, R3 and publishes; tokens/s, GB/s, mismatch",
        "whole_run.py",
        MOST_SECONDS,
        dry=("--shape", "tiny", "--steps", "2"),
        is_rank=False,
    ),
    "publish": Part(
        "weights to one server: by disk, and with two GPUs by NCCL; GB/s",
        "publish_once.py",
        MOST_SECONDS,
        dry=("--shape", "tiny"),
        is_rank=False,
    ),
    "rollout": Part("SGLang's own server against the trainer's log-probs", "rollout.py", 480, is_rank=False),
    "budget": Part(
        "gspo-mega mismatch: where the mismatch comes from",
        "budget_run.py",
        MOST_SECONDS,
        dry=("--shape", "tiny"),
        is_rank=False,
    ),
    "resume": Part("save, a new engine, load, go on: with each recipe", "resumed_recipes.py", MOST_SECONDS, dry=_SHORT),
    "log_probs": Part(
        "log-probs of each precision against fp32",
        "log_probs.py",
        240,
        dry=("--shapes", "tiny-dense,tiny-moe", "--longest", "48"),
    ),
    "training": Part(
        "20 optimizer steps of each precision against fp32",
        "training.py",
        300,
        dry=(*_SHORT, "--steps", "6", "--rate", "3e-4"),
    ),
    "shared": Part(
        "packs that share prompts against whole rows: FlexAttention",
        "shared.py",
        480,
        dry=("--shapes", "tiny-dense", "--prompt", "32", "--response", "16", "--times", "1"),
    ),
    "products": Part("Transformer Engine's linear layer, every recipe against bf16", "products.py", 120),
    "head": Part(
        "memory and time of the LM head's log-probs at 32k tokens",
        "head_memory.py",
        180,
        dry=("--hidden", "32", "--rows", "64", "--chunks", "16,32"),
    ),
    "throughput_dense": Part(
        "tokens/s, MFU and memory of a dense 4B", "throughput.py", MOST_SECONDS, ("--shapes", "large-dense"), _FEW
    ),
    "throughput_moe": Part(
        "the same of a mixture of 128 experts", "throughput.py", MOST_SECONDS, ("--shapes", "large-moe"), _FEW
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/gpu/run.sh", description="Measure one machine's GPUs, part by part.")
    parser.add_argument("parts", nargs="*", metavar="PART", help="parts to run (default: all)")
    parser.add_argument("--list", action="store_true", help="print the parts and their time limits")
    parser.add_argument("--dry", action="store_true", help="on a CPU, with tiny sizes: all but a GPU's own code")
    given = parser.parse_args()
    # Whoever ends this program ends the part that runs, too, which has a session of its own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(124))
    unknown = [name for name in given.parts if name not in PARTS]
    if unknown:
        print(f"tests/gpu/run.sh: '{unknown[0]}' is no part; there are: {' '.join(PARTS)}", file=sys.stderr)
        return 2
    if given.list:
        for name, part in PARTS.items():
            print(f"{name:<17} {part.seconds:4d} s  {part.what}{'' if part.dry else ' (only on a GPU)'}")
        return 0
    if not given.dry and subprocess.run([sys.executable, "-c", _HAS_GPU]).returncode:
        print("tests/gpu/run.sh: skipped: no CUDA device; with --dry the parts run on a CPU, with tiny sizes")
        return 77
    environment, of_a_rank = _environments(given.dry)
    lines, worst = [], 0
    for name in given.parts or PARTS:
        part, began = PARTS[name], time.monotonic()
        print(f"\n== {name}", flush=True)
        code = _run(name, part, of_a_rank if part.is_rank else environment, given.dry)
        said = {0: "passed", 77: "skipped", 124: f"FAILED: longer than {part.seconds} s"}.get(code, "FAILED")
        worst = worst or int(code not in (0, 77))
        lines.append(f"{name:<17} {time.monotonic() - began:4.0f} s  {said}")
    print("\n== tests/gpu/run.sh", *lines, sep="\n")
    return worst


_HAS_GPU = "import torch, sys; sys.exit(not torch.cuda.is_available())"


def _environments(dry: bool) -> tuple[dict[str, str], dict[str, str]]:
    """Of a part that starts processes of its own, and of one that is a rank."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if dry else {})}
    if dry:
        return environment, environment
    told = subprocess.run(
        [sys.executable, "-m", "gspo_mega.train.gpu_variables"], capture_output=True, text=True, check=True
    )
    words = [line.removeprefix("export ").split("=", 1) for line in told.stdout.splitlines()]
    return environment, {**environment, **{name: "".join(shlex.split(value)) for name, value in words}}


def _run(name: str, part: Part, environment: dict[str, str], dry: bool) -> int:
    arguments = part.arguments
    if dry:
        if part.dry is None:
            print("skipped: nothing of it runs without a GPU")
            return 77
        arguments = (*_CPU, *part.dry)
    command = [sys.executable, str(HERE / part.file), *arguments]
    process = subprocess.Popen(command, cwd=ROOT, env={**environment, "PART": name}, start_new_session=True)
    try:
        return process.wait(part.seconds)
    except subprocess.TimeoutExpired:
        return 124
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The part, which ends its servers itself where it has the time (`gpu_engine.arguments`), and then its session."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
