#!/usr/bin/env -S python3 -I
"""Stands in for the Python of ranks and servers in a job: no model, a step every third of a second, a stop request
heeded.

Ranks other than rank 0 wait for its end, as in a collective that never returns when a peer is lost. The variable
STAND_IN may say `raise R` or `kill R`: rank R fails with a record, or ends as the machine's out-of-memory killer ends
it; with `once R` so in the first attempt alone, after two steps. With `hold N` rank 0 gets no further than step N before
the file `go` is in the run's folder. STAND_IN_SERVER names a server that gives up, one of a reward model as sums_0.
"""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path


def option(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def write(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text)
    beside.rename(path)


def rank(attempt: Path) -> int:
    number = int(os.environ["SLURM_PROCID"])
    (attempt / "logs" / f"rank_{number}.log").touch()
    (attempt / f"gpus_rank_{number}").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    what, _, who = os.environ.get("STAND_IN", "").partition(" ")
    if what == "once" and int(who) == number and attempt.name == "0001":
        latest = attempt.parent.parent / "checkpoints" / "latest"
        while not latest.exists() or latest.read_text() != "step_00000002" or not standbys_are_ready(attempt):
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    if what in ("raise", "kill") and int(who) == number:
        time.sleep(0.5)
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        record = {
            "rank": number,
            "type": "E",
            "text": "x",
            "traceback": "Traceback\n  File x\nValueError: of a test",
            "time": 1.0,
        }
        write(
            attempt / "errors" / f"rank_{number}.json", json.dumps({**record, "is_user_error": False, "exit_code": 7})
        )
        return 7
    over = attempt / "over"
    if number > 0:
        while not over.exists():
            time.sleep(0.1)
        return int(over.read_text())
    code = steps(attempt)
    write(over, str(code))
    return code


def standbys_are_ready(attempt: Path) -> bool:
    """Those of all ranks, if the run has them."""
    if "standby_processes: true" not in (attempt / "config.resolved.yaml").read_text():
        return True
    return len(list(attempt.glob("standby/ready_*.json"))) == int(os.environ["SLURM_NTASKS"])


def standby(attempt: Path) -> int:
    """Wait to be told to become a rank of another attempt."""
    number = os.environ["SLURM_PROCID"]
    (attempt / "standby").mkdir(exist_ok=True)
    write(attempt / "standby" / f"ready_{number}.json", json.dumps({"seconds": 1.0, "resident_bytes": 2**29}))
    if not (line := sys.stdin.readline()):
        return 0
    order = json.loads(line)
    os.environ.update(order["environment"])
    sys.argv = [sys.argv[0], *order["arguments"]]
    attempt = Path(option("--attempt"))
    (attempt / "standby").mkdir(exist_ok=True)
    write(attempt / "standby" / f"start_{number}.json", json.dumps({"used": True, "why": None}))
    return rank(attempt)


def stands_still(attempt: Path, step: int) -> bool:
    """Whether rank 0 gets no further for now."""
    what, _, which = os.environ.get("STAND_IN", "").partition(" ")
    if what == "once":  # in a collective with the rank that is killed
        return attempt.name == "0001" and step == 2
    return what == "hold" and step == int(which) and not (attempt.parent.parent / "go").exists()


def steps(attempt: Path) -> int:
    run = attempt.parent.parent
    (last,) = re.findall(r"num_steps: (\d+)", (attempt / "config.resolved.yaml").read_text().split("certify:")[0])
    done = run / "checkpoints" / "latest"
    done.parent.mkdir(exist_ok=True)
    step = int(done.read_text()[5:]) if done.exists() else 0
    with (attempt / "console.log").open("a", buffering=1) as console:
        if step:
            console.write(f"resumed from step_{step:08d}\n")
        while step < int(last):
            time.sleep(0.3)
            if (attempt / "stop").exists():
                write(attempt / "result.json", json.dumps({"stopped": (attempt / "stop").read_text().strip()}))
                return 75
            if stands_still(attempt, step):
                continue
            step += 1
            console.write(f"step {step:>{len(last)}}/{last}\n")
            with (run / "metrics.jsonl").open("a") as metrics:
                metrics.write(json.dumps({"step": step, "time": time.time()}) + "\n")
            write(done, f"step_{step:08d}")
    return 0


def server(attempt: Path) -> int:
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: sys.exit(0))
    index = option("--index")
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    model = option("--reward-model") if "--reward-model" in sys.argv else None
    name = f"{model or 'server'}_{index}"
    (attempt / f"gpus_{name}").write_text(gpus)
    if model is not None:
        attempt = attempt / "reward_models" / model
    if "--hosts" in sys.argv:
        part = int(os.environ["SLURM_PROCID"])
        there = {"gpus": gpus, "host": option("--hosts").split(",")[part]}
        write(attempt / f"part_{index}_{part}", json.dumps({**there, "node": os.environ["SLURMD_NODENAME"]}))
        while part > 0:
            time.sleep(0.5)
        sys.argv += ["--host", there["host"]]
    entry = {
        "server_id": f"server-{index}",
        "address": f"http://{option('--host')}:1",
        "pid": os.getpid(),
        "state": "ready",
    }
    entry |= {"generation": 1, "weight_version": 0, "heartbeat": time.time()}
    write(attempt / "servers" / f"server-{index}.json", json.dumps(entry))
    if os.environ.get("STAND_IN_SERVER") == (index if model is None else name):
        time.sleep(0.5)
        write(
            attempt / "servers" / f"server-{index}.json",
            json.dumps({**entry, "state": "failed", "error": "it crashed too often"}),
        )
        print("crashed", flush=True)
        return 7
    try:
        while True:
            time.sleep(0.5)
    finally:
        write(attempt / "servers" / f"server-{index}.json", json.dumps({**entry, "state": "stopped"}))


does = server if "serve" in sys.argv else standby if "gspo_mega.train.standby" in sys.argv else rank
sys.exit(does(Path(option("--attempt"))))
