"""A sample of `configs/certify_fp8.yaml` and `certify_te_bf16.yaml` on living ranks; the matrices are soaks.

The reference is the layout of two pipeline stages, which the matrices show to equal one rank to the last bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_mega.weights.random_folder import make_random_folder

CONFIGS = Path(__file__).parents[2] / "configs"
SAMPLE = {
    "certify_fp8": (
        "certify_fp8_moe",
        ["PP2xVPP2", "TP2+SPxEP2", "EP2 distributed optimizer", "CP2", "DP2 uneven shards"],
    ),
    "certify_te_bf16": ("certify_moe", ["TP2+SPxEP2"]),
}


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_the_matrix_holds(rank_pools, tmp_path, name):
    shape, cases = SAMPLE[name]
    model = make_random_folder(CONFIGS / "models" / f"{shape}.json", tmp_path / "model", seed=1)
    found = rank_pools(2, transformer_engine=True).run(
        "fp8_jobs:certified",
        file=str(CONFIGS / f"{name}.yaml"),
        names=cases,
        reference="PP2",
        run_dir=str(tmp_path),
        model=str(model),
        overrides=["certify.num_steps=1", "batch.prompts_per_step=3"],
    )[0]
    assert [case for case, _ in found] == cases
    assert {case: result["outside"] for case, result in found if result["outside"]} == {}
    differences = {case: result["log_prob"]["value"] for case, result in found}
    # Exact where products keep their operands. Elsewhere not: an exactness that is asked for could fail.
    assert [case for case, value in differences.items() if value == 0] == [case for case in cases if case == "PP2xVPP2"]
