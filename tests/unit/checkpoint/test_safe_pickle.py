"""A checkpoint folder that would run a program when it is opened: no tool runs it, and nothing is given to Megatron's
loader.
"""

from __future__ import annotations

import copyreg
import enum
import io
import os
import pickle
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType

from gspo_mega.base.errors import CheckpointError
from gspo_mega.checkpoint.convert import to_megatron
from gspo_mega.checkpoint.safe_pickle import read_index, refuse_code, safe_loads, write_tags_by_value
from gspo_mega.checkpoint.tensor_sources import open_checkpoint
from gspo_mega.verify.certify.program import make_random_folder

ROOT = Path(__file__).parents[3]


class Program:
    """Pickles to a program that makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_random_folder(
        ROOT / "configs/models/certify_dense.json", tmp_path_factory.mktemp("model") / "hf", seed=1
    )


@pytest.fixture(scope="module")
def converted(model):
    out = model.parent / "megatron"
    to_megatron(open_checkpoint(model), out, progress=lambda *_: None)
    return out


@pytest.fixture
def folder(converted, tmp_path):
    return Path(shutil.copytree(converted, tmp_path / "folder"))


@pytest.fixture
def made(tmp_path):
    return tmp_path / "made-by-the-folder"


def change_index(folder: Path, change) -> None:
    file = folder / "megatron" / ".metadata"
    index = pickle.loads(file.read_bytes())
    change(index)
    file.write_bytes(pickle.dumps(index))


def test_the_program_would_run(made):
    pickle.loads(pickle.dumps(Program(made)))
    assert made.exists()


@pytest.mark.parametrize("tool", ["inspect_checkpoint", "verify_checkpoint", "megatron_to_hf"])
def test_no_tool_runs_what_is_in_the_index(folder, model, made, tmp_path, tool):
    change_index(folder, lambda index: setattr(index, "planner_data", Program(made)))
    arguments = (
        [folder]
        if tool == "inspect_checkpoint"
        else [folder, model]
        if tool == "verify_checkpoint"
        else [folder, tmp_path / "out"]
    )
    run = subprocess.run(
        [sys.executable, ROOT / "tools" / f"{tool}.py", *map(str, arguments)], capture_output=True, text=True
    )
    assert not made.exists(), f"{tool} ran a program that the folder brought"
    assert run.returncode == 6
    assert f"{folder}/megatron/.metadata cannot be read: UnpicklingError: it asks for posix.mkdir" in run.stderr


@pytest.mark.parametrize(
    "name",
    [
        ("builtins", "eval"),
        ("os", "system"),
        ("torch", "load"),
        ("torch.hub", "load"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
    ],
)
def test_names_that_are_not_on_the_list_are_refused(name):
    data = (
        b"\x80\x04\x8c"
        + bytes([len(name[0])])
        + name[0].encode()
        + b"\x8c"
        + bytes([len(name[1])])
        + name[1].encode()
        + b"\x93."
    )
    with pytest.raises(pickle.UnpicklingError, match="it asks for"):
        safe_loads(data)


class Reduced:
    """Pickles to a call of `function` with these arguments."""

    def __init__(self, function, *arguments):
        self.parts = function, arguments

    def __reduce__(self):
        return self.parts


def test_members_of_enumerations_as_older_pythons_write_them():
    """Up to 3.11.3 Python pickles a member as `getattr(its class, its name)`, and an index has such members."""
    assert safe_loads(pickle.dumps(Reduced(getattr, WriteItemType, "TENSOR"))) is WriteItemType.TENSOR


@pytest.mark.parametrize(
    "arguments",
    [(WriteItemType, "__class__"), (WriteItemType, "mro"), (MetadataIndex, "__init__"), (torch.float32, "to_complex")],
    ids=str,
)
def test_getattr_looks_up_nothing_else(arguments):
    with pytest.raises(pickle.UnpicklingError, match="no member of an enumeration"):
        safe_loads(pickle.dumps(Reduced(getattr, *arguments)))


def test_what_megatron_may_load_is_let_through(folder):
    assert refuse_code(folder / "megatron") == []
    assert (
        read_index(folder / "megatron").state_dict_metadata.keys()
        == pickle.loads((folder / "megatron/.metadata").read_bytes()).state_dict_metadata.keys()
    )


def with_bytes(
    folder: Path, data: bytes, name: str = "decoder._extra_state/shard_0_1", kind: object = BytesStorageMetadata()
) -> None:
    """The folder with an entry of bytes, as Megatron writes what is no tensor."""
    (folder / "megatron" / "__9_0.distcp").write_bytes(data)

    def change(index):
        if kind is not None:
            index.state_dict_metadata[name] = kind
        index.storage_data[MetadataIndex(name)] = _StorageInfo("__9_0.distcp", 0, len(data))

    change_index(folder, change)


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize(
    "pack",
    [
        lambda program: saved(program),
        lambda program: saved([torch.frombuffer(bytearray(pickle.dumps(program)), dtype=torch.uint8)]),
        lambda program: saved([io.BytesIO(pickle.dumps({"recipe": program}))]),
        lambda program: saved(io.BytesIO(saved(program))),
    ],
)
def test_a_program_among_the_bytes_is_not_given_to_the_loader(folder, made, pack, declared):
    with_bytes(folder, pack(Program(made)), kind=BytesStorageMetadata() if declared else None)
    (problem,) = refuse_code(folder / "megatron")
    assert "__9_0.distcp: decoder._extra_state/shard_0_1 cannot be read" in problem and not made.exists()
    assert refuse_code(folder / "megatron", 1, 2) == [], "each rank looks at its share"


@pytest.mark.parametrize(
    "value",
    [
        [None],
        io.BytesIO(b""),
        [torch.zeros(3, dtype=torch.uint8)],
        torch.frombuffer(bytearray(pickle.dumps({"scale": torch.ones(2)})), dtype=torch.uint8),
    ],
)
def test_states_without_a_program_are_let_through(folder, value):
    with_bytes(folder, saved(value))
    assert refuse_code(folder / "megatron") == []


def test_a_program_in_the_common_part_is_refused(folder, made):
    (folder / "megatron" / "common.pt").write_bytes(saved({"args": Program(made)}))
    (problem,) = refuse_code(folder / "megatron")
    assert "common.pt cannot be read" in problem and not made.exists()


def test_the_common_part_may_be_an_entry(folder, made):
    """As Megatron-Core 0.19 writes it; what it names is then checked like every entry's."""
    (folder / "megatron" / "common.pt").unlink()
    assert refuse_code(folder / "megatron") == []
    with_bytes(folder, saved([{"args": Program(made)}]))
    assert len(refuse_code(folder / "megatron")) == 1 and not made.exists()


