"""Which checkpoints are kept, which is chosen, and that one stands at every moment."""

from __future__ import annotations

import os

import pytest

from gspo_mega.base import failpoints
from gspo_mega.base.errors import CheckpointError
from gspo_mega.base.run_folder import RunFolder, atomic_write_json
from gspo_mega.checkpoint import folders


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path)
    folder.checkpoints_dir.mkdir()
    yield folder
    failpoints.arm(None, 0)


def draft(run, step, mark="new"):
    folder = folders.draft_folder(run.checkpoint_dir(step), "a1")
    folder.mkdir()
    (folder / "mark").write_text(mark)
    atomic_write_json(folder / "state.json", {"format_version": folders.FORMAT_VERSION})
    return folder


def save(run, step, mark="new", keep_last=2, keep_every=0):
    folders.commit_draft(run, draft(run, step, mark), run.checkpoint_dir(step))
    folders.prune(run, step, keep_last, keep_every)


def names(run):
    return sorted(entry.name for entry in run.checkpoints_dir.iterdir())


def test_the_newest_and_every_nth_are_kept(run):
    for step in range(1, 10):
        save(run, step, keep_every=4)
    assert names(run) == ["latest", "step_00000004", "step_00000008", "step_00000009"]
    assert [f.name for f in folders.candidates(run)] == ["step_00000009", "step_00000008", "step_00000004"]


def test_checkpoints_of_a_future_that_was_left_neither_count_nor_go(run):
    for step in (1, 2, 9):
        save(run, step, keep_last=9)
    run.latest_checkpoint_file.write_text("step_00000002\n")
    save(run, 3)
    assert names(run) == ["latest", "step_00000002", "step_00000003", "step_00000009"]
    assert [f.name for f in folders.candidates(run)] == ["step_00000003", "step_00000002"]


OPERATIONS = [f"save.{name}" for name in ("aside", "rename", "drop", "latest.write", "latest.rename")]


@pytest.mark.parametrize("point", [f"{name}.{side}" for name in OPERATIONS for side in ("before", "after")])
def test_the_same_step_saved_again_is_there_at_every_moment(run, point):
    save(run, 1, "old", keep_last=1)
    again = draft(run, 1)
    failpoints.arm(f"point={point},do=denied", 0)
    with pytest.raises(PermissionError):
        folders.commit_draft(run, again, run.checkpoint_dir(1))
    failpoints.arm(None, 0)
    folders.restore_moved_aside(run)
    (found,) = folders.candidates(run)
    assert (found / "mark").read_text() in ("old", "new") and folders.read_record(found)
    folders.remove_drafts(run)
    save(run, 1, "newest", keep_last=1)
    assert (run.checkpoint_dir(1) / "mark").read_text() == "newest"
    assert names(run) == ["latest", "step_00000001"]


def test_every_kind_of_damage_is_found_by_exactly_one_share(run):
    save(run, 1)
    folder = run.checkpoint_dir(1)
    for name in "abcd":
        (folder / name).write_bytes(name.encode() * 10)
    sums = folders.checksums(folder, [folder / name for name in "abcd"])
    assert [folders.checksum_problems(folder, sums, share, 3) for share in range(3)] == [[], [], []]
    (folder / "a").write_bytes(b"a" * 9)
    (folder / "b").write_bytes(b"b" * 9 + b"x")
    (folder / "c").unlink()
    problems = [problem for share in range(3) for problem in folders.checksum_problems(folder, sums, share, 3)]
    assert sorted(problems) == [
        "a has 9 bytes instead of 10",
        "b has other bytes than were written",
        "c: No such file or directory",
    ]


def test_a_name_that_is_no_checkpoints_is_refused(run):
    run.latest_checkpoint_file.write_text("../../elsewhere")
    with pytest.raises(CheckpointError, match="not a checkpoint's name"):
        folders.candidates(run)


def test_a_damaged_one_keeps_its_files_under_another_name(run):
    save(run, 1)
    folders.set_aside_damaged(run.checkpoint_dir(1))
    assert names(run) == ["latest", "step_00000001.damaged"] and folders.complete_checkpoints(run) == []
    save(run, 1)
    folders.set_aside_damaged(run.checkpoint_dir(1))
    assert names(run) == ["latest", "step_00000001.damaged", "step_00000001.damaged-2"], "the one before it stays, too"


def test_a_clock_that_was_moved_back_changes_nothing(run):
    for number, step in enumerate((1, 2, 3)):
        save(run, step)
        os.utime(run.checkpoint_dir(step), (1_000_000_000 - number, 1_000_000_000 - number))
    assert [f.name for f in folders.candidates(run)] == ["step_00000003", "step_00000002"], "steps count, not times"
