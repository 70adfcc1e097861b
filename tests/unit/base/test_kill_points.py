"""Faults are armed by name, count and rank; nothing happens where none is armed."""

from pathlib import Path

import pytest

from gspo_mega.base import atomic_io, failpoints


@pytest.fixture(autouse=True)
def disarmed():
    yield
    failpoints.arm(None, 0)


def test_the_nth_time_on_its_rank_alone(tmp_path):
    failpoints.arm("point=journal.sync.before,hit=2,do=disk_full,rank=1", rank=0)
    for _ in range(3):
        failpoints.reached("journal.sync.before")
    failpoints.arm("point=journal.sync.before,hit=2,do=disk_full,rank=1", rank=1)
    failpoints.reached("journal.sync.before")
    failpoints.reached("journal.sync.after")
    with pytest.raises(OSError, match="No space left"):
        failpoints.reached("journal.sync.before")
    failpoints.reached("journal.sync.before")


def test_a_fault_leaves_its_mark_and_with_once_does_not_happen_where_that_is(tmp_path):
    mark = tmp_path / "mark"
    for once, happens in ((1, True), (1, False), (0, True)):
        failpoints.arm(f"point=journal.sync.before,do=denied,mark={mark},once={once}", 0)
        if happens:
            with pytest.raises(PermissionError):
                failpoints.reached("journal.sync.before")
        failpoints.reached("journal.sync.before")
        assert mark.exists()


@pytest.mark.parametrize("text", ["point=nowhere", "do=explode", "who=me", "hit=often"])
def test_what_cannot_be_armed_is_refused(text):
    with pytest.raises(ValueError):
        failpoints.arm(text, 0)


def test_a_point_must_be_declared():
    with pytest.raises(KeyError):
        failpoints.reached("save.everything")


def test_the_page_on_verification_counts_the_points():
    counts = f"each of the {len(failpoints.OPERATIONS)} file operations", f"at {len(failpoints.MOMENTS)} moments"
    text = (Path(__file__).parents[3] / "docs/verification.md").read_text()
    assert all(count in text for count in counts)
    assert len(failpoints.POINTS) == 2 * len(failpoints.OPERATIONS) + len(failpoints.MOMENTS)


def test_a_whole_file_or_the_old_one(tmp_path):
    file = tmp_path / "f"
    atomic_io.atomic_write_text(file, "old", at="save.latest")
    for point in ("write.before", "write.after", "rename.before"):
        failpoints.arm(f"point=save.latest.{point},do=denied", 0)
        with pytest.raises(PermissionError):
            atomic_io.atomic_write_text(file, "new", at="save.latest")
        assert file.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["f"]


def test_a_folder_whose_removal_was_cut_short_has_no_name_left(tmp_path, monkeypatch):
    folder = tmp_path / "step"
    folder.mkdir()
    (folder / "a").write_text("a")
    monkeypatch.setattr(
        atomic_io.shutil,
        "rmtree",
        lambda path: (_ for _ in ()).throw(PermissionError() if path.exists() else FileNotFoundError()),
    )
    with pytest.raises(PermissionError):
        atomic_io.remove_tree(folder, at="save.prune")
    assert not folder.exists() and (tmp_path / ".step.removed" / "a").exists()
