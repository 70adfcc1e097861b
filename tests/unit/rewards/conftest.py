"""The folder that user functions lie in, and a look for what a test left running."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from scoring_support import USER_FUNCTIONS
from user_code import no_child_is_left, start_in


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return start_in(tmp_path, "user_rewards.py", USER_FUNCTIONS, monkeypatch)


@pytest.fixture
def no_process_is_left():
    with no_child_is_left():
        yield
