"""The guard of the batch node beside a Slurm that fails once, for long, or for good."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from failing_calls import FailingCalls

FILE = Path(__file__).parents[3] / "gspo_mega/launcher/slurm/batch_node_watch.py"
SCONTROL = """#!/bin/sh
cd "$(dirname "$0")" && echo "$*" >> done
case "$*" in
  "show job"*) echo "JobId=7 JobState=RUNNING ReqNodeList=(null) NodeList=$(cat nodes)" ;;
  "show hostnames"*) echo "$3" | tr , '\\n' ;;
esac
"""


@pytest.fixture
def watch(tmp_path, monkeypatch):
    """The module; its `main` is called with a batch node that is lost, and whose supervisor has fallen silent."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "scontrol").write_text(SCONTROL)
    (programs / "scontrol").chmod(0o755)
    (programs / "nodes").write_text("n2,n3")
    spec = importlib.util.spec_from_file_location("batch_node_watch", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(module, "_SILENCE_SECONDS", 0.02)
    module.calls = FailingCalls(tmp_path, programs)
    module.programs = programs
    monkeypatch.setenv("PATH", module.calls.path)
    arguments = ["batch_node_watch.py", "7", "n1", str(tmp_path / "state.json"), str(tmp_path / "watch.log")]
    monkeypatch.setattr("sys.argv", arguments)
    module.log = tmp_path / "watch.log"
    return module


@pytest.mark.parametrize("nth", range(5))
def test_any_one_call_that_fails_changes_nothing(watch, nth):
    """Calls 1 to 4: the job, its hosts, the requeue, one more than there are without a failure; 0: none fails."""
    watch.calls.fail(nth)
    watch.main()
    done = (watch.programs / "done").read_text().splitlines()
    assert done.count("requeue 7") == 1 and done[-1] == "requeue 7"
    assert "n1, where the supervisor ran, is lost: job 7 is queued again" in watch.log.read_text()
    assert ("Slurm does not answer" in watch.log.read_text()) == (1 <= nth <= 3), watch.log.read_text()


def test_a_slurm_that_does_not_answer_for_long_ends_the_watch_with_its_last_word(watch, monkeypatch):
    monkeypatch.setattr(watch, "_NO_ANSWER_SECONDS", 0.3)
    (watch.programs / "scontrol").write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
    with pytest.raises(SystemExit):
        watch.main()
    assert len(watch.calls.calls) > 2, "asked once and gave up"
    said = watch.log.read_text()
    assert said.count("Unable to contact slurm controller") == 2 and "the watch over n1 ends" in said


def test_a_controller_that_hangs_is_asked_again(watch, monkeypatch):
    monkeypatch.setattr(watch, "_ASK_SECONDS", 0.3)
    hang = "[ -e hung ] || { touch hung; exec sleep 60; }\n"
    (watch.programs / "scontrol").write_text(SCONTROL.replace("case", hang + "case", 1))
    watch.main()
    assert (watch.programs / "done").read_text().splitlines()[-1] == "requeue 7"


def test_a_supervisor_that_is_heard_again_is_no_loss(watch, monkeypatch):
    """Silence was the shared folder's; the word of Slurm counts, and while the file changes nobody asks it."""
    (watch.programs / "nodes").write_text("n1,n2")
    looks = []
    real = watch.time.sleep

    def sleep(seconds):
        looks.append(seconds)
        if len(looks) == 50:
            raise KeyboardInterrupt
        real(seconds)

    monkeypatch.setattr(watch.time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        watch.main()
    assert "requeue 7" not in (watch.programs / "done").read_text()


def test_it_needs_nothing_but_the_standard_library():
    assert os.system(f"python3 -I -S -c 'import runpy; runpy.run_path(\"{FILE}\")'") == 0
