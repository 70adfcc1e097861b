"""Imports without garbage collection, and collection as usual afterwards."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from gspo_mega.base.garbage import uncollected


class Cycle:
    ended = 0

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        Cycle.ended += 1


def test_nothing_is_collected_inside_and_what_was_made_there_is_never_looked_at():
    before = Cycle.ended
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            Cycle()
        assert not gc.isenabled(), "a nested block ends with the outer one"
    assert gc.isenabled()
    gc.collect()
    assert Cycle.ended == before


def test_afterwards_garbage_is_collected_as_usual():
    with uncollected():
        pass
    before = Cycle.ended
    Cycle()
    gc.collect()
    assert Cycle.ended == before + 1


def test_a_failed_import_leaves_the_collector_on():
    with pytest.raises(ImportError), uncollected():
        raise ImportError
    assert gc.isenabled()


def test_an_orderly_exit_frees_what_was_made_inside():
    """Compiled libraries report objects that outlive Python, as leaks, in the log of whatever ended."""
    code = (
        "import gspo_mega.base.garbage as importing\n"
        "class Cycle:\n"
        "    def __init__(self): self.itself = self\n"
        "    def __del__(self): print('freed', flush=True)\n"
        "with importing.uncollected():\n"
        "    Cycle()\n"
        "print('end', flush=True)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout.split() == ["end", "freed"], ended.stderr
