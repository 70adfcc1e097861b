"""Whatever a downloaded folder's index and headers say, it is read, or an error of ours names the file and what is
wrong.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from gspo_mega.base.errors import CheckpointError, ModelError
from gspo_mega.checkpoint import hf_import
from gspo_mega.checkpoint.hf_folder import INDEX_NAME, SINGLE_NAME, HuggingFaceFolder
from gspo_mega.checkpoint.tensor_sources import SafetensorsFile


def with_header(path: Path, header: bytes, data: bytes = b"\0" * 16) -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


GOOD = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
ODD = {
    b"[]": "its header is not a JSON object",
    b"7": "its header is not a JSON object",
    b"{": "cannot be read as safetensors",
    b"\xff\xfe{}": "cannot be read as safetensors",
    b"[" * 100_000: "cannot be read as safetensors: RecursionError",
    b'{"a": 1}': "the header of 'a': it must have dtype, shape and data_offsets",
    b'{"a": {"dtype": "F32", "shape": [4]}}': "it must have dtype, shape and data_offsets",
    json.dumps({"a": GOOD | {"dtype": ["F32"]}}).encode(): "dtype ['F32'] is not supported",
    json.dumps({"a": GOOD | {"dtype": "I64"}}).encode(): "dtype 'I64' is not supported; supported: F32",
    json.dumps({"a": GOOD | {"shape": None}}).encode(): "shape is None; it must be a list of sizes",
    json.dumps({"a": GOOD | {"shape": [-2, -2]}}).encode(): "shape is [-2, -2]",
    json.dumps({"a": GOOD | {"shape": [2.0, 2]}}).encode(): "shape is [2.0, 2]",
    json.dumps({"a": GOOD | {"shape": [5]}}).encode(): "F32 of shape [5] does not fill the 16 bytes",
    json.dumps({"a": GOOD | {"data_offsets": [16, 0]}}).encode(): "data_offsets is [16, 0]",
    json.dumps({"a": GOOD | {"data_offsets": [-16, 0]}}).encode(): "data_offsets is [-16, 0]",
    json.dumps({"a": GOOD | {"data_offsets": [0, 8, 16]}}).encode(): "data_offsets is [0, 8, 16]",
    json.dumps({"a": GOOD | {"data_offsets": [2**62, 2**62 + 16]}}).encode(): "cut short",
}


@pytest.mark.parametrize("header", ODD, ids=range(len(ODD)))
def test_an_odd_header_is_named_with_its_file(tmp_path, header):
    path = with_header(tmp_path / "x.safetensors", header)
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile(path)
    assert str(caught.value).startswith(f"{path}: ") and ODD[header] in str(caught.value)


json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 20),
        st.integers(),
        st.floats(),
        st.text(max_size=4),
        st.sampled_from(["F32", "BF16"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["a", "dtype", "shape", "data_offsets", "weight_map"]), inner, max_size=3),
    ),
    max_leaves=10,
)
headers = st.one_of(
    st.binary(max_size=40),
    json_values.map(lambda value: json.dumps(value).encode()),
    st.fixed_dictionaries(
        {"a": st.fixed_dictionaries({"dtype": json_values, "shape": json_values, "data_offsets": json_values})}
    ).map(lambda v: json.dumps(v).encode()),
)


@given(headers, st.binary(max_size=32))
@example(json.dumps({"a": GOOD}).encode(), b"\0" * 16)
@settings(max_examples=200, deadline=None)
def test_any_header_is_read_or_refused_by_name(tmp_path_factory, header, data):
    folder = tmp_path_factory.mktemp("odd")
    path = with_header(folder / SINGLE_NAME, header, data)
    try:
        file = SafetensorsFile(path)
        for name in file.tensors:
            assert list(file.read(name).shape) == list(file.tensors[name].shape)
    except CheckpointError as error:
        assert str(path) in str(error)
    try:
        with HuggingFaceFolder(folder) as found:
            for name in found.files:
                found.shape(name)
    except ModelError as error:
        assert str(path) in str(error)


@given(json_values)
@settings(max_examples=100, deadline=None)
def test_any_index_is_read_or_refused_by_name(tmp_path_factory, value):
    folder = tmp_path_factory.mktemp("index")
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": value}))
    try:
        found = HuggingFaceFolder(folder)
        for name in found.files:
            found.shape(name)
    except ModelError as error:
        assert str(folder) in str(error)


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "..", ".", "", "sub/../../x", 7, None])
def test_an_index_names_files_beside_it_alone(tmp_path, name):
    (tmp_path / "other").mkdir()
    save_file({"a": torch.zeros(2)}, tmp_path / "other" / "model.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(
        ModelError, match="weight_map: 'a' has the file .*; it must be the name of a file beside the index"
    ):
        HuggingFaceFolder(folder).shape("a")


@pytest.mark.parametrize("values", [False, True])
def test_a_folder_in_which_every_name_is_another_is_refused_in_a_moment(tmp_path, monkeypatch, values):
    count, spec = 30_000, SimpleNamespace(family="qwen3_moe")
    entries = [SimpleNamespace(name=f"layers.{n}.weight", shape=(2, 2), stack=None) for n in range(count)]
    save_file({"other": torch.zeros(2)}, tmp_path / SINGLE_NAME)
    monkeypatch.setattr(hf_import, "open_folder", lambda folder, spec: HuggingFaceFolder(folder))
    monkeypatch.setattr(hf_import, "as_stored", lambda entries: entries)
    begun = time.process_time()
    with pytest.raises(ModelError, match=f"{count + 1 - 20} more"):
        hf_import.check_folder(tmp_path, spec, lambda source: entries, lambda spec, name: False, values=values)
    assert time.process_time() - begun < 20  # each name against each problem took minutes
