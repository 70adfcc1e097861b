"""The arms of tests/soak/tolerance.py are configurations, in the order of its protocol; its dose rounds what it says."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import tolerance
import tolerance_arms
import tolerance_dose
import torch

from gspo_mega.checkpoint.gather import PolicyTensors
from gspo_mega.config import load_config
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.tensors import hf_tensors
from gspo_mega.sync import publish

REPOSITORY = Path(__file__).parents[3]
SHAPES = REPOSITORY / "configs" / "models"
_GROUP = SimpleNamespace(group=None, rank=0, size=1, ranks=(0,))
ONE_RANK = SimpleNamespace(world=_GROUP, host=_GROUP)


def test_the_arms_are_those_of_the_protocol():
    names = [arm.name for arm in tolerance_arms.ARMS]
    assert len(names) == len(set(names)) == 19
    grid = {(a.trainer, a.server) for a in tolerance_arms.ARMS if a.old == "trainer" and a.algorithm == "gspo"}
    assert grid == {(t, s) for t in ("fp32", "fp8") for s in ("same", "fp8_block", "fp8_block+kv")}
    direct = {(a.server, a.algorithm) for a in tolerance_arms.ARMS if a.block == "direct"}
    assert direct == {(s, g) for s in ("fp8_block", "fp8_block+kv") for g in ("gspo", "grpo")}
    dose = {(a.bits, a.algorithm) for a in tolerance_arms.ARMS if a.block == "dose"}
    assert dose == {(b, g) for b in tolerance_arms.DOSES for g in ("gspo", "grpo")} and len(tolerance_arms.DOSES) == 4
    for block in (*tolerance_arms.BLOCKS, "breaking"):
        assert f"\n    {block} " in tolerance.__doc__, "the protocol names every block"


@pytest.mark.parametrize("arm", [*tolerance_arms.ARMS, *tolerance_arms.breaking_arms(1)], ids=lambda arm: arm.name)
def test_an_arm_is_a_configuration(arm):
    config = load_config(tolerance.CONFIG, arm.overrides(tolerance.CORRECTION), "train").config
    assert (config.precision, config.algorithm, config.old_log_probs) == (arm.trainer, arm.algorithm, arm.old)
    assert config.server.quantization == ("none" if arm.server == "same" else "fp8_block")
    assert config.server.kv_cache == ("fp8" if arm.server == "fp8_block+kv" else "auto")
    assert (config.mismatch.correction == "none") == (not arm.corrected)
    assert config.objective.clip_low == {"gspo": 3e-3, "grpo": 0.2}[arm.algorithm]


def test_an_interrupted_block_has_whole_seeds():
    runs = tolerance_arms.in_order(tolerance_arms.ARMS, (1, 2, 3))
    assert len(runs) == 57
    assert [(arm.trainer, arm.algorithm, seed) for arm, seed in runs[:4]] == [
        ("fp32", "gspo", 1),
        ("fp8", "gspo", 1),
        ("fp32", "grpo", 1),
        ("fp32", "gspo", 2),
    ]
    assert {arm.block for arm, _ in runs[9:33]} == {"dose"} and {seed for _, seed in runs[9:17]} == {1}


@pytest.mark.parametrize("shape", ["quickstart_wide", "quickstart_moe"])
def test_the_dose_rounds_what_fp8_would_round(shape):
    torch.manual_seed(0)
    spec = read_model_spec(REPOSITORY / "configs" / "models" / f"{shape}.json")
    changed = set()
    for entry in hf_tensors(spec):
        exact = torch.randn(entry.shape)
        dosed = tolerance_dose.dosed(entry.name, exact, 0)
        assert dosed.dtype == exact.dtype and dosed.shape == exact.shape
        if not torch.equal(dosed, exact):
            assert torch.equal(dosed.abs().log2().round(), dosed.abs().log2()), "no mantissa bit: powers of two"
            changed.add(entry.name.split(".")[-2])
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_a_publisher_sends_the_dose(monkeypatch):
    """What a Publisher made after the replacement takes its tensors from is rounded; what is exact stays exact."""
    exact = {"model.layers.0.self_attn.q_proj.weight": torch.rand(4, 4), "model.norm.weight": torch.rand(4)}
    entries = {entry.name: entry for entry in hf_tensors(read_model_spec(SHAPES / "quickstart_wide.json"))}
    monkeypatch.setattr(PolicyTensors, "__init__", lambda self, *_: vars(self).update(owners={}, table={}))
    monkeypatch.setattr(
        PolicyTensors, "owned", lambda self, dtype: ((entries[name], tensor) for name, tensor in exact.items())
    )

    def whole(self, home, dtype):
        return ((entries[name], tensor) for name, tensor in exact.items())

    monkeypatch.setattr(PolicyTensors, "brought_to", whole)
    monkeypatch.setattr(
        PolicyTensors, "shares", lambda self, dtype, names: (([entries[n]], exact[n]) for n in exact if n in names)
    )
    monkeypatch.setattr(publish, "PolicyTensors", tolerance_dose.tensors_of_dose(1))
    config = load_config(tolerance.CONFIG, ["precision=fp32", "server.quantization=none"], "train").config
    spec = read_model_spec(SHAPES / "quickstart_wide.json")
    publisher = publish.Publisher(config, spec, ONE_RANK, [torch.nn.Linear(1, 1)], "weights")
    made = publisher._policy
    held = ((entry, share) for (entry,), share in made.shares(torch.float32, exact))
    for tensors in (made.owned(torch.float32), made.brought_to(lambda _: 0, torch.float32), held):
        sent = {entry.name: tensor for entry, tensor in tensors}
        assert sent.keys() == exact.keys()
        for name, tensor in exact.items():
            rounded = tolerance_dose.round_mantissa(tensor, 1)
            assert not torch.equal(rounded, tensor)
            assert torch.equal(sent[name], rounded if tensor.dim() > 1 else tensor)
