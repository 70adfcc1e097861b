"""A PEFT folder written here gives Hugging Face's `peft` the logits of the merged weights, and starts a policy that has
them too; another folder is refused.
"""

from __future__ import annotations

import json
import shutil
from typing import NamedTuple

import numpy as np
import pytest
import torch
from exact_numbers import exact_logits
from family_models import VARIANTS, make_family_folder, token_ids
from layout_models import make_folder
from safetensors.torch import load_file, save_file

from gspo_mega.models.families import FAMILIES

TOLERANCE = 1e-5
TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
CUT, STAGES = dict(tensor=2, expert=2), dict(pipeline=2)
# No target: all linear layers; those of latent attention, of dense layers, of shared and of all other experts too.
MODELS = {
    "qwen2-tied": (TARGETS, (dict(tensor=2), STAGES)),
    "deepseek_v3": ((), (CUT, STAGES)),
    "qwen3_moe": ((), (CUT, dict(expert=2))),
    "qwen2_moe": ((), (dict(expert=2), CUT)),
    "mixtral": (("w3",), (CUT, STAGES)),
    "glm4_moe_lite": ((), (CUT, STAGES)),
    "minimax_m2": ((), (CUT, STAGES)),
    "olmo3": ((), (dict(tensor=2), STAGES)),
    "qwen3_5_moe-stacked": ((), (CUT, STAGES)),
}
LORA = dict(rank=4, alpha=6.0, targets=TARGETS)
EXPERTS = "base_model.model.model.layers.0.mlp.experts"


def peft_itself():
    return pytest.importorskip("peft", reason="peft is not installed (launch/env/test.txt)")


class Logits(NamedTuple):
    """Of one model, [t, vocabulary] float64."""

    rounded: np.ndarray
    """Computed in fp32."""
    exact: np.ndarray
    """Computed in fp64."""


def logits(folder, tokens, adapter=None) -> Logits:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        model = peft_itself().PeftModel.from_pretrained(model, str(adapter))
    with torch.no_grad():
        rounded = model.eval()(torch.from_numpy(tokens)[None]).logits[0].double().numpy()
    return Logits(rounded, exact_logits(model, torch.from_numpy(tokens)).numpy())


def assert_engine_has(ranks, base, tokens, want: Logits, parallel, lora, fp32: bool = True):
    for name, values in want._asdict().items():
        np.save(base / f"{name}.npy", values)
    found = ranks.run(
        "lora_jobs:logits_differences",
        folder=str(base),
        references=(str(base / "rounded.npy"), str(base / "exact.npy")),
        tokens=tokens,
        parallel=parallel,
        lora=lora,
    )
    assert max(exact for _, exact in found) < TOLERANCE, parallel
    if fp32:
        assert max(rounded for rounded, _ in found) < TOLERANCE, parallel


@pytest.mark.parametrize("variant", MODELS)
def test_peft_has_the_logits_of_the_merged_weights_and_of_the_engine(rank_pools, tmp_path, variant):
    targets, layouts = MODELS[variant]
    lora = {**LORA, "targets": targets}
    base, tokens = make_family_folder(tmp_path / "base", variant), token_ids()
    ranks = rank_pools(2)
    ranks.run("lora_jobs:write_folders", folder=str(base), out=str(tmp_path), parallel=layouts[0], lora=lora)
    adapter = tmp_path / "adapter"
    want = logits(base, tokens, adapter)
    merged = logits(tmp_path / "merged", tokens)
    # Gated delta nets amplify what fp32 rounds.
    fp32 = not FAMILIES[VARIANTS[variant][0]].delta_net
    assert np.abs(want.exact - logits(base, tokens).exact).max() > 0.1, "the adapters change nothing"
    assert np.abs(want.exact - merged.exact).max() < TOLERANCE
    if fp32:
        assert np.abs(want.rounded - merged.rounded).max() < TOLERANCE
    started = {**lora, "path": str(adapter)}
    for parallel in layouts:
        assert_engine_has(ranks, base, tokens, want, parallel, started, fp32)
    again = dict(folder=str(base), parallel=layouts[1])
    ranks.run("lora_jobs:write_again", out=str(tmp_path / "again"), lora=started, served=False, **again)
    assert contents(tmp_path / "again") == contents(adapter)
    # The form of servers, with an A and a B for each matrix, holds the same.
    ranks.run("lora_jobs:write_again", out=str(tmp_path / "served"), lora=started, served=True, **again)
    served = {**lora, "path": str(tmp_path / "served")}
    ranks.run("lora_jobs:write_again", out=str(tmp_path / "back"), lora=served, served=False, **again)
    assert contents(tmp_path / "back") == contents(adapter)


def contents(folder) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def other_experts(tensors):
    tensors[f"{EXPERTS}.lora_A.weight"] = (
        tensors[f"{EXPERTS}.lora_A.weight"].unflatten(0, (4, -1)).flip(0).flatten(0, 1)
    )


