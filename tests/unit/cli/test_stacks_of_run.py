"""`gspo-mega status --stacks` where nobody could answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_mega.base.errors import ConfigError
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.cli.status import ask_for_stacks
from gspo_mega.launcher.attempt_state import StateKeeper


def test_a_run_that_is_over_or_has_not_begun_is_named(tmp_path):
    folder = RunFolder(tmp_path)
    with pytest.raises(ConfigError, match=r"has no attempt yet; only the ranks of a running run answer"):
        ask_for_stacks(folder)
    with StateKeeper(folder.new_attempt()) as state:
        state.tell("finished")
    with pytest.raises(ConfigError, match=r"is finished; only the ranks"):
        ask_for_stacks(folder)


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    monkeypatch.chdir(tmp_path)
    attempt = folder.new_attempt()
    with StateKeeper(attempt):
        folder.config_file.write_text((Path(__file__).parents[3] / "configs/quickstart.yaml").read_text())
        attempt.stacks_request_file.mkdir()  # what no file can replace
        with pytest.raises(ConfigError, match=r"stacks cannot be written: .*; --stacks needs the right to write"):
            ask_for_stacks(folder)