def move(index, **changes):
    key = next(iter(index.storage_data))
    index.storage_data[key] = _StorageInfo(**({"relative_path": "__0_0.distcp", "offset": 0, "length": 8} | changes))


def misplace(index):
    tensor = next(iter(index.state_dict_metadata.values()))
    tensor.chunks[0].sizes = torch.Size([2**40, *tensor.chunks[0].sizes[1:]])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda index: move(index, relative_path="../../secret"),
            "has the file '../../secret'; it must be the name of a file in the folder",
        ),
        (lambda index: move(index, relative_path="/etc/passwd"), "has the file '/etc/passwd'"),
        (lambda index: move(index, offset=-1), "is stored in a way that is not supported"),
        (lambda index: move(index, transform_descriptors=["zstd"]), "is stored in a way that is not supported"),
        (misplace, "has a chunk that does not lie in it"),
        (lambda index: index.state_dict_metadata.update({"x": 7}), "'x' is neither a tensor nor bytes"),
        (lambda index: setattr(index, "storage_data", None), "not the index of a checkpoint"),
    ],
)
def test_an_index_that_leads_astray_is_refused(folder, change, text):
    change_index(folder, change)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert text in str(caught.value) and str(caught.value).startswith(f"{folder}/megatron/.metadata")


def test_another_loader_is_not_chosen_by_the_folder(folder):
    (folder / "megatron" / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "zarr"}'
    )
    (problem,) = refuse_code(folder / "megatron")
    assert "only format torch_dist, version 1, is supported" in problem


def test_a_conversion_takes_no_folder_for_its_own_that_is_not(model, tmp_path):
    other = tmp_path / "out.converting"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="out.converting already exists and is not an unfinished conversion"):
        to_megatron(open_checkpoint(model), tmp_path / "out", progress=lambda *_: None)
    assert (other / "thesis.txt").read_text() == "years of work"


class Tag(enum.IntEnum):
    """As Transformer Engine's tag of a number format, in a Python that writes members by `getattr`."""

    E4M3 = 7

    def __reduce_ex__(self, protocol):
        return getattr, (type(self), self.name)


def test_a_number_formats_tag_is_written_by_value_in_an_older_python(monkeypatch):
    """Else a checkpoint of FP8 parameters is written, and torch refuses to read it."""
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.constants", types.SimpleNamespace(DType=Tag))
    monkeypatch.setattr(copyreg, "pickle", lambda kind, reduce: seen.append((kind, reduce)))
    seen: list = []
    write_tags_by_value()
    ((kind, reduce),) = seen

    class Pickler(pickle.Pickler):
        dispatch_table = {kind: reduce}

    written = io.BytesIO()
    Pickler(written, protocol=2).dump([Tag.E4M3])
    assert b"getattr" in pickle.dumps([Tag.E4M3], protocol=2) and b"getattr" not in written.getvalue()
    assert pickle.loads(written.getvalue()) == [Tag.E4M3]