def expert_before_rank(tensors):
    whole = tensors[f"{EXPERTS}.lora_B.weight"]
    tensors[f"{EXPERTS}.lora_B.weight"] = whole.unflatten(1, (-1, 4)).transpose(1, 2).flatten(1)


def up_before_gate(tensors):
    gate, up = tensors[f"{EXPERTS}.base_layer.lora_B.weight"].chunk(2)
    tensors[f"{EXPERTS}.base_layer.lora_B.weight"] = torch.cat([up, gate])


def test_another_order_of_experts_ranks_or_halves_has_other_logits(rank_pools, tmp_path):
    base, tokens = make_family_folder(tmp_path / "base", "qwen3_moe"), token_ids()
    job = dict(folder=str(base), out=str(tmp_path), parallel={}, lora={**LORA, "targets": ()})
    rank_pools(1).run("lora_jobs:write_folders", **job)
    want = logits(tmp_path / "merged", tokens).exact
    for fault in (other_experts, expert_before_rank, up_before_gate):
        odd = shutil.copytree(tmp_path / "adapter", tmp_path / fault.__name__)
        tensors = load_file(odd / "adapter_model.safetensors")
        fault(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, odd / "adapter_model.safetensors")
        assert np.abs(logits(base, tokens, odd).exact - want).max() > 1e-3, fault.__name__


def test_a_folder_that_peft_made_for_experts_starts_a_policy(rank_pools, tmp_path):
    """PEFT's own adapters of `gate_up_proj` have one A for gate and up."""
    from transformers import AutoModelForCausalLM

    peft = peft_itself()
    base, tokens = make_family_folder(tmp_path / "base", "qwen3_moe"), token_ids()
    torch.manual_seed(3)
    settings = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=["q_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), settings)
    model.save_pretrained(tmp_path / "theirs")
    want = logits(base, tokens, tmp_path / "theirs")
    assert np.abs(want.exact - logits(base, tokens).exact).max() > 0.1
    targets = ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    lora = {**LORA, "targets": targets, "path": str(tmp_path / "theirs")}
    ranks = rank_pools(2)
    assert_engine_has(ranks, base, tokens, want, dict(expert=2), lora)
    ranks.run(
        "lora_jobs:write_again",
        folder=str(base),
        out=str(tmp_path / "ours"),
        parallel=dict(expert=2),
        lora=lora,
        served=False,
    )
    ours = logits(base, tokens, tmp_path / "ours")
    assert all(np.abs(mine - theirs).max() < TOLERANCE for mine, theirs in zip(ours, want, strict=True))


def test_another_folder_is_refused_by_what_differs(rank_pools, tmp_path):
    base, one = make_folder(tmp_path / "base", moe=False, layers=2), rank_pools(1)
    one.run("lora_jobs:write_folders", folder=str(base), out=str(tmp_path), parallel={}, lora=LORA)
    adapter = tmp_path / "adapter"

    def said(**changed) -> str:
        return one.run("lora_jobs:refused", folder=str(base), lora={**LORA, "path": str(adapter), **changed})[0]

    assert "r is 4; valid here: 8 (lora.rank)" in said(rank=8)
    assert "lora_alpha is 6.0; valid here: 3.0 (lora.alpha)" in said(alpha=3.0)
    assert "unexpected: base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in said(targets=TARGETS[1:])
    assert "missing: base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight" in said(targets=())
    assert "has no linear layer 'w1'; valid: q_proj, k_proj" in said(targets=("w1",), path=None)
    assert "no PEFT folder (adapter_config.json, adapter_model.safetensors) can be read" in said(path=str(base))
    odd = shutil.copytree(adapter, tmp_path / "odd")
    config = json.loads((odd / "adapter_config.json").read_text())
    (odd / "adapter_config.json").write_text(json.dumps(config | {"use_rslora": True}))
    assert "use_rslora is True; valid here: False" in said(path=str(odd))


def test_the_model_without_adapters_is_the_reference(rank_pools, tmp_path):
    base = make_folder(tmp_path / "base", moe=False, layers=2)
    found = rank_pools(1).run("lora_jobs:own_base", folder=str(base), parallel={}, lora=dict(rank=4, alpha=8.0))[0]
    assert found["starts_as_base"] and found["stands_still"]
    assert found["moved"] > 1e-3
    assert found["norms"][0] == 0 < found["norms"][1] < found["norms"][2]


def test_dropout_is_of_training_passes_alone(rank_pools, tmp_path):
    base = make_folder(tmp_path / "base", moe=False, layers=2)
    none, half = (
        rank_pools(1).run("lora_jobs:dropout", folder=str(base), lora=dict(rank=4, alpha=8.0, dropout=share))[0]
        for share in (0.0, 0.5)
    )
    assert not half["old_drew"]
    for passed in (*none["old"], *half["old"]):
        assert np.array_equal(passed, none["old"][0])
    assert none["norms"][0] == none["norms"][1] and half["norms"][0] != half["norms"][1]
