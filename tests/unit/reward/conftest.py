"""The folder that user functions lie in, and a look for what a test left running."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from scoring_support import USER_FUNCTIONS

import gspo_mega


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with the user's module beside it, as where a run is started."""
    (tmp_path / "user_rewards.py").write_text(USER_FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(gspo_mega.__file__).parents[1]))
    return tmp_path


@pytest.fixture
def no_process_is_left():
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert left == []
