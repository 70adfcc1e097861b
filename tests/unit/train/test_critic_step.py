"""What a step does with a critic whose values are given: the advantages of every token, and the weights of its loss."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from episode_trees import context, sampled
from run_configs import make_config

from gspo_mega.base.episodes import Episode, Group, RolloutBatch
from gspo_mega.base.records import Prompt
from gspo_mega.config.derived import critic_of
from gspo_mega.engine.critic import Values
from gspo_mega.engine.optimizer import StepResult
from gspo_mega.plan.layout import Layout
from gspo_mega.train.batches import assemble, fill_advantages
from gspo_mega.train.critic_step import CriticStep

LAYOUT = Layout(
    world_size=1, tensor=1, pipeline=1, virtual_pipeline=None, context=1, data=1, expert=1, expert_tensor=1,
    expert_data=1, sequence_parallel=False, stage_layers=(2,), padded_vocab_size=512, sequence_multiple_tokens=1,
    pack_multiple_tokens=1, mini_batch_sequences=(8,), attention_crossover_tokens=8192, equal_packs=False,
)  # fmt: skip
PROMPT = Prompt("t:0", "t", (3, 1), "")


def episodes() -> list[Episode]:
    """One of two branches, of 2 tokens and of 1, whose reward is 1; and one of 3 tokens, whose reward is 2."""
    branched = [context(0, -1, [3, 1]), sampled(1, 0, [5, 6]), sampled(2, 0, [7], cause="resampled")]
    plain = [context(0, -1, [3, 1]), sampled(1, 0, [8, 9, 10])]
    return [Episode("a", 0, PROMPT, branched, reward=1.0), Episode("b", 0, PROMPT, plain, reward=2.0)]


class Engine:
    """A critic whose value of every state is .5. `asked`: what it was trained with."""

    def __init__(self, tensor: int = 0, context: int = 0) -> None:
        group = SimpleNamespace(rank=0, size=1)
        self.groups = SimpleNamespace(
            is_last_stage=True,
            tensor=SimpleNamespace(rank=tensor, size=1),
            context=SimpleNamespace(rank=context, size=1),
            data=group,
        )
        self.asked: list[tuple] = []

    def values(self, packs):
        return [
            Values(torch.full((int((pack.loss_mask > 0).sum()),), 0.5), torch.full((pack.num_sequences,), 0.25))
            for pack in packs
        ]

    def train_mini_batch(self, packs, before, returns, coefficients, clip_range):
        self.asked.append((packs, before, returns, coefficients, clip_range))
        return StepResult(1.0, 1e-5, False), torch.arange(8.0)


def stepped(engine: Engine, **critic):
    config = make_config(
        algorithm="ppo",
        critic=dict(gamma=1.0, gae_lambda=1.0, whiten=False, clip_range=None, **critic),
        objective=dict(
            aggregation="sequence_mean_token_mean" if critic["aggregation"] == "token_mean" else "token_mean"
        ),
        batch=dict(prompts_per_step=1, group_size=2, num_mini_batches=1),
    )
    batch = RolloutBatch(0, [Group(0, PROMPT, episodes())])
    fill_advantages(batch, config, 0)
    mini_batches = assemble(batch, config, LAYOUT, 0)[0]
    settings = critic_of(config.algorithm, config.critic)
    assert settings is not None
    step = CriticStep(engine, settings, std_ddof=0)
    step.estimate(mini_batches, [None], [None])
    for place, mini_batch in enumerate(mini_batches):
        step.train(place, mini_batch)
    return step, mini_batches


@pytest.mark.parametrize(
    ("aggregation", "wanted"),
    [
        ("token_mean", {0: 2 / 6, 1: 1 / 6, 2: 3 / 6}),
        ("sequence_mean_token_mean", {0: 2 / 3 / 2, 1: 1 / 3 / 2, 2: 1 / 2}),
    ],
)
def test_the_value_loss_is_an_average_of_its_own(aggregation, wanted):
    """Six tokens in two episodes. The policy averages the other way, and has the other denominator."""
    engine = Engine()
    _, (mini_batch,) = stepped(engine, aggregation=aggregation)
    assert mini_batch.denominator != mini_batch.value_denominator
    ((packs, before, _, coefficients, clip_range),) = engine.asked
    found = {
        row: float(weight)
        for pack, weights in zip(packs, coefficients, strict=True)
        for row, weight in zip(pack.trajectory_index.tolist(), weights, strict=True)
        if row >= 0
    }
    assert found == pytest.approx(wanted) and sum(found.values()) == pytest.approx(1.0)
    assert clip_range is None and all(bool((one == 0.5).all()) for one in before)


def test_advantages_and_returns_of_every_token():
    """With gamma = lambda = 1 and values of .5 a token's return is the reward behind it, and its advantage that - .5."""
    step, (mini_batch,) = stepped(Engine(), aggregation="token_mean")
    for pack in mini_batch.micro_batches:
        for s, row in enumerate(pack.trajectory_index.tolist()):
            if row >= 0:
                own = (pack.sequence_ids == s) & (pack.loss_mask > 0)
                assert pack.token_advantages[own].tolist() == [(0.5, 0.5, 1.5)[row]] * (2, 1, 3)[row]
    part = step.part
    assert dict(zip(part.rows.tolist(), part.advantages.tolist(), strict=True)) == {0: 0.5, 1: 0.5, 2: 1.5}
    # Six values of .5; returns of 1 three times and of 2 three times; errors of .5 and of 1.5.
    assert part.old_sums.tolist() == [6, 3.0, 9.0, 15.0, 6.0, 7.5]
    assert part.step_sums.tolist() == [list(range(8))] and part.penalty.tolist() == [0, 0]
    assert [one.grad_norm for one in step.results] == [1.0]


def test_each_number_is_reported_by_one_rank():
    """Ranks of a tensor group have the same tokens; those of a context group have their own, and the same rows."""
    step, _ = stepped(Engine(tensor=1), aggregation="token_mean")
    assert not step.part.old_sums.any() and len(step.part.rows) == 0
    step, _ = stepped(Engine(context=1), aggregation="token_mean")
    assert step.part.old_sums[0] == 6 and len(step.part.rows) == 0
    assert np.array_equal(step.part.step_sums, np.arange(8.0)[None])
