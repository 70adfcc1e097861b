"""Files of a run are as private as the process's umask says, and a copy is as private as its source."""

import ast
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gspo_mega.base import atomic_io
from gspo_mega.checkpoint.hf_export import _Writer
from gspo_mega.rewards.fitting import give_served_bias
from gspo_mega.sync.delta import _Files

ROOT = Path(__file__).parents[3]


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
    atomic_io.atomic_write_text(tmp_path / "prompts", "secret")
    atomic_io.write_whole(tmp_path / "key", b"secret", mode=0o600)
    assert mode(tmp_path / "prompts") == 0o666 & ~mask
    assert mode(tmp_path / "key") == 0o600
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["key", "prompts"]


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o027])
def test_tensors_that_safetensors_wrote_have_the_permissions_that_the_umask_leaves(tmp_path, umask, mask):
    """safetensors writes a private file, regardless of the umask, so another user could not read an exported model."""
    umask(mask)
    exported = _Writer(tmp_path, 0, 1 << 20, lambda name, tensor: None)
    exported.add("weight", torch.ones(3))
    exported.close()
    changes = _Files(tmp_path, 1)
    changes.add("weight", torch.ones(3, dtype=torch.uint8))
    changes.write()
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForSequenceClassification"]}')
    save_file({"score.weight": torch.ones(1, 3)}, tmp_path / "model.safetensors")
    give_served_bias(tmp_path)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [file.name for file in files] == [
        "model.safetensors",
        "rank00000-00000.safetensors",
        "rank00001-00000.safetensors",
    ]
    assert {mode(file) for file in files} == {0o666 & ~mask}


def test_whoever_lets_a_library_write_tensors_has_them_follow_the_umask():
    writers = []
    for path in [*(ROOT / "gspo_mega").rglob("*.py"), *(ROOT / "tools").glob("*.py")]:
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                calls = [ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)]
                if any(call.rpartition(".")[2] in ("save_file", "save_pretrained") for call in calls):
                    writers.append((path.name, function.name, "atomic_io.follow_umask" in calls))
    assert len(writers) >= 9
    assert [writer for writer in writers if not writer[2]] == []


@pytest.mark.parametrize(
    ("source", "copy"), [(0o600, 0o600), (0o640, 0o640), (0o644, 0o644), (0o755, 0o644), (0o444, 0o644), (0o666, 0o644)]
)
def test_a_copy_is_for_no_more_people_than_its_source(tmp_path, umask, source, copy):
    (tmp_path / "from").write_text("secret")
    (tmp_path / "from").chmod(source)
    atomic_io.copy_file(tmp_path / "from", tmp_path / "to", at="publish.copy")
    assert mode(tmp_path / "to") == copy and (tmp_path / "to").read_text() == "secret"
    (tmp_path / "from").write_text("again")
    atomic_io.copy_file(tmp_path / "from", tmp_path / "to", at="publish.copy")
    assert (tmp_path / "to").read_text() == "again", "a copy that was cut short is in nobody's way"


def test_nothing_is_written_through_a_link_at_the_target(tmp_path):
    (tmp_path / "from").write_text("new")
    (tmp_path / "other").write_text("old")
    (tmp_path / "to").symlink_to(tmp_path / "other")
    atomic_io.copy_file(tmp_path / "from", tmp_path / "to", at="publish.copy")
    assert (tmp_path / "other").read_text() == "old" and (tmp_path / "to").read_text() == "new"


def test_a_reader_sees_a_folder_whole_or_not_at_all_while_it_is_removed(tmp_path, monkeypatch):
    folder, seen, remove = tmp_path / "step", [], atomic_io.shutil.rmtree
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "file").write_text("text")

    def removed(path, *arguments, **more):
        seen.append(folder.exists())
        remove(path, *arguments, **more)

    monkeypatch.setattr(atomic_io.shutil, "rmtree", removed)
    (tmp_path / ".step.removed").mkdir()  # of a removal that was cut short
    atomic_io.remove_tree(folder, at="save.drop")
    assert seen[0] is True and seen[-1] is False and list(tmp_path.iterdir()) == []
    atomic_io.remove_tree(folder, at="save.drop")


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch):
    atomic_io.atomic_write_text(tmp_path / "state", "old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            atomic_io.atomic_write_text(tmp_path / "state", "new")
    assert (tmp_path / "state").read_text() == "old" and [path.name for path in tmp_path.iterdir()] == ["state"]


def test_what_a_killed_writer_left_beside_a_file_goes_with_the_next_write(tmp_path):
    left, other = tmp_path / ".latest.0123abcd.part", tmp_path / ".later.0123abcd.part"
    left.write_text("half"), other.write_text("half")
    atomic_io.atomic_write_text(tmp_path / "latest", "new", at="save.latest")
    assert sorted(path.name for path in tmp_path.iterdir()) == [other.name, "latest"]


def test_all_of_a_long_write_is_written(tmp_path, monkeypatch):
    """The kernel may take a part of what it is given."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, bytes(data)[:3]))
    atomic_io.write_whole(tmp_path / "file", b"0123456789")
    descriptor = atomic_io.open_end(tmp_path / "file", at="journal.open")
    atomic_io.append(descriptor, b"abcdefgh", at="journal.append")
    os.close(descriptor)
    assert (tmp_path / "file").read_bytes() == b"0123456789abcdefgh"
