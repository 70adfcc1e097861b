"""What follows from `critic`: its defaults, and the configuration that its engine is built with."""

import pytest

from gspo_mega.config import load_config
from gspo_mega.config.derived import (
    compares_within_groups,
    critic_config,
    critic_of,
    critic_path,
    least_of_group,
    policy_steps,
)
from gspo_mega.config.schema import Critic

PPO = "algorithm=ppo"


def test_a_critic_has_its_defaults_where_its_section_is_absent(write):
    config = load_config(write(), [PPO, "batch.group_size=1"]).config
    assert config.critic == critic_of(config.algorithm, config.critic) == Critic() and least_of_group(config) == 1
    assert (config.objective.clip_low, config.objective.clip_high) == (0.2, 0.2)
    assert config.objective.aggregation == "token_mean" and not config.critic.bootstrap_truncated
    own = critic_config(config)
    assert (own.optimizer, own.precision, own.recompute) == (config.optimizer, config.precision, config.recompute)
    plain = load_config(write(), []).config
    assert plain.critic is None is critic_of(plain.algorithm, plain.critic) and least_of_group(plain) == 2
    with pytest.raises(ValueError, match="`algorithm: gspo` has no critic"):
        critic_config(plain)


def test_the_critics_engine_has_an_optimizer_precision_and_recompute_of_its_own(write):
    config = load_config(
        write(),
        [PPO, "critic.optimizer={lr: 5e-6}", "critic.precision=fp32", "critic.recompute={granularity: full}"],
    ).config
    own = critic_config(config)
    assert (own.optimizer.lr, own.precision, own.recompute.granularity) == (5e-6, "fp32", "full")
    assert config.precision == "bf16" and config.optimizer.lr != 5e-6


def test_the_policys_schedule_is_made_for_the_steps_behind_the_critics_warm_up(write):
    overrides = [PPO, "train.num_steps=6", "critic.warmup_steps=4", "batch.num_mini_batches=2"]
    loaded = load_config(write(), [*overrides, "optimizer.warmup_steps=4"])
    assert policy_steps(loaded.config) == 4
    assert any("is not over before the run ends (4 optimizer steps)" in line for line in loaded.notices)
    later = load_config(write(), [*overrides, "optimizer.warmup_steps=3"]).notices
    assert not any("is not over before the run ends" in line for line in later)
    with pytest.raises(ValueError, match="has no section `train`"):
        policy_steps(load_config(write(), [PPO]).config)


def test_the_critics_backbone_is_the_policys_unless_it_is_named(write):
    named = load_config(write(), [PPO, "critic.path=backbone"]).config
    plain = load_config(write(), [PPO]).config
    assert (critic_path(named), critic_path(plain)) == ("backbone", plain.model.path)
    assert critic_path(load_config(write(), []).config) == plain.model.path


def test_how_many_responses_advantages_need(write):
    """Two where they are relative to the group's others, one against a critic's values or the whole batch's mean."""
    for overrides, least in (
        ([], 2),
        (["advantage.std_over=batch"], 2),
        (["advantage.baseline=leave_one_out", "advantage.divide_by_std=false"], 2),
        (["advantage.baseline=batch", "advantage.std_over=batch"], 1),
        ([PPO], 1),
    ):
        config = load_config(write(), overrides).config
        assert least_of_group(config) == least and compares_within_groups(config) == (least == 2)
