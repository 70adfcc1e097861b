"""A sample of tests/soak/chaos.py: a few faults of each kind and few trajectories; and that its check finds errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
CHAOS = REPOSITORY / "tests" / "soak" / "chaos.py"
SAMPLE = (
    "swap",
    "late on a kept connection",
    "another sample's",
    "NaN",
    "gzip bomb",
    "stalls after a token",
    "dies midway",
    "aborted by the server",
    "EMFILE on registrations",
    "a registration that comes and goes",
)


def test_a_sample_of_chaos():
    command = [sys.executable, str(CHAOS), "--trajectories", "24", "--only", *SAMPLE]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("nothing lost, doubled, swapped or hung")
    assert f"{len(SAMPLE)} faults, {24 * len(SAMPLE)} trajectories" in done.stdout


def test_chaos_sees_what_it_looks_for():
    """Without the check of the request's id, another sample's response is accepted, and chaos.py finds it."""
    code = (
        "import sys; sys.argv[0] = 'chaos'; sys.path.insert(0, sys.argv[1]); import chaos;from"
        " gspo_mega.rollout.client import completion;add = completion.StreamedAnswer.add;completion.StreamedAnswer.add = lambda self, report: add(self, report |"
        " {'meta_info': report['meta_info'] | {'id': self._request_id}});sys.exit(chaos.main(['--trajectories', '24',"
        " '--only', 'another sample\\'s']))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(CHAOS.parent)], capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert (
        "has other tokens than it was sampled with" in done.stdout and "1 did not hold: another sample's" in done.stdout
    )


def test_chaos_has_all_the_faults_that_were_seen():
    sys.path.insert(0, str(CHAOS.parent))
    import chaos

    assert len(chaos.FAULTS) >= 44 and {fault.kind for fault in chaos.FAULTS.values()} == {
        "server",
        "registration",
        "process",
    }
    named = [word for fault in chaos.FAULTS.values() for word in fault.command if word.startswith("tests/")]
    assert named and all((REPOSITORY / path).is_file() for path in named)
