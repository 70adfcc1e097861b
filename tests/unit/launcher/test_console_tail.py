"""The files of an attempt that the supervisor reads and writes: rank 0's console, and its own log."""

import logging
from pathlib import Path

import pytest

from gspo_mega.base.errors import CheckpointError
from gspo_mega.launcher.children import ConsoleTail, log_to


def test_whole_lines_once_each_and_no_half_of_a_character(tmp_path):
    path, said = tmp_path / "console.log", []
    tail = ConsoleTail(path, said.append)
    tail.pump()
    with path.open("ab", buffering=0) as console:
        text = "step 1\n\nstep ü\n".encode()
        cut = text.index("ü".encode()) + 1
        console.write(text[:cut])
        tail.pump()
        assert said == ["step 1", ""]
        console.write(text[cut:])
    tail.pump()
    tail.pump()
    assert said == ["step 1", "", "step ü"]


def test_a_disk_that_refuses_the_last_lines_of_the_log_does_not_hide_the_runs_error(monkeypatch):
    """A read-only or lost disk refuses what the log still has to write, when the run ends for that very reason."""
    monkeypatch.setattr(logging, "raiseExceptions", False)  # as the command does
    logger = logging.getLogger("gspo_mega.launcher.test")
    with pytest.raises(CheckpointError, match="the disk is full"), log_to(Path("/dev/full")):
        logger.info("a line that stays in the buffer")
        raise CheckpointError("the disk is full")
    with log_to(Path("/dev/full")):
        logger.info("the run ends in order")
