"""Rank 0 of a run whose folder another supervisor took over, before it overwrites something of that one's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gspo_mega.base.errors import FolderError
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.train.rank0 import Rank0


def test_it_stops_before_it_writes(tmp_path):
    folder = RunFolder(tmp_path / "run")
    lead = SimpleNamespace(attempt=folder.new_attempt(), run_folder=folder)
    Rank0.check_newest_attempt(lead)
    later = folder.new_attempt()
    with pytest.raises(
        FolderError,
        match=(
            "was taken over by a later start of the run, attempt 2; this one, attempt 1, ends and writes nothing more"
        ),
    ):
        Rank0.check_newest_attempt(lead)
    Rank0.check_newest_attempt(SimpleNamespace(attempt=later, run_folder=folder))
