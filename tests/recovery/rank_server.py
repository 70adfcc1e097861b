"""Runs ranks as children of a process that has imported everything: a rank is then there in a tenth of a second.

Reads a JSON list of jobs a line, each {"module", "arguments", "environment", "kill_after", "watch"}; calls `main(arguments)` of each
module in a forked child with a process group of its own, and kills one after `kill_after` seconds where that is a number; writes the
list of exit codes, or minus the signal that ended one. What a child left running is killed. `watch`: see `watch.py`.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading


def serve() -> None:
    import warnings

    warnings.filterwarnings("ignore")
    for module in ("gspo_mega.engine", "gspo_mega.runtime.loop", "gspo_mega.runtime.worker", "transformers"):
        importlib.import_module(module)
    protocol = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a rank's own output must not mix with the answers
    for line in sys.stdin:
        jobs = json.loads(line)
        pids = [_start(job) for job in jobs]
        timers = [
            threading.Timer(job["kill_after"], os.kill, (pid, signal.SIGKILL)) for job, pid in zip(jobs, pids) if job.get("kill_after") is not None
        ]
        for timer in timers:
            timer.start()
        codes: dict[int, int] = {}
        while len(codes) < len(pids):
            pid, status = os.wait()
            codes[pid] = os.waitstatus_to_exitcode(status)
            for other in pids:  # as the supervisor does: one rank's end by force is the end of all
                if codes[pid] not in (0, 75) and other not in codes:
                    os.killpg(other, signal.SIGKILL)
            _end_group(pid)
        for timer in timers:
            timer.cancel()
            timer.join()
        protocol.write(json.dumps([codes[pid] for pid in pids]) + "\n")
        protocol.flush()


def _start(job: dict) -> int:
    pid = os.fork()
    if pid:
        try:
            os.setpgid(pid, pid)
        except PermissionError:
            return pid  # the child did it itself
        return pid
    try:
        os.setpgid(0, 0)
        os.environ.update(job["environment"])
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
