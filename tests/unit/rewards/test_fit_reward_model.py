"""The losses of a reward model against values by hand, its command's refusals, and the bias that SGLang would make up."""

import json
import math

import pytest
import torch
from run_configs import smallest_yaml
from safetensors.torch import load_file, save_file

from gspo_mega.cli.main import main
from gspo_mega.rewards.fitting import give_served_bias, loss_of


def test_pointwise_is_binary_cross_entropy_with_the_label():
    scores = torch.tensor([[math.log(3.0)], [0.0], [-math.log(3.0)]], requires_grad=True)
    labels = torch.tensor([1.0, 0.25, 1.0])
    loss = loss_of(scores, labels, "pointwise")
    assert loss.item() == pytest.approx((-math.log(0.75) - math.log(0.5) - math.log(0.25)) / 3, rel=1e-6)
    loss.backward()  # sigmoid(score) - label, per row
    assert scores.grad.tolist() == [pytest.approx([g / 3], rel=1e-5) for g in (0.75 - 1, 0.5 - 0.25, 0.25 - 1)]


def test_pairwise_compares_the_chosen_with_the_rejected():
    scores = torch.tensor([[math.log(3.0), 0.0], [5.0, 5.0]], requires_grad=True)
    loss = loss_of(scores, torch.ones(2), "pairwise")
    assert loss.item() == pytest.approx((-math.log(0.75) - math.log(0.5)) / 2, rel=1e-6)
    loss.backward()
    assert scores.grad.tolist() == [pytest.approx([-0.125, 0.125], rel=1e-5), pytest.approx([-0.25, 0.25], rel=1e-5)]


@pytest.mark.parametrize(
    ("architecture", "has"), [("Qwen3ForSequenceClassification", True), ("LlamaForSequenceClassification", False)]
)
def test_a_head_with_a_bias_in_sglang_gets_one_of_zero(tmp_path, architecture, has):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    save_file({"score.weight": torch.ones(2, 4)}, tmp_path / "model.safetensors")
    give_served_bias(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert ("score.bias" in tensors) == has and tensors["score.weight"].tolist() == [[1.0] * 4] * 2
    if has:
        assert tensors["score.bias"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("row", "words", "said"),
    [
        ({"prompt": "a", "label": 1}, [], "no key 'response'; expected are prompt, response, label"),
        ({"prompt": "a", "response": "b", "label": 2}, [], "'label' is 2; a number from 0 to 1 is expected"),
        ({"prompt": "a", "response": "b", "label": "1"}, [], "'label' is '1'; a number from 0 to 1 is expected"),
        ({"prompt": "a", "response": "b", "label": None}, [], "'label' is None; a number from 0 to 1 is expected"),
        ({"prompt": "a", "response": 7, "label": 1}, [], "'response' is no text"),
        (
            {"prompt": "a", "response": "b", "label": 1},
            ["--loss", "pairwise"],
            "no key 'chosen'; expected are prompt, chosen",
        ),
        ({}, ["--text", "{prompt}"], "--text: has no {response}"),
        ({}, ["--held-out", "1"], "--held-out: 1.0; must be from 0 to below 1"),
        ({}, ["--epochs", "0"], "--epochs: 0; must be > 0"),
        ({}, ["parallel.tensor=2"], "parallel.tensor=2: keys are overridden in the file of --ranks"),
        ({}, ["--ranks", "run.yaml", "--train", "head"], "--train head: with --ranks all weights are fitted"),
    ],
)
def test_what_cannot_be_fitted_is_said(tmp_path, row, words, said, capsys):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    out = str(tmp_path / "out")
    assert main(["reward-model", str(tmp_path), str(tmp_path / "rows.jsonl"), "--out", out, *words]) != 0
    assert said in capsys.readouterr().err


def test_a_folder_is_not_overwritten_and_a_model_has_to_be_one(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "a", "response": "b", "label": 1}) + "\n")
    assert main(["reward-model", str(tmp_path), str(rows), "--out", str(tmp_path)]) == 2
    assert "exists; name a folder that does not" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["reward-model", str(tmp_path / "empty"), str(rows), "--out", str(tmp_path / "out")]) != 0
    assert "is no Hugging Face model folder: it has no config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--batch-size", "1", "cluster.ranks_per_node=2"], "--batch-size: 1 is less than the 2 ranks of"),
        (["--max-tokens", "300"], "--max-tokens: 300 is more than a pack of"),
    ],
)
def test_what_ranks_cannot_fit_is_said_before_they_start(tmp_path, words, said, capsys):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "response": "b", "label": 1}) + "\n")
    (tmp_path / "run.yaml").write_text(smallest_yaml())
    base = ["reward-model", str(tmp_path), str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "out")]
    assert main([*base, "--max-tokens", "64", "--ranks", str(tmp_path / "run.yaml"), *words]) != 0
    assert said in capsys.readouterr().err and not (tmp_path / "out-fit").exists()
