"""`gspo-mega compare` on a tiny recorded run: on one rank and on two, against autograd of transformers' model."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import slow_objectives as slow
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "recovery"))
from recovery_support import make_recording  # the folder is not a package

from gspo_mega.algorithm.advantages import group_advantages
from gspo_mega.base.run_folder import RunFolder, atomic_write_text
from gspo_mega.config import load_config, render_config
from gspo_mega.config.algorithms import RECIPES
from gspo_mega.data.journal.journal import Journal
from gspo_mega.verify.compare.run import Request, compare, render

NAMES = ["gspo", "gspo_token", "grpo", "dapo", "dr_grpo", "luspo", "cispo", "sapo", "dppo", "minirl", "vespo", "gmpo"]
SLOW = {"dapo": "grpo", "dr_grpo": "grpo", "luspo": "gspo"}
# The run's own range is wider than the paper's: its policies are further apart than a step's.
OF_RUN = ("gspo", "gspo_token")  # two forms of one objective
OWN = ["objective.clip_low=0.004", "objective.clip_high=0.004"]
PAPERS = ["objective.clip_low=0.0003", "objective.clip_high=0.0004"]


def moved(start: Path, to: Path) -> Path:
    """The model of `start` with noise on its weights, as if trained."""
    to.mkdir()
    for file in start.iterdir():
        if file.suffix != ".safetensors":
            (to / file.name).write_bytes(file.read_bytes())
            continue
        generator = torch.Generator().manual_seed(1)
        tensors = {
            name: (t.float() + 0.002 * torch.randn(t.shape, generator=generator)).to(t.dtype)
            for name, t in sorted(load_file(file).items())
        }
        save_file(tensors, to / file.name, {"format": "pt"})
    return to


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(a run's folder with rollouts and no checkpoint, its first weights, weights after it)."""
    root = tmp_path_factory.mktemp("compared")
    loaded = load_config(make_recording(root), [f"run.dir={root}", "run.name=recorded", *OWN])
    folder = RunFolder(root / "recorded")
    atomic_write_text(folder.config_file, render_config(loaded.config))
    start = Path(loaded.config.model.path)
    return folder, start, moved(start, root / "moved")


@pytest.fixture(scope="module")
def found(run):
    folder, _, after = run
    code, numbers = compare(Request(folder.path, NAMES, str(after), "start", 1), lambda line: None)
    assert code == 0
    return numbers


def log_probs(model: Path, rows, with_gradient: bool):
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    result = []
    for row in rows:
        tokens = torch.tensor([[*row.prompt.token_ids, *row.response_token_ids]])
        with torch.set_grad_enabled(with_gradient):
            logits = policy(tokens).logits[0, len(row.prompt.token_ids) - 1 : -1]
            values = torch.log_softmax(logits, -1).gather(1, torch.tensor(row.response_token_ids)[:, None])[:, 0]
        result.append(values.double())
    return policy, result


def test_the_numbers_are_those_of_autograd_of_the_slow_reference(run, found):
    folder, start, after = run
    batch = Journal(folder.journal_dir).read(0).batch
    rows = batch.trajectories
    _, old = log_probs(start, rows, False)
    policy, new = log_probs(after, rows, True)
    rewards = torch.tensor([row.reward for row in batch.episodes])
    groups = torch.tensor([row.group_id for row in rows])
    parameters = [p for p in policy.parameters() if p.requires_grad]
    gradients = {}
    for name in NAMES:
        centred = name in ("dr_grpo", "dppo", "minirl", "vespo")
        advantages = group_advantages(rewards, groups, divide_by_std=not centred).tolist()
        recipe = RECIPES[name]
        low, high = (0.004, 0.004) if name in OF_RUN else (recipe.clip_low, recipe.clip_high)
        slow_rows = [
            slow.Row(new[i], old[i], torch.tensor(row.rollout_log_probs, dtype=torch.float64), advantages[i])
            for i, row in enumerate(rows)
        ]
        objective = slow.objective(SLOW.get(name, name), slow_rows, low, high, recipe.aggregation, 16)
        got = found["algorithms"][name]
        assert got["objective"] == pytest.approx(float(objective.detach()), rel=1e-4, abs=1e-5), name
        if not objective.requires_grad:
            gradients[name] = torch.zeros(1)
            continue
        parts = torch.autograd.grad(objective, parameters, retain_graph=True, allow_unused=True)
        gradients[name] = torch.cat([part.double().flatten() for part in parts if part is not None])
        assert got["gradient_norm"] == pytest.approx(float(gradients[name].norm()), rel=1e-3), name
    for one in NAMES:
        for other in NAMES:
            a, b = gradients[one], gradients[other]
            expected = float(a @ b / a.norm() / b.norm())
            assert found["cosines"][one][other] == pytest.approx(expected, abs=1e-3), (one, other)


def test_gspo_token_is_gspo_in_the_runs_own_range(found):
    """The claim of docs/studies/claims.md (e): one gradient, and the same responses without one."""
    one, other = (found["algorithms"][name] for name in OF_RUN)
    assert found["cosines"]["gspo"]["gspo_token"] == pytest.approx(1.0, abs=1e-9)
    for key in ("gradient_norm", "objective"):
        assert one[key] == pytest.approx(other[key], rel=1e-6)
    assert one["dropped"] == other["dropped"] and one["weakened"] == other["weakened"] == []
    shared = {"clip_low": 0.004, "clip_high": 0.004, "range_of": "run"}
    assert all({key: row[key] for key in shared} == shared for row in (one, other))
    assert found["algorithms"]["luspo"]["range_of"] == "paper"


def test_objectives_differ_and_some_responses_are_dropped(found):
    of_gspo = found["cosines"]["gspo"]
    assert all(of_gspo[name] < 0.999 for name in NAMES if name not in OF_RUN and of_gspo[name] is not None)
    assert 0 < len(found["algorithms"]["gspo"]["dropped"]) < found["num_responses"]
    text = render(found)
    assert all(any(line.startswith(name) for line in text.splitlines()) for name in NAMES)


def test_two_context_parallel_ranks_find_the_same(run, found):
    folder, _, after = run
    layout = ["cluster.ranks_per_node=2", "parallel.context=2", "batch.micro_batch_tokens=32", *PAPERS]
    code, other = compare(Request(folder.path, NAMES, str(after), "start", 1, layout), lambda line: None)
    assert code == 0
    for name in NAMES:
        one, two = found["algorithms"][name], other["algorithms"][name]
        if name not in OF_RUN:
            assert two["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=1e-5), name
            assert two["num_effective"] == pytest.approx(one["num_effective"], rel=1e-4), name
            assert (two["dropped"], two["weakened"]) == (one["dropped"], one["weakened"]), name
            assert math.isclose(two["token_clip_fraction"], one["token_clip_fraction"]), name
    # An override of the run's range is one of both forms.
    assert {other["algorithms"][name]["clip_high"] for name in OF_RUN} == {4e-4}
    assert other["cosines"]["gspo"]["gspo_token"] == pytest.approx(1.0, abs=1e-6)
