"""How long a run takes from `kill -9` of a rank to its next optimizer step: from the last checkpoint, and from the ranks'
copies in memory (`checkpoint.peer_copies`), in new processes and in standbys (`train.standby_processes`).

.venv/bin/python tests/benchmarks/restart.py [--rounds 3] [--kinds copies checkpoint ...]

Two ranks train a tiny model on recorded rollouts with `gspo-mega train`. After step 8 both are stopped, until the standbys
are ready, and rank 1 is killed; the last checkpoint is of step 5. `first`: seconds until the next start has made an
optimizer step; `further`: until the run has made one that it had not made before. Both end when the step's metrics are
written. `processor`: user and system seconds of each of the new start's ranks until then, without those of a standby
before the kill; other work on the machine hardly changes it. All runs have to end alike, to the bit.
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
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "recovery"))

import recovery_support

from gspo_mega.base.run_folder import RunFolder, read_json
from gspo_mega.metrics.writer import read_metrics
from gspo_mega.verify.drill.outcome import outcome

NUM_RANKS, NUM_STEPS, KILLED_AFTER = 2, 12, 8
STANDBYS = "train.standby_processes=true"
KINDS = {
    "checkpoint": ("checkpoint.peer_copies=0",),
    "copies": ("checkpoint.peer_copies=1",),
    "checkpoint+standbys": ("checkpoint.peer_copies=0", STANDBYS),
    "copies+standbys": ("checkpoint.peer_copies=1", STANDBYS),
}


def processor_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ranks_of(run: RunFolder) -> list[int]:
    """The processes of the ranks of the run's newest start."""
    attempt = run.latest_attempt()
    assert attempt is not None
    return [read_json(attempt.beat_file(rank))["pid"] for rank in range(NUM_RANKS)]


def measure(config: Path, name: str, *overrides: str) -> tuple[float, float, float]:
    run = RunFolder(config.parent / name / "run")
    places = [f"run.dir={run.path.parent}", f"cluster.ranks_per_node={NUM_RANKS}", "checkpoint.every_steps=5"]
    command = [sys.executable, "-m", "gspo_mega", "train", str(config), *places, "checkpoint.export_every_steps=0"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    out = config.parent / f"{name}.log"
    with out.open("w") as log:
        running = subprocess.Popen([*command, *overrides], stdout=log, stderr=log, env=environment, cwd=config.parent)

        def wait_until(true: Callable[[], bool]) -> None:
            while not true():
                assert running.poll() is None, out.read_text()
                time.sleep(0.01)

        wait_until(lambda: run.metrics_file.exists() and run.metrics_file.read_bytes().count(b"\n") >= KILLED_AFTER)
        ranks = ranks_of(run)
        for rank in ranks:
            os.kill(rank, signal.SIGSTOP)
        spent: dict[int, float] = {}
        if STANDBYS in overrides:
            wait_until(lambda: " are ready to become" in out.read_text())
            attempt = run.latest_attempt()
            assert attempt is not None
            prepared = [read_json(attempt.standby_ready_file(rank))["pid"] for rank in range(NUM_RANKS)]
            spent = {pid: processor_seconds(pid) for pid in prepared}
        trained = read_metrics(run.metrics_file)[-1]["step"]
        os.kill(ranks[0], signal.SIGCONT)
        os.kill(ranks[1], signal.SIGKILL)
        killed = time.time()

        def new_lines() -> list[dict]:
            return [line for line in read_metrics(run.metrics_file) if line["time"] > killed]

        wait_until(lambda: any(line["step"] > trained for line in new_lines()))
        used = sum(processor_seconds(pid) - spent.get(pid, 0.0) for pid in ranks_of(run)) / NUM_RANKS
        lines = new_lines()
        assert running.wait() == 0, out.read_text()
    assert ("ranks 0, 1 started in processes that had imported everything" in out.read_text()) == bool(spent)
    first = min(line["time"] for line in lines)
    further = min(line["time"] for line in lines if line["step"] > trained)
    return first - killed, further - killed, used


def shown(what: str, times: Sequence[float]) -> str:
    first, further, used = times
    return f"{what:<27} first {first:5.1f} s, further {further:5.1f} s, processor {used:5.2f} s per rank"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    args = parser.parse_args()
    recovery_support.NUM_STEPS = NUM_STEPS
    with tempfile.TemporaryDirectory() as folder:
        config = recovery_support.make_recording(Path(folder))
        found: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in args.kinds}
        want: dict | None = None
        for number in range(args.rounds):
            for kind in args.kinds:
                name = f"{kind}-{number}"
                found[kind].append(measure(config, name, *KINDS[kind]))
                end = outcome(RunFolder(config.parent / name / "run"))
                want = end if want is None else want
                differing = [part for part in want.keys() | end.keys() if want.get(part) != end.get(part)]
                assert differing == [], f"{name} ended otherwise than the first run: {differing}"
                print(shown(kind, found[kind][-1]), flush=True)
        for kind, times in found.items():
            print(shown(f"median {kind}", [statistics.median(column) for column in zip(*times, strict=True)]))


if __name__ == "__main__":
    main()
