"""After a publish the real server and the real trainer give every sampled token the same log-prob, in fp32.

Dense on two tensor-parallel ranks, MoE on two expert-parallel ones. What "the same" means is `agreement_rule.py`.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
from agreement_rule import Agreement, compare
from rank_pool import RankPool

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")

LAYOUTS = {"dense": {"tensor": 2}, "moe": {"expert": 2}}
BATCH = {"prompts_per_step": 80, "group_size": 4, "num_mini_batches": 4, "micro_batch_tokens": 2048}
LEARNT_STEPS = 6


class Side:
    """The trainer's two ranks before one server. Every publish and every rollout batch gets the next number."""

    def __init__(self, ranks: RankPool, server, parallel: dict, weights_dir: Path, **batch: int) -> None:
        """`batch`: keys of the section that are other than in `BATCH`."""
        self.ranks, self.weights_dir = ranks, weights_dir
        self.version = self.step = 0
        self._run(
            "open_trainer",
            config_path=str(server.config_path),
            attempt=str(server.attempt.path),
            batch=BATCH | batch,
            parallel={"expert_tensor": 1, **parallel},
            weights_dir=str(weights_dir),
        )

    def _run(self, job: str, **arguments) -> list:
        return self.ranks.run(f"agreement_ranks:{job}", timeout=600, **arguments)

    def close(self) -> None:
        self._run("close_trainer")

    def digests(self) -> dict[str, str]:
        return self._run("act", name="digests")[0]

    def learn(self, num_steps: int) -> None:
        self._run("act", name="learn", num_steps=num_steps)

    def publish(self, method: str) -> Path:
        """Where it is on disk, if the method is that."""
        self.version += 1
        self._run("act", name="publish", weight_version=self.version, method=method)
        return self.weights_dir / f"v{self.version:08d}"

    def serve_folder(self, path: Path) -> None:
        self.version += 1
        self._run("act", name="serve_folder", path=str(path), weight_version=self.version)

    def roll_out(self, temperature: float, **sampling) -> Agreement:
        """`sampling`: other keys of `rollout`."""
        self.step += 1
        parts = self._run("roll_out", temperature=temperature, step=self.step, **sampling)
        rows = [row for _, scored in parts for row in scored]
        assert len(rows) == len(set(rows)), "two ranks report one trajectory"
        return compare(parts[0][0], {row: value for _, scored in parts for row, value in scored.items()})

    def roll_out_and_train(self, temperature: float) -> list[np.ndarray]:
        """log s of the trajectories of each mini-batch, from all ranks that report."""
        self.step += 1
        parts = self._run("roll_out_and_train", temperature=temperature, step=self.step)
        return [np.concatenate(log_s) for log_s in zip(*parts, strict=True)]


@pytest.fixture(scope="module")
def ranks():
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="module", params=LAYOUTS)
def side(request, ranks, tmp_path_factory):
    """A trainer whose every weight has moved from where it started, before the session's server of that kind."""
    server = request.getfixturevalue(f"{request.param}_server")
    side = Side(ranks, server, LAYOUTS[request.param], tmp_path_factory.mktemp("agreement") / "weights")
    untaught = side.digests()
    side.learn(LEARNT_STEPS)
    taught = side.digests()
    assert [name for name in untaught if untaught[name] == taught[name]] == []
    yield side
    side.close()
    server.restore_weights()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("method", ["disk", "distributed"])
def test_log_probs_agree_after_a_publish(side, method, temperature):
    side.learn(1)
    side.publish(method)
    agreement = side.roll_out(temperature)
    assert agreement.num_tokens >= 10_000
    assert agreement.problems() == [], agreement


@pytest.mark.parametrize(
    "kept",
    [
        {"temperature": 1.0, "top_k": 20, "top_p": 0.8},
        {"temperature": 0.7, "top_k": 400, "top_p": 0.5},
        {"temperature": 0.5, "top_k": 100, "top_p": 0.9, "min_p": 0.1},
    ],
    ids=lambda kept: " ".join(f"{name} {value}" for name, value in kept.items()),
)
def test_log_probs_over_the_kept_tokens_agree(side, kept):
    """Both engines normalise over the set that the server returned. The model is nearly uniform over 512 tokens, so 20
    of them have less than 0.8 of the mass and top-k decides; in the other settings top-p or min-p does.
    """
    side.publish("disk")
    agreement = side.roll_out(**kept)
    assert agreement.num_tokens >= 10_000
    assert agreement.problems() == [] and agreement.largest_gap < 1e-5, agreement
    sizes = np.concatenate(agreement.kept)
    assert sizes.min() >= 1 and sizes.max() <= kept["top_k"]
    assert (sizes == 20).all() if kept["top_k"] == 20 else len(np.unique(sizes)) > 10, np.unique(sizes)


def test_a_step_of_the_policy_begins_where_it_sampled_and_agrees_afterwards(side):
    """The first mini-batch is trained on with the weights and packs of its old log-probs: not one bit may differ."""
    side.publish("disk")
    first, *later = side.roll_out_and_train(1.0)
    assert len(first) == BATCH["prompts_per_step"] * BATCH["group_size"] // BATCH["num_mini_batches"]
    assert (first == 0).all()
    assert all((log_s != 0).any() for log_s in later)
    side.publish("distributed")
    assert side.roll_out(1.0).problems() == []


def test_one_layer_of_the_version_before_makes_them_disagree(side, tmp_path):
    """The server holds all of a version but one layer, which is an optimizer step older; nothing told it to refuse."""
    before = side.publish("disk")
    side.learn(1)
    present = side.publish("disk")
    side.serve_folder(present)
    assert side.roll_out(1.0).problems() == []

    side.serve_folder(with_layer_of(present, before, 1, tmp_path / "stale"))
    agreement = side.roll_out(1.0)
    assert any("log-probs differ" in problem for problem in agreement.problems()), agreement


def with_layer_of(present: Path, before: Path, layer: int, target: Path) -> Path:
    """A copy of the folder `present` whose tensors of one layer are those of `before`."""
    shutil.copytree(present, target)
    older = {name: tensor for file in before.glob("*.safetensors") for name, tensor in load_file(file).items()}
    num_replaced = 0
    for file in target.glob("*.safetensors"):
        tensors = load_file(file)
        stale = {name: older[name] for name in tensors if f"layers.{layer}." in name}
        num_replaced += len(stale)
        save_file(tensors | stale, file, metadata={"format": "pt"})
    assert num_replaced > 0
    return target
