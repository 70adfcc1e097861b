"""The norm that clips gradients is that of the whole gradient, in every family and layout; so is every mark it needs."""

from __future__ import annotations

import numpy as np
import pytest
from family_models import PROOFS, VARIANTS, make_family_folder

from gspo_mega.models.families import FAMILIES

# One layout of each way to cut a parameter, so that none is counted twice or not at all.
DENSE = {"TP2": dict(tensor=2), "TP2 without SP": dict(tensor=2, sequence=False), "PP2": dict(pipeline=2)}
EXPERTS = {"EP2": dict(expert=2), "TP2xEP2": dict(tensor=2, expert=2)}
ALLGATHER = dict(tensor=2, expert_tensor=2, expert_dispatcher="allgather")
FAMILY_MODELS = (
    "llama3",
    "qwen2-tied",
    "qwen3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    *PROOFS,
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
)


def layouts_of(variant: str) -> dict[str, dict]:
    family = FAMILIES[VARIANTS[variant][0]]
    if family.delta_net and family.experts is None:  # refused without SP
        return {name: layout for name, layout in DENSE.items() if "without" not in name}
    if family.experts is None:
        return DENSE
    has_no_parts = variant == "gpt_oss" or (variant in PROOFS and not PROOFS[variant].cuts_experts)
    return EXPERTS if has_no_parts else EXPERTS | {"TP2xETP2": ALLGATHER}  # experts with biases have no ETP


def test_every_family_is_tried():
    """The text parts of vision-language classes have the same parameters as the text models."""
    trained = {name for name, family in FAMILIES.items() if not family.text_part}
    assert {VARIANTS[variant][0] for variant in FAMILY_MODELS} == trained


@pytest.mark.parametrize("variant", FAMILY_MODELS)
def test_the_norm_that_clips_is_one_ranks_and_marks_are_what_megatrons_checkpoint_says(rank_pools, tmp_path, variant):
    folder = str(make_family_folder(tmp_path / variant, variant))
    one = rank_pools(1).run("norm_jobs:norms", folder=folder, layouts={"one": {}})[0]["one"]
    assert one["clipped"] == pytest.approx(one["whole"], rel=1e-5) and min(one["whole"]) > 0.1
    ranks = rank_pools(2).run("norm_jobs:norms", folder=folder, layouts=layouts_of(variant))
    assert [norms["marks"] for found in ranks for norms in found.values()] == 2 * len(layouts_of(variant)) * [[]]
    for name, norms in ranks[0].items():
        # Experts of a token may differ by rounding after a step, so later norms are compared with their own gradients.
        assert norms["clipped"][0] == pytest.approx(one["clipped"][0], rel=1e-5), name
        np.testing.assert_allclose(norms["clipped"], norms["whole"], rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("variant", ["qwen3_moe", "gpt_oss"])
def test_shards_of_the_distributed_optimizer_count_as_often(rank_pools, tmp_path, variant):
    folder = str(make_family_folder(tmp_path / variant, variant))
    found = rank_pools(2).run(
        "norm_jobs:norms", folder=folder, layouts=EXPERTS, optimizer=dict(distributed=True), precision="bf16"
    )[0]
    for name, norms in found.items():
        np.testing.assert_allclose(norms["clipped"], norms["whole"], rtol=1e-5, err_msg=name)


def test_adapters_count_as_often_as_they_are(rank_pools, tmp_path):
    folder = str(make_family_folder(tmp_path / "qwen3_moe", "qwen3_moe"))
    found = rank_pools(2).run("norm_jobs:norms", folder=folder, layouts=EXPERTS, lora=dict(rank=4, alpha=8))[0]
    for name, norms in found.items():
        np.testing.assert_allclose(norms["clipped"], norms["whole"], rtol=1e-5, err_msg=name)
