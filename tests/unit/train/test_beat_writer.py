"""The stacks that a rank leaves when nothing gets done: in a process of its own, which must live on."""

from __future__ import annotations

import re
import subprocess
import sys

from gspo_mega.base.run_folder import RunFolder
from gspo_mega.launcher.watchdog import _main_stack

START = """
import ctypes, pathlib, sys, threading, time
from gspo_mega.plan.watchdog_bounds import Patience
from gspo_mega.base.run_folder import Attempt
from gspo_mega.train.signals import BeatWriter
attempt = Attempt(pathlib.Path(sys.argv[1]))
writer = BeatWriter(attempt, 0, 1, Patience({"start": SECONDS, "other": SECONDS}, SILENCE))
"""
BUSY = """
def down(n):
    return 0 if n == 0 else 1 + down(n - 1)

def spin():
    while True:
        down(200)

for _ in range(4):
    threading.Thread(target=spin, daemon=True).start()
end = time.monotonic() + 4
while time.monotonic() < end:
    time.sleep(0.01)
writer.close()
print("lives")
"""
HELD = """
def hold():
    ctypes.PyDLL(None).usleep(2_000_000)  # keeps the interpreter for itself

end = time.monotonic() + 60  # the timer's thread may have to wait for a processor
while attempt.stacks_file(0).stat().st_size == 0 and time.monotonic() < end:
    hold()
writer.close()
print("lives")
"""


def run(tmp_path, script: str, seconds: float, silence: float) -> list[str]:
    attempt = RunFolder(tmp_path / "run").new_attempt()
    program = tmp_path / "program.py"
    program.write_text((START + script).replace("SECONDS", str(seconds)).replace("SILENCE", str(silence)))
    ended = subprocess.run(
        [sys.executable, str(program), str(attempt.path)],
        cwd=tmp_path,
        env={},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stdout) == (0, "lives\n"), ended
    return _main_stack(attempt.stacks_file(0))


def test_stacks_are_written_beside_busy_threads_and_the_process_lives(tmp_path):
    """As often as it can, while four threads call and return without end."""
    stack = run(tmp_path, BUSY, 0.002, 60.0)
    assert "/program.py:" in stack[-1] and stack[-1].endswith(" in <module>")


def test_a_call_that_holds_the_interpreter_is_named(tmp_path):
    run(tmp_path, HELD, 60.0, 0.6)
    assert re.search(r'program.py", line \d+ in hold\n', next(tmp_path.rglob("stacks_rank_0.txt")).read_text())


def test_progress_makes_old_stacks_go(tmp_path):
    """What is there when the run is judged is of the standstill that it is judged for."""
    script = (
        "from gspo_mega.base import progress\nend = time.monotonic() + 60\n"
        "while not attempt.stacks_file(0).stat().st_size:\n    assert time.monotonic() < end\n    time.sleep(0.01)\n"
        "progress.beat()\n"
    )
    script += (
        "end = time.monotonic() + 60\nwhile attempt.stacks_file(0).stat().st_size and time.monotonic() < end:\n   "
        " progress.beat()\n    time.sleep(0.01)\nwriter.close()\nprint('lives')\n"
    )
    assert run(tmp_path, script, 0.3, 60.0) == []
