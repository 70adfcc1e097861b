"""How long a run takes from `kill -9` of a rank to its next optimizer step: from the last checkpoint, and from the ranks'
copies in memory (`checkpoint.peer_copies`).

.venv/bin/python tests/benchmarks/restart.py [--rounds 3]

Two ranks train a tiny model on recorded rollouts with `gspo-mega train`; rank 1 is killed after step 8, and the last
checkpoint is of step 5. `first`: seconds until the next start has made an optimizer step; `further`: until the run has made
one that it had not made before. Both end when the step's metrics are written.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "recovery"))

import recovery_support

from gspo_mega.base.run_folder import RunFolder
from gspo_mega.metrics.writer import read_metrics

NUM_STEPS, KILLED_AFTER = 12, 8
KINDS = {"checkpoint": ("checkpoint.peer_copies=0",), "copies": ("checkpoint.peer_copies=1",)}


def rank_1(run: Path) -> int:
    """The process of rank 1 of the run."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words, variables = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"gspo_mega.train.worker" in words and str(run).encode() in words and b"RANK=1" in variables:
            return int(folder.name)
    raise LookupError("rank 1 does not run")


def measure(config: Path, name: str, *overrides: str) -> tuple[float, float]:
    run = RunFolder(config.parent / name / "run")
    places = [f"run.dir={run.path.parent}", "cluster.ranks_per_node=2", "checkpoint.every_steps=5"]
    command = [sys.executable, "-m", "gspo_mega", "train", str(config), *places, "checkpoint.export_every_steps=0"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with (config.parent / f"{name}.log").open("w") as log:
        running = subprocess.Popen([*command, *overrides], stdout=log, stderr=log, env=environment, cwd=config.parent)
        while not run.metrics_file.exists() or len(run.metrics_file.read_bytes().splitlines()) < KILLED_AFTER:
            assert running.poll() is None, Path(log.name).read_text()
            time.sleep(0.01)
        os.kill(rank_1(run.path), signal.SIGKILL)
        killed, trained = time.time(), read_metrics(run.metrics_file)[-1]["step"]
        assert running.wait() == 0, Path(log.name).read_text()
    lines = [line for line in read_metrics(run.metrics_file) if line["time"] > killed]
    first = min(line["time"] for line in lines)
    further = min(line["time"] for line in lines if line["step"] > trained)
    return first - killed, further - killed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    recovery_support.NUM_STEPS = NUM_STEPS
    with tempfile.TemporaryDirectory() as folder:
        config = recovery_support.make_recording(Path(folder))
        found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
        for number in range(rounds):
            for kind, overrides in KINDS.items():
                found[kind].append(measure(config, f"{kind}-{number}", *overrides))
                first, further = found[kind][-1]
                print(f"{kind:<10} first {first:5.1f} s, further {further:5.1f} s", flush=True)
        for kind, times in found.items():
            first, further = (statistics.median(column) for column in zip(*times, strict=True))
            print(f"median {kind:<10} first {first:5.1f} s, further {further:5.1f} s")


if __name__ == "__main__":
    main()
