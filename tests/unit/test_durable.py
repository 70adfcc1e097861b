"""Files of a run are as private as the process's umask says, and a copy is as private as its source."""

import os
import stat

import pytest

from gspo_mega import durable


@pytest.fixture
def umask():
    before = os.umask(0o022)

    def change(value):
        os.umask(value)

    yield change
    os.umask(before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o027, 0o002])
def test_what_is_written_whole_has_the_permissions_that_the_umask_leaves(tmp_path, umask, mask):
    umask(mask)
    durable.atomic_write_text(tmp_path / "prompts", "secret")
    durable.write_whole(tmp_path / "key", b"secret", mode=0o600)
    assert mode(tmp_path / "prompts") == 0o666 & ~mask
    assert mode(tmp_path / "key") == 0o600
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["key", "prompts"]


@pytest.mark.parametrize(
    ("source", "copy"), [(0o600, 0o600), (0o640, 0o640), (0o644, 0o644), (0o755, 0o644), (0o444, 0o644), (0o666, 0o644)]
)
def test_a_copy_is_for_no_more_people_than_its_source(tmp_path, umask, source, copy):
    (tmp_path / "from").write_text("secret")
    (tmp_path / "from").chmod(source)
    durable.copy_file(tmp_path / "from", tmp_path / "to", at="publish.copy")
    assert mode(tmp_path / "to") == copy and (tmp_path / "to").read_text() == "secret"
    (tmp_path / "from").write_text("again")
    durable.copy_file(tmp_path / "from", tmp_path / "to", at="publish.copy")
    assert (tmp_path / "to").read_text() == "again", "a copy that was cut short is in nobody's way"


def test_nothing_is_written_through_a_link_at_the_target(tmp_path):
    (tmp_path / "from").write_text("new")
    (tmp_path / "other").write_text("old")
    (tmp_path / "to").symlink_to(tmp_path / "other")
    durable.copy_file(tmp_path / "from", tmp_path / "to", at="publish.copy")
    assert (tmp_path / "other").read_text() == "old" and (tmp_path / "to").read_text() == "new"
