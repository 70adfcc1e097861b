"""Runs ranks as children of a process that has imported everything: a rank is then there in a tenth of a second.

Reads a JSON list of jobs a line, each {"module", "arguments", "environment", "kill_after", "watch"}; calls
`main(arguments)` of each module in a forked child with a process group of its own, and kills one after `kill_after`
seconds where that is a number; writes {"codes": exit codes, or minus the signal that ended one; "left": what of a
child's processes still lived a while after it, in words}. What a child left running is killed then. `watch`: see
`cli/watch.py`.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
import uuid
from pathlib import Path

from gspo_mega.base import processes
from gspo_mega.base.garbage import uncollected

# Processes end by the kernel's hand at once; one that just begins asks for that a moment later.
LEFT_SECONDS = 20.0
MARKER = "GSPO_TEST_ATTEMPT"


def serve() -> None:
    import warnings

    warnings.filterwarnings("ignore")
    with uncollected():
        tokenizers = "transformers.models.auto.tokenization_auto"
        for module in ("gspo_mega.engine", "gspo_mega.train.loop", "gspo_mega.train.worker", tokenizers):
            importlib.import_module(module)
    protocol = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a rank's own output must not mix with the answers
    for line in sys.stdin:
        jobs = json.loads(line)
        marker = str(uuid.uuid4())
        pids = [_start(job, marker) for job in jobs]
        timers = [
            threading.Timer(job["kill_after"], os.kill, (pid, signal.SIGKILL))
            for job, pid in zip(jobs, pids)
            if job.get("kill_after") is not None
        ]
        for timer in timers:
            timer.start()
        codes: dict[int, int] = {}
        while len(codes) < len(pids):
            pid, status = os.wait()
            codes[pid] = os.waitstatus_to_exitcode(status)
            for other in pids:  # as the supervisor does: one rank's end by force is the end of all
                if codes[pid] not in (0, 75) and other not in codes:
                    os.kill(other, signal.SIGKILL)  # it alone: what it has forked has to end with it
        left = _left_running(pids, marker)
        for pid in pids:
            _end_group(pid)
        for timer in timers:
            timer.cancel()
            timer.join()
        protocol.write(json.dumps({"codes": [codes[pid] for pid in pids], "left": left}) + "\n")
        protocol.flush()


def _left_running(pids: list[int], marker: str) -> list[str]:
    """Processes of these ranks that do not end: in a rank's group, or started by one in a group of its own."""
    deadline = time.monotonic() + LEFT_SECONDS
    while (left := _living(pids, marker)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def _living(pids: list[int], marker: str) -> list[str]:
    found = []
    for pid in processes.parents():
        try:
            folder = Path("/proc", str(pid))
            if os.getpgid(pid) in pids or marker.encode() in (folder / "environ").read_bytes():
                found.append(
                    f"{pid}: {(folder / 'cmdline').read_bytes().decode(errors='replace')[:200]}, waiting in"
                    f" {(folder / 'wchan').read_text()}"
                )
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def _start(job: dict, marker: str) -> int:
    pid = os.fork()
    if pid:
        try:
            os.setpgid(pid, pid)
        except PermissionError:
            return pid  # the child did it itself
        return pid
    try:
        os.setpgid(0, 0)
        os.environ.update(job["environment"], **{MARKER: marker})
        if job.get("watch"):
            importlib.import_module("watch").start(**job["watch"])
        importlib.import_module(job["module"]).main(job["arguments"])
        os._exit(0)
    except BaseException as error:
        import traceback

        traceback.print_exc()
        os._exit(getattr(error, "exit_code", 99))


def _end_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    serve()
