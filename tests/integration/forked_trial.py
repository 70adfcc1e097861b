"""The trial of a run's inputs in a fork of a process that has imported what ranks need (`forked_workers.py`)."""

from __future__ import annotations

from gspo_mega.launcher import input_trial


def main(words: list[str]) -> None:
    input_trial.main()
