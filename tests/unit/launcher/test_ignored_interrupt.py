"""A run whose parent ignores SIGINT says so, and how it is stopped."""

import subprocess
import sys

import pytest

PROGRAM = """
from pathlib import Path
from gspo_mega.launcher.children import ignored_interrupt_notice, stop_signals
with stop_signals():
    print(ignored_interrupt_notice(Path("RUN/attempts/latest/stop")))
"""


@pytest.mark.parametrize(
    ("started", "is_said"), [('trap "" INT; exec "$0" -c "$1"', True), ('exec "$0" -c "$1"', False)]
)
def test_an_ignored_interrupt_is_said_with_what_stops_the_run(started, is_said):
    run = subprocess.run(["sh", "-c", started, sys.executable, PROGRAM], capture_output=True, text=True, check=True)
    if is_said:
        assert "SIGINT" in run.stdout and "touch RUN/attempts/latest/stop, or send SIGTERM" in run.stdout
    else:
        assert run.stdout == "None\n"
