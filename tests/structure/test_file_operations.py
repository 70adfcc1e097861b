"""No save, journal or publish changes the disk where a test could not kill it."""

from pathlib import Path

import file_operations
import pytest

ROOT = Path(__file__).parents[2]


def test_every_change_of_the_disk_is_an_operation_with_a_name():
    broken = file_operations.check_file_operations(ROOT)
    assert not broken, "\n" + "\n".join(map(str, broken))


def test_the_exceptions_are_there():
    assert [name for name in file_operations.APART if not (ROOT / "gspo_mega" / name).is_file()] == []


def check(tmp_path, source, name="data/journal/x.py"):
    path = tmp_path / "gspo_mega" / name
    path.parent.mkdir(parents=True)
    path.write_text(source + "\n")
    return file_operations.check_file_operations(tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        "open(path, 'w')",
        "open(path, mode='ab')",
        "path.open('r+b')",
        "path.open(mode)",
        "os.open(path, os.O_RDONLY)",
        "os.fsync(4)",
        "os.replace(a, b)",
        "path.replace(b)",
        "path.rename(b)",
        "path.unlink(missing_ok=True)",
        "folder.mkdir()",
        "path.write_text('x')",
        "shutil.rmtree(folder)",
        "shutil.copytree(a, b)",
        "tempfile.mkstemp()",
        "save_file(tensors, path)",
        "torch.save(x, path)",
        "dist_checkpointing.save(x, path)",
        "with atomic_io.operation('save.tensors'):\n    def later():\n        path.unlink()",
        "with other(), suppress(OSError):\n    path.unlink()",
        "atomic_io.sync(path)",
        "atomic_io.atomic_write_json(path, {})",
        "atomic_write_text(path, '')",
    ],
)
def test_a_change_of_the_disk_elsewhere_is_reported(tmp_path, source):
    assert len(check(tmp_path, source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "open(path)",
        "open(path, 'rb')",
        "path.open('rb')",
        "path.read_text()",
        "text.replace('a', 'b')",
        "shutil.disk_usage(path)",
        "with atomic_io.operation('save.tensors'):\n    for file in files:\n        save_file(x, file)",
        "atomic_io.rename(a, b, at='save.rename')",
        "atomic_io.sync(path, at='publish.sync')",
        "atomic_io.atomic_write_json(path, {}, at='save.state')",
    ],
)
def test_what_reads_or_has_a_name_is_not_reported(tmp_path, source):
    assert check(tmp_path, source) == []


def test_conversions_have_their_own_rules(tmp_path):
    assert check(tmp_path, "path.unlink()", "checkpoint/convert.py") == []
