"""A full disk, or one that denies, at every file operation: an error that says so, and the same command again ends as
ever.
"""

from __future__ import annotations

import json
import os
import pickle

import pytest
from recovery_support import KILLED, leftovers, outcome
from test_recovery_kills import AFTER, ELSEWHERE

from gspo_mega.base import failpoints
from gspo_mega.base.errors import CheckpointError, JournalError, PublishError
from gspo_mega.checkpoint import folders

OPERATIONS = [name for name in failpoints.OPERATIONS if f"{name}.before" not in ELSEWHERE]
ERRORS = {"save": CheckpointError, "journal": JournalError, "publish": PublishError}
REASONS = {"disk_full": "No space left on device", "denied": "Permission denied"}
# Failures that follow each other in one run before its end is compared.
FAULTS_A_RUN = 6


@pytest.mark.parametrize(
    "chosen", [OPERATIONS[i : i + 12] for i in range(0, len(OPERATIONS), 12)], ids=lambda chosen: chosen[0]
)
def test_refused_at_each_operation_and_continued(ranks, straight, chosen):
    name, num_faults = "", 0

    def compare():
        found = outcome(ranks.folder(name))
        assert not {key for key in found.keys() | straight[0].keys() if found.get(key) != straight[0].get(key)}, name
        assert leftovers(ranks.folder(name)) == []

    def finish():
        assert ranks.train(name) == [0], ranks.log(name)
        compare()

    def refuse_at(operation: str, do: str) -> bool:
        if AFTER.get(operation):
            (code,) = ranks.train(name, f"point={AFTER[operation]}")
            assert code in (0, KILLED), ranks.log(name)
        (code,) = ranks.train(name, f"point={operation}.before,do={do}")
        if code == 0:
            return False
        kind = ERRORS[operation.partition(".")[0]]
        error = ranks.error(name)
        assert code == error["exit_code"] == kind.exit_code and error["is_user_error"], (
            f"{operation}: {ranks.log(name)}"
        )
        assert str(ranks.folder(name).path) in error["text"] and REASONS[do] in error["text"], error["text"]
        return True

    for number, operation in enumerate(chosen):
        do = ("disk_full", "denied")[number % 2]
        if num_faults % FAULTS_A_RUN == 0:
            if name:
                finish()
            name = ranks.copy("one_step", f"refused-{operation}")
        if not refuse_at(operation, do):
            compare()  # those before it had let the run come to its end
            name = ranks.copy("one_step", f"refused-again-{operation}")
            assert refuse_at(operation, do), f"{operation} was not reached"
        num_faults += 1  # noqa: SIM113  the function inside reads it
    finish()


SHORTER = "train.num_steps=2"


@pytest.fixture(scope="module")
def straight_of_two(ranks):
    """The outcome of a run of two ranks that nothing interrupts."""
    assert ranks.train("faultless-two", "", SHORTER, num_ranks=2) == [0, 0], ranks.log("faultless-two")
    return outcome(ranks.folder("faultless-two"))


@pytest.mark.parametrize("operation", ["save.random", "save.common", "save.index"])
def test_refused_to_one_rank_of_two_ends_both_with_its_error(ranks, straight_of_two, operation):
    """Inside Megatron's collectives the other rank would wait for half an hour for what does not come."""
    name = f"of-two-{operation}"
    codes = ranks.train(name, f"point={operation}.before,do=disk_full", SHORTER, num_ranks=2)
    assert codes[0] == CheckpointError.exit_code and codes[1] in (CheckpointError.exit_code, KILLED), ranks.log(name)
    error = ranks.error(name)
    assert (
        "cannot be written" in error["text"] and "rank 0: " in error["text"] and REASONS["disk_full"] in error["text"]
    )
    assert ranks.train(name, "", SHORTER, num_ranks=2) == [0, 0], ranks.log(name)
    assert outcome(ranks.folder(name)) == straight_of_two
    assert leftovers(ranks.folder(name)) == []


@pytest.mark.parametrize("start", ["resumed", "from model.weights"])
def test_a_checkpoint_that_would_run_a_program_is_refused_before_megatron_loads_it(ranks, straight, tmp_path, start):
    """As a run resumes from it, with its checksums right, and as another run takes its weights."""

    class Program:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    name = ranks.copy("one_step", f"program-{start.partition(' ')[0]}")
    (checkpoint,) = ranks.folder(name).checkpoints_dir.glob("step_*")
    index = checkpoint / "megatron" / ".metadata"
    value = pickle.loads(index.read_bytes())
    value.planner_data = Program()
    index.write_bytes(pickle.dumps(value))
    record = json.loads((checkpoint / "state.json").read_text())
    record["files"] |= folders.checksums(checkpoint, [index])
    (checkpoint / "state.json").write_text(json.dumps(record))
    if start == "resumed":
        (code,) = ranks.train(name)
    else:
        name = "program-taken"
        (code,) = ranks.train(name, "", f"model.weights={checkpoint}")
    assert not (tmp_path / "made").exists(), "a checkpoint ran a program"
    assert code == CheckpointError.exit_code
    assert "it asks for posix.mkdir, which no checkpoint needs" in ranks.error(name)["text"]
