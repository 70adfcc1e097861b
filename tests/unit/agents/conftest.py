"""The folder that users' episodes and tools lie in, and a look for what a test left running."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pool_support import USER_EPISODES
from user_code import no_child_is_left, start_in


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return start_in(tmp_path, "user_episodes.py", USER_EPISODES, monkeypatch)


@pytest.fixture
def nothing_is_left(tmp_path_factory, monkeypatch):
    """Neither a process nor a page."""
    pages = tmp_path_factory.mktemp("pages")
    monkeypatch.setattr(tempfile, "tempdir", str(pages))
    with no_child_is_left():
        yield
    assert list(pages.iterdir()) == []
