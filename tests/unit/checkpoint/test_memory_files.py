"""Copies in memory: a file is whole or has no name, a copy that is needed is never overwritten, nobody else can read them; and
which copies a group of ranks goes on from.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from gspo_mega.checkpoint import memory_files
from gspo_mega.checkpoint.memory_files import HeldCopy, begin_part, commit_part, digest_of, held_copies, mapped
from gspo_mega.checkpoint.peer_copies import Layout, LiveState, PeerCopies, read_file


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_files, "ROOT", tmp_path)
    found = memory_files.copies_folder(tmp_path / "run")
    memory_files.make_folder(found)
    return found


def write(folder, step: int, text: bytes, keep: int | None = None) -> HeldCopy:
    part = begin_part(folder, 3, "own", len(text), keep)
    content = mapped(part)
    content[:] = text
    copy = HeldCopy(3, "own", step, digest_of(content))
    commit_part(folder, part, copy)
    return copy


def test_a_copy_counts_once_it_is_whole_and_the_one_before_it_stays(folder):
    first = write(folder, 1, b"first")
    begin_part(folder, 3, "own", 100, keep=1)
    assert held_copies(folder) == [first], "a part has no name"
    second = write(folder, 2, b"the second", keep=1)
    assert held_copies(folder) == [first, second]
    memory = (folder / first.name).stat().st_ino
    third = write(folder, 3, b"3", keep=2)
    assert held_copies(folder) == [second, third], "the third took over the first's memory"
    assert (folder / third.name).stat().st_ino == memory and bytes(mapped(folder / third.name)) == b"3"
    assert digest_of(mapped(folder / second.name)) == second.digest


def test_too_little_memory_is_an_error_before_anything_is_copied(folder, monkeypatch):
    first = write(folder, 1, b"first")

    def refuse(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="No space left"):
        begin_part(folder, 3, "own", 2**20, keep=1)
    assert held_copies(folder) == [first]


def test_a_folder_that_others_can_read_or_change_is_refused(folder):
    folder.chmod(0o750)
    with pytest.raises(PermissionError, match="not a folder that only this user can read"):
        memory_files.make_folder(folder)
    folder.rmdir()
    folder.symlink_to(folder.parent)
    with pytest.raises(PermissionError, match="not a folder that only this user can read"):
        memory_files.make_folder(folder)


def test_the_launcher_leaves_nothing_behind(folder, tmp_path):
    write(folder, 1, b"first")
    with pytest.raises(ZeroDivisionError), memory_files.copies_removed(tmp_path / "run"):
        raise ZeroDivisionError
    assert not folder.exists() and list(tmp_path.iterdir()) == []


def test_every_kind_of_tensor_comes_back_with_its_bits(folder):
    tensors = {
        "matrix": torch.randn(3, 5).bfloat16(),
        "part of another": torch.randn(4, 6)[:, 1:3],
        "step": torch.tensor(7.0),
        "flags": torch.tensor([True, False]),
        "random": torch.randint(0, 256, (13,), dtype=torch.uint8),
        "counts": torch.tensor([2**40, -1]),
        "nothing": torch.empty(0, 4),
        "not a number": torch.tensor([float("nan"), -0.0]),
    }
    layout = Layout(LiveState(tensors, {}, {"step": 3}), {"rank": 1})
    part = begin_part(folder, 1, "own", layout.num_bytes, None)
    layout.write(mapped(part))
    record, found = read_file(mapped(part))
    assert record == {"format": 1, "rank": 1, "numbers": {"step": 3}} and list(found) == list(tensors)
    for name, want in tensors.items():
        assert (found[name].dtype, found[name].shape) == (want.dtype, want.shape)
        assert found[name].contiguous().view(-1).view(torch.uint8).equal(want.contiguous().view(-1).view(torch.uint8))


# Each rank's machine: what it holds as (rank, place, step); three machines of one rank each, the neighbour is the next.
WHOLE = [[(r, "own", s), ((r - 1) % 3, "peer", s)] for r in range(3) for s in (4,)]


@pytest.mark.parametrize(
    ("machines", "saved", "want"),
    [
        (WHOLE, 0, [(0, "own", 4), (1, "own", 4), (2, "own", 4)]),
        ([WHOLE[0], [], WHOLE[2]], 4, [(0, "own", 4), (2, "peer", 4), (2, "own", 4)]),
        (WHOLE, 5, "the newest copies are of step 4, and the checkpoint is newer"),
        ([WHOLE[0], [], []], 0, "rank 1: neither its own copy nor its neighbour's is there"),
        ([[], [], []], 0, "rank 0, 1, 2: neither its own copy nor its neighbour's is there"),
        # A death while the copies of step 5 are made: only one rank's are there.
        ([[*WHOLE[0], (0, "own", 5)], [*WHOLE[1], (0, "peer", 5)], WHOLE[2]], 0, [(r, "own", 4) for r in range(3)]),
        ([[(0, "own", 4)], [(1, "own", 5)], [(2, "own", 4)]], 0, "no step has a whole copy of every rank"),
    ],
)
def test_the_newest_step_that_every_rank_has_is_chosen(machines, saved, want):
    copies = PeerCopies.__new__(PeerCopies)
    copies._host = SimpleNamespace(size=3)
    inventory = [[HeldCopy(rank, place, step, "") for rank, place, step in one] for one in machines]
    found = copies._choose(inventory, set(), saved)
    if isinstance(want, str):
        assert found == want
        return
    assert [(holder, copy.place, copy.step) for holder, copy in found] == want
    assert [copy.rank for _, copy in found] == [0, 1, 2]
