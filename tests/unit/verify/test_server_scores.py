"""What a rank of the budget does: the sampled tokens carry the signs of the advantages that the run would give them, and
each point is computed as it says.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from run_configs import make_config

from gspo_mega.base.episodes import Group, one_turn_row
from gspo_mega.base.records import Prompt
from gspo_mega.cpu import delta_rule
from gspo_mega.verify.mismatch import ranks
from gspo_mega.verify.mismatch.causes import CHUNK, PACKING
from gspo_mega.verify.mismatch.ranks import sample_tokens
from gspo_mega.verify.mismatch.walks import Point

# By prompt; None: the scoring failed.
REWARDS = [(0.0, 1.0), (1.0, 1.0), (0.2, None), (0.5, 0.1)]


def group(number, rewards):
    prompt = Prompt(f"p{number}", "train", (1, 2), "")
    rows = [
        one_turn_row(
            trajectory_id=f"t{number}-{index}",
            group_id=number,
            prompt=prompt,
            response_token_ids=[3, 4],
            response_mask=[1, 1],
            rollout_log_probs=[-1.0, -2.0],
            weight_versions=[0, 0],
            finish_reason="stop",
            reward=reward,
            reward_error="no answer" if reward is None else None,
        )
        for index, reward in enumerate(rewards)
    ]
    return Group.from_rows(number, prompt, rows)


def signs(rewards=REWARDS, **sections):
    config = make_config(budget=dict(num_prompts=len(rewards)), **sections)
    asked = iter(range(len(rewards)))
    groups = [group(number, two) for number, two in enumerate(rewards)]
    rollouts = SimpleNamespace(
        prompts=SimpleNamespace(next=lambda: next(asked)),
        collector=SimpleNamespace(sample=lambda prompts, samples, temperature, **_: groups[: len(prompts)]),
    )
    tokens = sample_tokens(rollouts, config, lambda: None)
    assert len(tokens.sequences) == 2 * len(rewards)
    return tokens.tokens().signs.tolist()


def test_the_sign_is_that_of_the_reward_within_its_group():
    """Equal rewards, and a response whose only neighbour has none, have no sign."""
    assert signs() == [-1, 1, 0, 0, 0, 0, 1, -1]
    assert signs(advantage=dict(baseline="leave_one_out")) == signs()


def test_a_baseline_of_the_batch_gives_signs_to_equal_rewards_too():
    batch = dict(baseline="batch", std_over="batch")
    # The mean of the seven rewards is 3.8 / 7: a response whose only neighbour has none is compared with it, too.
    assert signs(advantage=batch) == [-1, 1, 1, 1, -1, 0, -1, -1]


@pytest.mark.parametrize(
    "sections",
    [
        dict(algorithm="ppo", critic=dict()),
        dict(algorithm="gspo_token", advantage=dict(turns="return_to_go")),
    ],
)
def test_advantages_that_the_rewards_alone_do_not_give_have_no_sign(sections):
    assert not any(signs(**sections))


def test_without_any_two_rewards_nothing_has_a_sign():
    assert signs([(None, 1.0), (None, None)]) == [0, 0, 0, 0]


def test_each_point_of_a_trainer_is_computed_with_its_own_chunks(monkeypatch, tmp_path):
    """And with the usual ones after it: what a point sets is not left to the next."""
    seen = []

    def score(engine, config, tokens, kind):
        seen.append((kind, delta_rule.CHUNK))
        return np.zeros(2), np.zeros(2)

    class Loaded:
        config = make_config()

    for name, stand_in in {
        "score_on_trainer": score,
        "build_engine": lambda config: object(),
        "destroy_groups": lambda: None,
        "load_config": lambda *given: Loaded,
        "FixedTokens": type("Tokens", (), {"load": staticmethod(lambda folder: None)}),
    }.items():
        monkeypatch.setattr(ranks, name, stand_in)
    points = [Point.of("trainer", settings) for settings in ({}, {CHUNK: 1}, {PACKING: "one_each"}, {CHUNK: 16})]
    work = {"tokens": str(tmp_path), "trainer": [[[point.side, point.settings], []] for point in points]}
    context = SimpleNamespace(run_dir=tmp_path, is_lead=True)
    ranks._trainer_points(context, work, tmp_path)
    assert seen == [("planned", 64), ("planned", 1), ("one_each", 64), ("planned", 16)] and delta_rule.CHUNK == 64
    assert all((tmp_path / f"{point.name}.npy").is_file() for point in points)
