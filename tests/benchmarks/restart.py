"""How long a run takes from `kill -9` of a rank to its next optimizer step: from the last checkpoint, and from the ranks'
copies in memory (`checkpoint.peer_copies`), in new processes and in standbys (`train.standby_processes`); and of a run that
samples, with a server that starts anew or is kept (`train.keep_servers`).

.venv/bin/python tests/benchmarks/restart.py [--rounds 3] [--kinds copies checkpoint ...]

Two ranks train a tiny model on recorded rollouts with `gspo-mega train`. After step 8 both are stopped, until the standbys
are ready, and rank 1 is killed; the last checkpoint is of step 5. `first`: seconds until the next start has made an
optimizer step; `further`: until the run has made one that it had not made before. Both end when the step's metrics are
written. `processor`: user and system seconds of each of the new start's ranks until then, without those of a standby
before the kill; other work on the machine hardly changes it. All runs on recorded rollouts have to end alike, to the bit.

The kinds `server` sample from one SGLang server. Of what they wait for is shown: seconds until the next start `began`, until
its server was ready (`served`), and the server's own processor seconds from the kill to the step (`server`).
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

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("recovery", "integration")]

import recovery_support
from run_support import environment as users_environment
from run_support import make_quickstart

from gspo_mega.base import processes
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
    "server": ("checkpoint.peer_copies=1", STANDBYS),
    "server kept": ("checkpoint.peer_copies=1", STANDBYS, "train.keep_servers=true"),
}
SAMPLES = (
    "train.from_rollouts=null",
    "publish.method=distributed",
    "reward.functions=[{function: 'run_support:distinct'}]",
    "reward.try_first=false",
    "server.max_total_tokens=4096",
    "data.max_prompt_tokens=64",
    "batch.micro_batch_tokens=256",
    "journal.keep_last=null",
)


def processor_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ranks_of(run: RunFolder) -> list[int]:
    """The processes of the ranks of the run's newest start."""
    attempt = run.latest_attempt()
    assert attempt is not None
    return [read_json(attempt.beat_file(rank))["pid"] for rank in range(NUM_RANKS)]


def server_processes(run: RunFolder) -> list[int]:
    """The processes of the server of the run's newest start: `gspo-mega serve` and all of SGLang's."""
    attempt = run.latest_attempt()
    record = None if attempt is None else read_json(attempt.server_file("server-0"))
    return [] if record is None else [record["pid"], *processes.living_below(record["pid"])]


def measure(config: Path, name: str, *overrides: str) -> tuple[float, ...]:
    """(first, further, processor), and of a run that samples also (began, served, server)."""
    samples = "train.from_rollouts=null" in overrides
    run = RunFolder(config.parent / name / "run")
    places = [f"run.dir={run.path.parent}", f"cluster.ranks_per_node={NUM_RANKS}", "checkpoint.every_steps=5"]
    command = [sys.executable, "-m", "gspo_mega", "train", str(config), *places, "checkpoint.export_every_steps=0"]
    environment = users_environment()
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
        before = run.latest_attempt()
        assert before is not None
        serving = {pid: processor_seconds(pid) for pid in server_processes(run)}
        os.kill(ranks[0], signal.SIGCONT)
        os.kill(ranks[1], signal.SIGKILL)
        killed = time.time()

        def new_lines() -> list[dict]:
            return [line for line in read_metrics(run.metrics_file) if line["time"] > killed]

        reached: list[float] = []
        if samples:
            after = run.attempt(before.number + 1)
            wait_until(after.state_file.exists)
            reached.append(time.time() - killed)
            wait_until(lambda: (read_json(after.server_file("server-0")) or {}).get("state") == "ready")
            reached.append(time.time() - killed)
        wait_until(lambda: any(line["step"] > trained for line in new_lines()))
        if samples:
            reached.append(sum(processor_seconds(pid) - serving.get(pid, 0.0) for pid in server_processes(run)))
        used = sum(processor_seconds(pid) - spent.get(pid, 0.0) for pid in ranks_of(run)) / NUM_RANKS
        lines = new_lines()
        assert running.wait() == 0, out.read_text()
    assert ("ranks 0, 1 started in processes that had imported everything" in out.read_text()) == bool(spent)
    first = min(line["time"] for line in lines)
    further = min(line["time"] for line in lines if line["step"] > trained)
    assert (" 1 of 1 kept, ready after " in out.read_text()) == ("train.keep_servers=true" in overrides)
    return first - killed, further - killed, used, *reached


def shown(what: str, times: Sequence[float]) -> str:
    first, further, used, *reached = times
    text = f"{what:<27} first {first:5.1f} s, further {further:5.1f} s, processor {used:5.2f} s per rank"
    if not reached:
        return text
    began, served, server = reached
    return f"{text}; began {began:4.1f} s, served {served:5.1f} s, server {server:5.2f} s of a processor"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    args = parser.parse_args()
    recovery_support.NUM_STEPS = NUM_STEPS
    with tempfile.TemporaryDirectory() as folder:
        config = recovery_support.make_recording(Path(folder))
        found: dict[str, list[tuple[float, ...]]] = {kind: [] for kind in args.kinds}
        sampling: list[str] = []
        if any(kind.startswith("server") for kind in args.kinds):
            files = make_quickstart(Path(folder) / "files")
            sampling = [*SAMPLES, f"model.path={files / 'model'}", f"data.path={files / 'data/train.jsonl'}"]
        want: dict | None = None
        for number in range(args.rounds):
            for kind in args.kinds:
                name = f"{kind}-{number}".replace(" ", "-")
                samples = sampling if kind.startswith("server") else []
                found[kind].append(measure(config, name, *samples, *KINDS[kind]))
                if not samples:
                    end = outcome(RunFolder(config.parent / name / "run"))
                    want = end if want is None else want
                    differing = [part for part in want.keys() | end.keys() if want.get(part) != end.get(part)]
                    assert differing == [], f"{name} ended otherwise than the first run: {differing}"
                print(shown(kind, found[kind][-1]), flush=True)
        for kind, times in found.items():
            print(shown(f"median {kind}", [statistics.median(column) for column in zip(*times, strict=True)]))


if __name__ == "__main__":
    main()
