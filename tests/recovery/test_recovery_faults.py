"""A full disk, or one that denies, at every file operation: an error that says so, and the same command again ends as ever."""

from __future__ import annotations

import pytest
from recovery_support import KILLED, leftovers, outcome
from test_recovery_kills import AFTER, ELSEWHERE

from gspo_mega import kill_points
from gspo_mega.errors import CheckpointError, JournalError, PublishError

OPERATIONS = [name for name in kill_points.OPERATIONS if f"{name}.before" not in ELSEWHERE]
ERRORS = {"save": CheckpointError, "journal": JournalError, "publish": PublishError}
REASONS = {"disk_full": "No space left on device", "denied": "Permission denied"}
# Failures that follow each other in one run before its end is compared.
FAULTS_A_RUN = 6


@pytest.mark.parametrize("chosen", [OPERATIONS[i : i + 12] for i in range(0, len(OPERATIONS), 12)], ids=lambda chosen: chosen[0])
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
        assert code == error["exit_code"] == kind.exit_code and error["is_user_error"], f"{operation}: {ranks.log(name)}"
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
        num_faults += 1
    finish()
