"""What the tests of users' code share: the folder that it lies in, and a look for what was left running."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest


def start_in(folder: Path, module: str, text: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make `folder` the working directory, with the user's module in it, as where a run is started."""
    (folder / module).write_text(text)
    monkeypatch.chdir(folder)
    return folder


@contextlib.contextmanager
def no_child_is_left() -> Iterator[None]:
    """Of this process, at any depth, beyond those that it had before."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    gc.collect()  # a process that ends with its object: a cycle keeps the object until then
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert left == [], [(child, Path(f"/proc/{child.pid}/stat").read_text(), child.cmdline()) for child in left]
