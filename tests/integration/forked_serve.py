"""`gspo-mega serve` in a fork of a process that has imported SGLang (`forked_workers.py`), for tests of what a server
answers.

The server that it starts is a fork of it in turn. It is the same process tree as without forks, and each process has the
same arguments, environment and output; only nothing is imported again. How a server starts is shown by those that are
started as users start them (`Serve` without `forked`).
"""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import numpy as np
import setproctitle

from gspo_mega.cli.main import main as command_line
from gspo_mega.rollout.server import entry, process

_ENTRY = ["-m", "gspo_mega.rollout.server.entry"]
_POLL_SECONDS = 0.02
setproctitle.getproctitle()  # it finds the place of the title by variables that a fork replaces


class _Fork:
    """What a supervisor needs of a `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(_POLL_SECONDS)
        return code


def _as_new_process(title: list[str]) -> None:
    """Drop what a process would not have that was started and not forked."""
    setproctitle.setproctitle(" ".join([sys.executable, *title]))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    logging.root.handlers.clear()
    tempfile.tempdir = None  # TMPDIR is another
    random.seed()
    np.random.seed()


def _start_group(command: list[str], *, log: Path, environment: dict[str, str]) -> _Fork | subprocess.Popen:
    """`start_group` of process.py, which this replaces."""
    if command[1:3] != _ENTRY:
        return _started_group(command, log=log, environment=environment)
    pid = os.fork()
    if pid:
        return _Fork(pid)
    try:
        os.setsid()
        with log.open("ab") as output, open(os.devnull, "rb") as nothing:
            for file, number in ((nothing, 0), (output, 1), (output, 2)):
                os.dup2(file.fileno(), number)
        os.environ.clear()
        os.environ.update(environment)
        _as_new_process(command[1:])
        # As the entry sets them when it is imported.
        os.environ.update(_of_import)
        sys.argv = command[2:]
        entry.main()
    except SystemExit as ended:
        os._exit(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


_started_group = process.start_group
_of_import = {
    name: os.environ[name]
    for name in (
        "OMP_NUM_THREADS",
        "HF_HUB_OFFLINE",
        "TOKENIZERS_PARALLELISM",
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION",
        "SGLANG_USE_CPU_ENGINE",
    )
}


def main(words: list[str]) -> int:
    """`gspo-mega serve` with these words."""
    process.start_group = _start_group
    _as_new_process(["-m", "gspo_mega", "serve", *words])
    return command_line(["serve", *words])
