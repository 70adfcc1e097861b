"""A critic's Hugging Face folder: transformers has its values, any layout takes it back, Megatron's files become it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from conversions import found, quiet, tensors_of
from layout_jobs import recorded_sequences
from layout_models import make_folder
from safetensors.torch import load_file, save_file

from gspo_mega.checkpoint.compare import describe
from gspo_mega.checkpoint.convert import to_huggingface, to_megatron
from gspo_mega.checkpoint.tensor_sources import open_checkpoint


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("critic") / "dense", moe=False, layers=2, tied=True)


@pytest.fixture(scope="module")
def written(rank_pools, source, tmp_path_factory):
    """A critic of a policy's folder with a head, written by two ranks, and what it says."""
    out = tmp_path_factory.mktemp("written")
    return out, run(rank_pools, source, dict(tensor=2), out=str(out))


def run(rank_pools, folder, parallel, **options):
    return rank_pools(2).run("critic_folder_jobs:run", folder=str(folder), parallel=parallel, **options)[0]


def same_values(one, other, tolerance):
    assert one["values"].keys() == other["values"].keys()
    for row, (before, behind) in one["values"].items():
        assert np.abs(before - other["values"][row][0]).max(initial=0.0) <= tolerance, row
        assert abs(behind - other["values"][row][1]) <= tolerance, row


@pytest.mark.parametrize("kind", ["TokenClassification", "SequenceClassification"])
def test_transformers_loads_it_and_has_its_values(written, kind):
    import transformers

    out, held = written
    loader = getattr(transformers, f"AutoModelFor{kind}")
    model, loading = loader.from_pretrained(out / "hf", dtype=torch.float32, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["mismatched_keys"] and model.config.num_labels == 1
    model.eval()
    spread = []
    for row, sequence in enumerate(recorded_sequences()):
        with torch.no_grad():
            scores = model(torch.from_numpy(sequence["tokens"])[None]).logits[0].numpy()
        before, behind = held["values"][row]
        if not len(before):
            continue
        if kind == "TokenClassification":
            active = np.flatnonzero(sequence["mask"]) + sequence["prompt"] - 1
            assert np.abs(scores[active, 0] - before).max() < 1e-5, row
        last = int(np.flatnonzero(sequence["mask"])[-1]) == len(sequence["mask"]) - 1
        if last:
            assert abs(scores[-1] - behind) < 1e-5, row
        spread += before.tolist()
    assert np.std(spread) > 0.1, "values that are all alike would prove nothing"


def test_another_layout_takes_it_back_with_its_head(rank_pools, written):
    out, held = written
    back = run(rank_pools, out / "hf", dict(pipeline=2))
    assert back["weights"].keys() == held["weights"].keys()
    assert all(np.array_equal(back["weights"][name], value) for name, value in held["weights"].items())
    same_values(back, held, 1e-5)


def test_megatrons_files_become_the_same_folder_and_go_back(source, written, tmp_path):
    """`checkpoints/step_N/critic` of any layout, described by the folder that the policy came from."""
    out, held = written
    saved = open_checkpoint(out / "critic", source)
    to_huggingface(saved, tmp_path / "hf", progress=quiet)
    want, got = tensors_of(out / "hf"), tensors_of(tmp_path / "hf")
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
    assert {"score.weight", "score.bias"} < want.keys() and "lm_head.weight" not in want
    assert held["weights"].keys() == want.keys() - {"score.bias"} and not want["score.bias"].any()
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config == json.loads((out / "hf" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"] and config["id2label"] == {"0": "value"}

    to_megatron(open_checkpoint(tmp_path / "hf"), tmp_path / "back", progress=quiet)
    assert found(tmp_path / "hf", tmp_path / "back") == found(tmp_path / "back", out / "hf") == []
    assert any("score.weight" in line for line in describe(tmp_path / "back"))
    assert found(source, out / "hf") == ["the models differ: one is a policy and the other a critic (score.weight)"]


def test_a_head_with_a_bias_and_a_classifier_without_one_are_refused_by_name(rank_pools, written, tmp_path):
    out, _ = written
    tensors = load_file(out / "hf" / "model.safetensors")
    config = json.loads((out / "hf" / "config.json").read_text())

    def folder(name, tensors, config):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        return tmp_path / name

    biased = folder("biased", tensors | {"score.bias": torch.ones(1)}, config)
    texts = rank_pools(2).run("critic_folder_jobs:run", folder=str(biased), parallel=dict(tensor=2))
    assert len(set(texts)) == 1 and "score.bias is not zero; a critic's head has no bias" in texts[0]
    with pytest.raises(Exception, match="score.bias is not zero"):
        open_checkpoint(biased)
    headless = folder("headless", {n: t for n, t in tensors.items() if n != "score.weight"}, config)
    with pytest.raises(Exception, match=r"missing: score.weight \[1, 64\]"):
        open_checkpoint(headless)
