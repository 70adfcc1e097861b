"""`model.weights`: what it contradicts, and that its shape is looked at before anything starts."""

import pytest

from gspo_mega.base.errors import ModelError
from gspo_mega.config.validate import validate_config
from gspo_mega.plan import plan_run

# GRPO, so that a KL term is allowed.
KL = ["algorithm=grpo", "kl.coefficient=0.1"]


@pytest.mark.parametrize("command", ["eval", "certify"])
def test_commands_that_take_model_path_refuse_it(load, command):
    (violation,) = [v for v in validate_config(load("model.weights=w").config, command)[0] if v.key == "model.weights"]
    assert f"`gspo-mega {command}` takes the weights of model.path" in violation.text


def test_train_and_sft_take_it(load):
    for command in ("train", "sft", None):
        assert not [
            v for v in validate_config(load("model.weights=w").config, command)[0] if v.key.startswith(("model", "kl"))
        ]


def test_a_reference_must_be_named_beside_it(load):
    config = load(*KL).config
    weighted = config.model_copy(update={"model": config.model.model_copy(update={"weights": "w"})})
    assert [v.key for v in validate_config(weighted)[0]] == ["kl.reference_path"]
    named = weighted.model_copy(update={"kl": weighted.kl.model_copy(update={"reference_path": "r"})})
    assert validate_config(named)[0] == []


def test_its_shape_is_the_models(load, shape, tmp_path):
    def plan(weights):
        return plan_run(load(f"model.path={policy}", f"model.weights={weights}"))

    def folder(name, **changes):
        (tmp_path / name / "megatron").mkdir(parents=True)
        shape("dense", **changes).rename(tmp_path / name / "config.json")
        (tmp_path / name / "megatron" / "metadata.json").write_text("{}")
        return tmp_path / name

    policy = shape("dense").rename(tmp_path / "policy.json")
    plan(folder("same", torch_dtype="bfloat16"))
    with pytest.raises(
        ModelError, match=r"model\.weights: .*other has another shape than the policy: rope_theta 500000.0 instead of"
    ):
        plan(folder("other", rope_theta=5e5))
    (tmp_path / "same" / "megatron" / "metadata.json").unlink()
    with pytest.raises(
        ModelError, match=r"model\.weights: .*same: it has no Megatron checkpoint; tools/hf_to_megatron\.py"
    ):
        plan(tmp_path / "same")
    with pytest.raises(ModelError, match=r"model\.weights: .*nowhere"):
        plan(tmp_path / "nowhere")
