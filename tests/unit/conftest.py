"""Makes the helpers of this folder importable by their names, and forgets which modules a test looked for where."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gspo_mega.base import user_functions

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def no_folder_of_another_tests_modules(monkeypatch):
    """A process looks for users' modules in the folder of one configuration; tests load many."""
    monkeypatch.setattr(user_functions, "_last_place", [])
