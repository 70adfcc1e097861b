"""Random checkpoints of a shape: the same from the same seed, in every tensor of the family's table."""

import json

import numpy as np
from safetensors.numpy import load_file

from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.tensors import hf_tensors
from gspo_mega.verify.certify import program
from gspo_mega.verify.certify.program import make_random_folder

SHAPE = "configs/models/certify_moe.json"


def tensors(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = {name: load_file(folder / name) for name in set(index.values())}
    return {name: files[file][name] for name, file in index.items()}


def test_every_tensor_of_the_table_and_the_same_from_the_same_seed(tmp_path):
    one = tensors(make_random_folder(SHAPE, tmp_path / "one", 1))
    entries = {entry.name: entry.shape for entry in hf_tensors(read_model_spec(SHAPE))}
    assert {name: value.shape for name, value in one.items()} == entries
    assert read_model_spec(tmp_path / "one").num_layers == read_model_spec(SHAPE).num_layers
    two, other = (tensors(make_random_folder(SHAPE, tmp_path / str(seed), seed)) for seed in (1, 2))
    assert all(np.array_equal(one[name], two[name]) for name in one)
    assert not any(np.array_equal(one[name], other[name]) for name in one)
    assert len({value.tobytes() for value in one.values()}) == len(one), "no two tensors alike"


def test_what_is_there_is_kept_and_another_seed_replaces_it(tmp_path):
    folder = make_random_folder(SHAPE, tmp_path / "m", 1)
    before = (folder / "model.safetensors.index.json").stat().st_mtime_ns
    assert (make_random_folder(SHAPE, folder, 1) / "model.safetensors.index.json").stat().st_mtime_ns == before
    first = tensors(folder)["lm_head.weight"]
    assert not np.array_equal(tensors(make_random_folder(SHAPE, folder, 2))["lm_head.weight"], first)


def test_large_models_are_written_in_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(program, "_FILE_BYTES", 100_000)
    whole = tensors(make_random_folder(SHAPE, tmp_path / "whole", 1))
    assert len(list((tmp_path / "whole").glob("*.safetensors"))) > 3
    monkeypatch.undo()
    assert all(
        np.array_equal(value, whole[name])
        for name, value in tensors(make_random_folder(SHAPE, tmp_path / "one", 1)).items()
    )
