"""A run whose shared folder is really full, at whatever it comes to: said, harmless, and continued by the same
command.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from recovery_support import REPOSITORY

from gspo_mega.base.errors import CheckpointError, FolderError, JournalError, PublishError

IN_A_NAME_SPACE = ["unshare", "--map-root-user", "--mount"]
SAID = {error.exit_code for error in (CheckpointError, FolderError, JournalError, PublishError)}


def test_a_full_folder_ends_the_run_with_its_reason_and_more_room_continues_it(tmp_path):
    if subprocess.run(
        [*IN_A_NAME_SPACE, "mount", "-t", "tmpfs", "none", tmp_path], capture_output=True, check=False
    ).returncode:
        pytest.skip("a small file system can be mounted neither by this user nor in a name space of its own")
    command = [*IN_A_NAME_SPACE, sys.executable, str(Path(__file__).with_name("full_disk.py")), str(tmp_path)]
    path = str(REPOSITORY / "tests/support")
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    ends = result["ends"]
    assert ends[0][1] != 0 and ends[-1][1] == 0, ends
    for free, code, text, is_for_people in ends:
        assert code in SAID | {0} and is_for_people, f"{free}: {text}"
        assert text is None or "No space left" in text or "free there" in text, f"{free}: {text}"
    assert {code for _, code, _, _ in ends} == SAID | {0}, f"the room was never short where it matters: {ends}"
    assert result["same"] and result["left"] == []
