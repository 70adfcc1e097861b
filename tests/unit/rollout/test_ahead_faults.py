"""tests/soak/ahead_faults.py finds what it looks for: a run that loses, doubles or biases samples on purpose.

That a good run does none of it is `test_continuous.py`'s, with 40 faults.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from forked_workers import ForkedWorkers

SOAK = Path(__file__).parents[2] / "soak"


@pytest.fixture(scope="module")
def forks():
    forks = ForkedWorkers(("ahead_faults",), PYTHONPATH=f"{SOAK.parents[1]}:{SOAK}:{SOAK.parent / 'support'}")
    yield forks
    forks.close()


@pytest.mark.parametrize("control", ["lost", "doubled", "biased"])
def test_a_broken_promise_is_found(forks, control):
    command = forks.command("ahead_faults", "--faults", "16", "--control", control)
    done = subprocess.run(command, capture_output=True, text=True)
    last = done.stdout.rstrip().rpartition("\n")[2]
    assert done.returncode == 1 and last.startswith("16 faults, 14 steps, "), done.stdout + done.stderr
    found = {part.partition(":")[0] for part in last.partition(" s: ")[2].split("; ")}
    assert control in found, last
    assert not found & ({"lost", "doubled"} - {control}), last
