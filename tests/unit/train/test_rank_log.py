"""A rank whose log, or whose console.log, is on a full disk: lines are lost and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RANK = """
import faulthandler, logging, sys
from pathlib import Path
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.train.worker import console, redirect_output

attempt = RunFolder(sys.argv[1]).new_attempt()
log = Path(sys.argv[2])
attempt.console_log.symlink_to("/dev/full")
redirect_output(log)
faulthandler.enable()
show = console(attempt)
for number in range(1000):
    print("some library's chatter", number)
    print("and on standard error", file=sys.stderr)
    logging.getLogger("library").info("a line")
    show(f"line {number}")
sys.stdout.flush()
(attempt.path / "worked on").touch()
"""


def run_rank(folder: Path, log: Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", RANK, str(folder / "run"), str(log)], capture_output=True, text=True)


def test_no_line_is_worth_a_rank(tmp_path):
    done = run_rank(tmp_path, Path("/dev/full"))
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "run/attempts/0001/worked on").exists()


def test_where_there_is_room_every_line_is_there(tmp_path):
    assert run_rank(tmp_path, tmp_path / "rank.log").returncode == 0
    said = (tmp_path / "rank.log").read_text()
    for line in ("some library's chatter 999\n", "and on standard error\n", "library: a line\n", "line 999\n"):
        assert line in said
    assert "console.log cannot be written: No space left on device" in said
