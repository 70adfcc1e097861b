"""Stands for a rank or a server in the launcher's tests: behaves as its first argument, {"rank 0": "hang", ...}, says.

The launcher appends its own arguments; this reads what a real rank (or `serve`) reads of them.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from gspo_mega.base.errors import ConfigError
from gspo_mega.base.run_folder import Attempt, atomic_write_json
from gspo_mega.train.worker import fail


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("behaviours", type=json.loads)
    parser.add_argument("config", nargs="?")
    parser.add_argument("--config", dest="config_option")
    parser.add_argument("--attempt", type=Path)
    parser.add_argument("--command")
    parser.add_argument("--index", type=int)
    args = parser.parse_args()
    attempt = Attempt(args.attempt)
    rank = int(os.environ.get("RANK", -1))
    name = f"server {args.index}" if args.index is not None else f"rank {rank}"
    (attempt.path / f"started {name}").touch()
    globals()[args.behaviours.get(name, "hang")](attempt, rank)


def finish(attempt, rank):
    print("some library's chatter")
    if rank == 0:
        with attempt.console_log.open("a") as console:
            for step in range(3):
                console.write(f"step {step} of rank 0\n")
                console.flush()
                time.sleep(0.15)


def hang(attempt, rank):
    time.sleep(1000)


def deaf(attempt, rank):
    """Ignores SIGTERM, and has a child in a session of its own that ignores it, too."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(
        [
            sys.executable,
            "-S",
            "-c",
            "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)",
        ],
        start_new_session=True,
    )
    time.sleep(1000)


def orphan(attempt, rank):
    """Leaves a child in a session of its own and ends."""
    subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"], start_new_session=True)


def ended_orphans(attempt, rank):
    """Leaves many processes behind that end by themselves a little later, and works on."""
    leave = "import subprocess; [subprocess.Popen(['sleep', '0.3']) for _ in range(100)]"
    subprocess.run([sys.executable, "-S", "-c", leave], check=True)
    (attempt.path / f"left rank {rank}").touch()
    time.sleep(1000)


def wait_for_others(attempt):
    while len(list(attempt.path.glob("started *"))) < 3:
        time.sleep(0.05)


def user_error(attempt, rank):
    wait_for_others(attempt)
    fail(ConfigError("data.path: no such file: nowhere.jsonl"), rank, attempt)


def defect(attempt, rank):
    wait_for_others(attempt)
    try:
        raise ZeroDivisionError("one over nothing")
    except ZeroDivisionError as error:
        fail(error, rank, attempt)


def echo(attempt, rank):
    """What a rank sees of another's end: its own error, a little later, and faster out of the door."""
    while not list(attempt.errors_dir.glob("rank_*.json")):
        time.sleep(0.005)
    fail(RuntimeError("Connection closed by peer"), rank, attempt)


def no_record(attempt, rank):
    print("Fatal: something in a library", flush=True)  # nothing else would: it ends as a crash does
    os._exit(9)


def killed(attempt, rank):
    wait_for_others(attempt)
    os.kill(os.getpid(), signal.SIGKILL)


def stop(attempt, rank):
    """A rank that ends in order once asked to."""
    while attempt.stop_reason() is None:
        time.sleep(0.05)
    sys.exit(75)


def chatty(attempt, rank):
    """Shows lines until it is released."""
    number = 0
    while not (attempt.path / "release").exists():
        number += 1
        with attempt.console_log.open("a") as console:
            console.write(f"line {number} of rank 0\n")
        time.sleep(0.02)
    (attempt.path / "ended in order").touch()


def flood(attempt, rank):
    """Far more than a pipe holds, and waits."""
    with attempt.console_log.open("a") as console:
        console.writelines(f"line {number} of rank 0, {'x' * 80}\n" for number in range(5000))
    time.sleep(1000)


def finish_later(attempt, rank):
    while not (attempt.path / "release").exists():
        time.sleep(0.02)


def defect_on_release(attempt, rank):
    finish_later(attempt, rank)
    defect(attempt, rank)


def stop_slowly(attempt, rank):
    """A save that takes its time."""
    while attempt.stop_reason() is None:
        time.sleep(0.02)
    time.sleep(1.0)
    (attempt.path / "ended in order").touch()
    sys.exit(75)


def save(attempt, step):
    folder = attempt.run_folder
    folder.checkpoints_dir.mkdir(exist_ok=True)
    folder.latest_checkpoint_file.write_text(f"step_{step:08d}\n")


def killed_twice(attempt, rank):
    """Dies in its first two starts, each a step further."""
    wait_for_others(attempt)
    save(attempt, attempt.number)
    if attempt.number < 3:
        os.kill(os.getpid(), signal.SIGKILL)


def killed_at_the_same_place(attempt, rank):
    wait_for_others(attempt)
    save(attempt, 5)
    os.kill(os.getpid(), signal.SIGKILL)


def killed_further_each_time(attempt, rank):
    wait_for_others(attempt)
    save(attempt, attempt.number)
    os.kill(os.getpid(), signal.SIGKILL)


def save_then_die_of_a_stop(attempt, rank):
    save(attempt, 5)
    while attempt.stop_reason() is None:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)


def give_up(attempt, rank):
    """A server that failed too often: says so, once the ranks have started (which the end of the run would prevent)."""
    wait_for_others(attempt)
    error = "SGLang exited with code 1, and it was restarted 5 times already (server.max_restarts)."
    give_up_as(attempt, "server-0", error)


def give_up_as(attempt, name, error):
    atomic_write_json(attempt.server_file(name), {"server_id": name, "state": "failed", "error": error})
    print("the server's last words")
    sys.stdout.flush()
    time.sleep(1000)


def give_up_later(attempt, rank):
    """Server 1, some time after server 0."""
    while not attempt.server_file("server-0").exists() or not (attempt.path / "go on").exists():
        time.sleep(0.02)
    give_up_as(attempt, "server-1", "SGLang exited with code 9")


def finish_when_told(attempt, rank):
    """A rank that trains on with whatever servers are left."""
    while not (attempt.path / "go on").exists():
        time.sleep(0.02)


if __name__ == "__main__":
    main()
