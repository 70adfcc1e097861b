"""A rank in a fork of a process that has imported what ranks need (`forked_workers.py`), under a rank's title."""

from __future__ import annotations

import sys

import setproctitle

from gspo_mega.train import worker

setproctitle.getproctitle()  # it finds the place of the title by variables that a fork replaces


def main(words: list[str]) -> None:
    setproctitle.setproctitle(" ".join([sys.executable, "-m", "gspo_mega.train.worker", *words]))
    worker.main(words)
