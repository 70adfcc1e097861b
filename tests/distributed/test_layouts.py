"""Every layout computes the same numbers as one rank: log-probs, loss, gradient, weights after three steps."""

from __future__ import annotations

import layout_jobs
import numpy as np
import pytest
from layout_models import make_folder
from safetensors.numpy import load_file

from gspo_mega.algorithm.diagnostics import POLICY_SUMS

DENSE = {
    "DP2": dict(world=2),
    "DP2-distributed-optimizer": dict(world=2, distributed=True),
    "TP2": dict(world=2, tensor=2, sequence=False),
    "TP2+SP": dict(world=2, tensor=2),
    "TP4": dict(world=4, tensor=4, sequence=False),  # two ranks a key-value head
    "TP4+SP": dict(world=4, tensor=4),
    "PP2": dict(world=2, pipeline=2),
    "CP2": dict(world=2, context=2),
    "PP2-tied": dict(world=2, pipeline=2, tied=True),
    "TP2+SP-tied": dict(world=2, tensor=2, tied=True),
}
MOE = {
    "DP2": dict(world=2),
    "EP2": dict(world=2, expert=2),
    "EP2-distributed-optimizer": dict(world=2, expert=2, distributed=True),
    "PP2": dict(world=2, pipeline=2),
    "CP2": dict(world=2, context=2),
    "TP2+SP-EP2": dict(world=2, tensor=2, expert=2),
    "TP2+SP-ETP2": dict(world=2, tensor=2, expert_tensor=2),  # one expert rank: experts are cut as everything else is
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        ("dense", False): make_folder(root / "dense", moe=False),
        ("dense", True): make_folder(root / "tied", moe=False, tied=True),
        ("moe", False): make_folder(root / "moe", moe=True),
    }


@pytest.fixture(scope="session")
def references(rank_pools, folders):
    def run(folder):
        return rank_pools(1).run(
            "layout_jobs:run_layout", folder=folder, parallel={}, optimizer=dict(lr=1e-3, distributed=False)
        )[0]

    return {key: run(str(folder)) for key, folder in folders.items()}


def relative(difference: np.ndarray, reference: np.ndarray) -> float:
    norm = np.linalg.norm(reference)
    return float(np.linalg.norm(difference) / norm) if norm else float(np.linalg.norm(difference))


def flat(tensors: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([tensors[name].ravel() for name in sorted(tensors)])


@pytest.mark.parametrize(
    ("kind", "layout"), [("dense", n) for n in DENSE] + [("moe", n) for n in MOE], ids=lambda value: value
)
def test_layout_equals_single_rank(rank_pools, folders, references, kind, layout):
    parallel = dict((DENSE if kind == "dense" else MOE)[layout])
    world, tied = parallel.pop("world"), parallel.pop("tied", False)
    distributed = parallel.pop("distributed", False)
    folder, want = folders[kind, tied], references[kind, tied]
    got = rank_pools(world).run(
        "layout_jobs:run_layout",
        folder=str(folder),
        parallel=parallel,
        optimizer=dict(lr=1e-3, distributed=distributed),
    )[0]

    # Sums over a sequence's tokens of trainer - rollout: at most 40 tokens of 1e-5 each.
    lengths = np.maximum(want["mismatch"][:, 0], 1)
    assert np.array_equal(got["mismatch"][:, 0], want["mismatch"][:, 0])
    assert (np.abs(got["mismatch"][:, 1] - want["mismatch"][:, 1]) / lengths).max() < 1e-5
    assert np.abs(got["log_s"] - want["log_s"]).max() < 1e-5
    # The recorded batch is clipped on both sides, away from the edges, and the same sequences everywhere.
    counts, reference = (dict(zip(POLICY_SUMS, result["totals"])) for result in (got, want))
    assert reference["clipped_high_sequences"] > 0.9 and reference["clipped_low_sequences"] > 0.9
    assert reference["num_sequences"] - reference["clipped_high_sequences"] - reference["clipped_low_sequences"] > 0.9
    for edge in (np.log1p(-layout_jobs.CLIP_LOW), np.log1p(layout_jobs.CLIP_HIGH)):
        assert np.abs(want["log_s"] - edge).min() > 1e-5
    for name in POLICY_SUMS:
        if name.startswith(("num_", "clipped_", "positive_", "negative_")):
            assert abs(counts[name] - reference[name]) < 1e-9, name
    mean_term = (reference["positive_mass"] + reference["negative_mass"]) / reference["num_sequences"]
    assert abs(counts["objective"] - reference["objective"]) < 1e-5 * mean_term

    if not distributed:
        assert got["gradient"].keys() == want["gradient"].keys()
        for name, reference in want["gradient"].items():
            assert np.abs(reference).max() > 0, f"{name} has no gradient: the comparison would prove nothing"
            assert relative(got["gradient"][name] - reference, reference) < 1e-5, name
    start = load_file(folder / "model.safetensors")
    # Of the whole update: Adam divides by |gradient|, so a tensor of tiny gradients alone shows their rounding.
    updates = {name: reference - start[name] for name, reference in want["weights"].items()}
    assert all(np.linalg.norm(update) > 0 for update in updates.values())
    error = {name: got["weights"][name] - reference for name, reference in want["weights"].items()}
    assert relative(flat(error), flat(updates)) < 1e-4
    assert np.allclose(got["grad_norms"], want["grad_norms"], rtol=1e-5)


@pytest.mark.parametrize(("kind", "layout"), [("dense", "DP2"), ("dense", "TP2+SP"), ("moe", "EP2")])
def test_bf16_follows_fp32(rank_pools, folders, references, kind, layout):
    """bf16 has 8 bits: its log-probs stay near those of fp32 and its updates point the same way, in each layout."""
    parallel = dict((DENSE if kind == "dense" else MOE)[layout])
    world, folder, want = parallel.pop("world"), folders[kind, False], references[kind, False]
    got = rank_pools(world).run("layout_jobs:run_layout", folder=str(folder), parallel=parallel, precision="bf16")[0]
    tokens = np.maximum(want["mismatch"][:, 0], 1)
    difference = np.abs(got["mismatch"][:, 1] - want["mismatch"][:, 1]) / tokens
    assert 1e-6 < difference.max() < 0.1, "the same to fp32 rounding would mean that fp32 was computed"
    start = load_file(folder / "model.safetensors")
    update = flat({name: got["weights"][name] - start[name].astype(np.float32) for name in start})
    reference = flat({name: want["weights"][name] - start[name] for name in start})
    assert float(update @ reference) / (np.linalg.norm(update) * np.linalg.norm(reference)) > 0.6
