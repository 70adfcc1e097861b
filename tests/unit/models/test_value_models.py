"""A critic's folder: its shape is read from a policy's, a critic's or a reward model's config.json; its tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gspo_mega.base.errors import ModelError
from gspo_mega.models.families import FAMILIES
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.spec import shape_differences
from gspo_mega.models.tensors import hf_tensors
from gspo_mega.models.value_models import (
    critic_config_json,
    critic_tensors,
    is_classifier,
    is_ignored_critic_tensor,
    read_critic_spec,
)

SHAPES = Path(__file__).resolve().parents[3] / "configs" / "models"
RAW = json.loads((SHAPES / "qwen3_30b_a3b.json").read_text())


def folder_of(path: Path, raw: dict) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(raw))
    return path


@pytest.mark.parametrize("kind", ["ForSequenceClassification", "ForTokenClassification", "ForCausalLM"])
def test_a_critics_shape_is_its_backbones(tmp_path, kind):
    folder = folder_of(
        tmp_path / "a", RAW | {"architectures": ["Qwen3Moe" + kind], "id2label": {"0": "LABEL_0"}, "num_labels": 1}
    )
    assert shape_differences(read_critic_spec(folder), read_model_spec(SHAPES / "qwen3_30b_a3b.json")) == []
    assert is_classifier(folder) == (kind != "ForCausalLM")


def test_a_policy_is_no_classifier(tmp_path):
    """`model.path` keeps refusing what has no LM head."""
    folder = folder_of(tmp_path / "a", critic_config_json(RAW))
    with pytest.raises(ModelError, match=r"architectures is \['Qwen3MoeForSequenceClassification'\]"):
        read_model_spec(folder)


@pytest.mark.parametrize(
    "labels, count", [({}, 2), ({"num_labels": 3}, 3), ({"id2label": {"0": "bad", "1": "good"}, "num_labels": 1}, 2)]
)
def test_several_labels_are_refused(tmp_path, labels, count):
    folder = folder_of(tmp_path / "a", RAW | {"architectures": ["Qwen3MoeForSequenceClassification"]} | labels)
    with pytest.raises(ModelError) as refused:
        read_critic_spec(folder)
    assert str(refused.value) == (
        f"{folder}/config.json: Qwen3MoeForSequenceClassification has {count} labels (id2label); a critic has one, its"
        " value"
    )


def test_another_family_is_refused_as_a_policys_is(tmp_path):
    folder = folder_of(tmp_path / "a", RAW | {"architectures": ["GemmaForSequenceClassification"], "num_labels": 1})
    with pytest.raises(ModelError, match="it must name exactly one; supported"):
        read_critic_spec(folder)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.architecture)
def test_config_json_of_a_critic_is_read_as_its_backbones(family):
    """There and back, of a classifier too."""
    once = critic_config_json({"architectures": [family.architecture]})
    assert once == critic_config_json(once)
    assert once["architectures"] == [family.architecture.replace("ForCausalLM", "ForSequenceClassification")]
    assert len(once["id2label"]) == 1


def test_a_critic_has_the_policys_tensors_but_for_the_lm_head():
    spec = read_model_spec(SHAPES / "qwen3_30b_a3b.json")
    policy, critic = {e.name for e in hf_tensors(spec)}, {e.name: e for e in critic_tensors(spec)}
    assert policy - critic.keys() == {"lm_head.weight"} and critic.keys() - policy == {"score.weight"}
    assert critic["score.weight"].shape == (1, spec.hidden_size)
    assert [
        name for name in ("lm_head.weight", "score.bias", "score.weight") if is_ignored_critic_tensor(spec, name)
    ] == [
        "lm_head.weight",
        "score.bias",
    ]
