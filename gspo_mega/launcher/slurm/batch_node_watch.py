"""Watch the batch node of a job from another of its nodes.

    python -I batch_node_watch.py JOB BATCH_NODE STATE_FILE LOG

A job that may go on without a node (--no-kill) also goes on without the node of its batch script, where the supervisor
runs. When that node is lost, this process makes Slurm queue the job again. If Slurm does not answer, it asks again for
ten minutes, as the supervisor does. It runs as a file, so it uses only the standard library.
"""

import os
import re
import subprocess
import sys
import time

_LOOK_SECONDS = 2.0
# The supervisor writes its file every few seconds; a shared folder may show that late.
_SILENCE_SECONDS = 20.0
_ASK_SECONDS = 60.0
# How long to ask again while Slurm's controller is restarted or moved.
_NO_ANSWER_SECONDS = 600.0


def main() -> None:
    job, batch_node, state_file, log = sys.argv[1:]
    seen, since, unanswered = None, time.monotonic(), None
    while True:
        time.sleep(_LOOK_SECONDS)
        now = _changed(state_file)
        if now != seen:
            seen, since, unanswered = now, time.monotonic(), None
        elif time.monotonic() - since > _SILENCE_SECONDS:
            # A silent supervisor is only a reason to ask Slurm, whose answer decides: the folder may just be slow.
            try:
                if _requeued_if_lost(job, batch_node, log):
                    return
            except (OSError, subprocess.SubprocessError) as error:
                if unanswered is None:
                    unanswered = time.monotonic()
                    _log(
                        log,
                        f"Slurm does not answer; asking again for {_NO_ANSWER_SECONDS / 60:.0f} min"
                        f" ({_described(error)})",
                    )
                elif time.monotonic() - unanswered > _NO_ANSWER_SECONDS:
                    _log(
                        log,
                        f"Slurm did not answer for {_NO_ANSWER_SECONDS / 60:.0f} min ({_described(error)}): the watch"
                        f" over {batch_node} ends",
                    )
                    raise SystemExit(1) from error
            else:
                since, unanswered = time.monotonic(), None


def _requeued_if_lost(job: str, batch_node: str, log: str) -> bool:
    """Requeue the job if the batch node has left it. Returns whether it has. Raises the errors of the calls of
    Slurm.
    """
    if batch_node in _nodes_of(job):
        return False
    # Log first: Slurm ends this process with the rest of the job.
    _log(log, f"{batch_node}, where the supervisor ran, is lost: job {job} is queued again")
    _output("scontrol", "requeue", job)
    return True


def _log(log: str, line: str) -> None:
    """Append a line to the log unless it is there. (Standard output would be written by srun on the lost node.)"""
    try:
        with open(log, "a+", encoding="utf-8") as file:
            file.seek(0)
            if line + "\n" not in file.read():
                file.write(line + "\n")
    except OSError:
        pass  # a lost line must not prevent the requeue


def _changed(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def _nodes_of(job: str) -> set[str]:
    shown = _output("scontrol", "show", "job", "-o", job)
    lists = re.findall(r"(?<!\w)NodeList=(\S+)", shown)
    return {
        name for nodes in lists if nodes != "(null)" for name in _output("scontrol", "show", "hostnames", nodes).split()
    }


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_ASK_SECONDS).stdout


def _described(error: Exception) -> str:
    return (getattr(error, "stderr", None) or str(error)).strip()


if __name__ == "__main__":
    main()
