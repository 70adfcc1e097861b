"""A sample of `configs/certify_fp8.yaml` and `certify_te_bf16.yaml` on living ranks; the matrices are soaks.

The reference is the layout of two pipeline stages, which the matrices show to equal one rank to the last bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_mega.config import load_config
from gspo_mega.verify.certify.program import make_random_folder

SMALL = ["batch.prompts_per_step=3"]
CONFIGS = Path(__file__).parents[2] / "configs"
# By name: file, shape of the model, overrides, reference, cases. Of few sequences FP8 may reach more than half.
SAMPLE = {
    "blockwise": (
        "certify_fp8",
        "certify_fp8_moe",
        SMALL,
        "PP2",
        ["PP2xVPP2", "TP2+SPxEP2", "EP2 distributed optimizer", "CP2", "shared prompts EP2"],
    ),
    "mxfp8": ("certify_fp8", "certify_fp8_dense", ["fp8.recipe=mxfp8", *SMALL], "dense PP2", ["dense TP2+SP"]),
    "tensorwise": (
        "certify_fp8",
        "certify_fp8_dense",
        ["fp8.recipe=tensorwise", *SMALL],
        "dense PP2",
        ["dense TP2+SP", "dense shared prompts TP2+SP"],
    ),
    "delayed": ("certify_fp8", "certify_fp8_dense", ["fp8.recipe=delayed", *SMALL], "dense PP2", ["dense TP2"]),
    "delta": ("certify_fp8", "certify_fp8_qwen3_5", SMALL, "delta PP2", ["delta CP2"]),
    "delta experts": (
        "certify_fp8",
        "certify_fp8_qwen3_5_moe",
        SMALL,
        "delta experts PP2",
        ["delta experts EP2 distributed optimizer"],
    ),
    "te_bf16": ("certify_te_bf16", "certify_moe", SMALL, "PP2", ["TP2+SPxEP2", "shared prompts TP2+SPxEP2"]),
}


def certified(pool, tmp_path, name: str, overrides: list[str], **options) -> dict[str, dict]:
    """The results of a sample's cases, with the model and the reference in `tmp_path`."""
    file, shape, own, reference, cases = SAMPLE[name]
    model = make_random_folder(CONFIGS / "models" / f"{shape}.json", tmp_path / "model", seed=1)
    found = pool.run(
        "fp8_jobs:certified",
        file=str(CONFIGS / f"{file}.yaml"),
        names=cases,
        reference=reference,
        run_dir=str(tmp_path),
        model=str(model),
        overrides=["certify.num_steps=1", *own, *overrides],
        **options,
    )[0]
    assert [case for case, _ in found] == cases
    return dict(found)


@pytest.fixture(scope="module")
def delayed(rank_pools, tmp_path_factory) -> tuple[Path, dict[str, dict]]:
    """The folder of the sample `delayed`, for more cases against its reference, and what its own cases gave."""
    folder = tmp_path_factory.mktemp("delayed")
    return folder, certified(rank_pools(2, transformer_engine=True), folder, "delayed", [])


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_the_matrix_holds(request, rank_pools, tmp_path, name):
    if name == "delayed":
        found = request.getfixturevalue("delayed")[1]
    else:
        found = certified(rank_pools(2, transformer_engine=True), tmp_path, name, [])
    assert {case: result["outside"] for case, result in found.items() if result["outside"]} == {}
    # Exact where products keep their operands. Elsewhere not: an exactness that is asked for could fail.
    given = {
        case.name: case for case in load_config(CONFIGS / f"{SAMPLE[name][0]}.yaml", (), "certify").config.certify.cases
    }
    same = {case for case, result in found.items() if result["gradient"]["value"] == 0}
    assert same == {case for case in found if given[case].exact}
    # Only tensor ranks add sums that were rounded before.
    if SAMPLE[name][0] == "certify_fp8":
        assert all(
            result["reached"]["value"] == 0
            for case, result in found.items()
            if given[case].set.get("parallel.tensor", 1) == 1
        )


def test_a_sharp_certificate_is_the_same_on_a_processor_that_adds_in_another_order(rank_pools, delayed):
    pool, (folder, found) = rank_pools(2, transformer_engine=True), delayed
    here = found["dense TP2"]
    there = certified(pool, folder, "delayed", [], other_order=True, is_recorded=True)["dense TP2"]
    assert here == there and here["outside"] == []


def test_largest_values_that_are_not_shared_are_found_by_the_sharp_certificate_alone(rank_pools, delayed, tmp_path):
    """Of one layer; its scales then differ between tensor ranks. With bf16 between the products, whose last bit moves as
    much, the certificate holds. The reference has no tensor ranks.
    """
    pool, fault = rank_pools(2, transformer_engine=True), dict(shares_amax=False)
    sharp = certified(pool, delayed[0], "delayed", [], is_recorded=True, **fault)["dense TP2"]
    assert "reached" in sharp["outside"] and sharp["reached"]["value"] > 0.9
    coarse = certified(pool, tmp_path, "delayed", ["certify.sharp_fp8=false"], **fault)["dense TP2"]
    assert coarse["outside"] == [] and "reached" not in coarse
