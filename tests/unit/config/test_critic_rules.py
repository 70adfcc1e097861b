"""PPO's critic: what contradicts it, and what of it is said."""

import pytest
from config_refusals import refused

from gspo_mega.config import load_config
from gspo_mega.config.derived import may_correct_in_training, needs_old_log_prob_pass, penalises_kl

PPO = "algorithm=ppo"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["lora={rank: 4, alpha: 8}"], "lora: with `algorithm: ppo`: adapters together with a critic"),
        (["objective.scope=turn"], "objective.scope: turn with `algorithm: ppo`: advantages reach from a turn into"),
        (["cluster.colocated=true"], "cluster.colocated: true with `algorithm: ppo`: a critic's weights and optimizer"),
        (
            ["rollout.max_staleness=1"],
            "rollout.max_staleness: 1 with `algorithm: ppo`: values and advantages belong to",
        ),
        (["rollout.filter_constant_groups=true"], "a critic learns from groups whose rewards are all equal too"),
        (["advantage.turns=return_to_go"], "advantage.turns: has no effect with `algorithm: ppo`, whose advantages"),
        (["advantage.divide_by_std=false"], "advantage.divide_by_std: has no effect with `algorithm: ppo`"),
        (["model.weights=weights"], "critic.path: missing; the policy starts from model.weights"),
        (
            ["critic.kl_coefficient=0.1", "old_log_probs=rollout"],
            "critic.kl_coefficient: 0.1 with `old_log_probs: rollout`: the servers' log-probs differ",
        ),
        (
            ["critic.kl_coefficient=0.1", "model.weights=weights", "critic.path=backbone"],
            "kl.reference_path: missing; the policy starts from model.weights, and the reference of critic.kl",
        ),
        (["critic.precision=fp8"], "critic.precision: fp8 with `precision: bf16`: both models get the same packs"),
        (
            ["critic.precision=fp32", "engine.transformer_engine=true"],
            "critic.precision: fp32 with `engine.transformer_engine: true`, which rounds fp32 products",
        ),
        (["critic.warmup_steps=4", "train.num_steps=4"], "the policy would never be trained"),
        (["critic.optimizer={lr: 1e-6, min_lr: 1e-5}"], "critic.optimizer.min_lr: 1e-05 is above lr 1e-06"),
        (
            ["critic.optimizer={lr: 1e-6, distributed: false, moments_dtype: bf16}"],
            "critic.optimizer.moments_dtype: bf16 needs `critic.optimizer.distributed: true`",
        ),
        (["kl.coefficient=0.1"], "contradicts `algorithm: ppo`, which has no KL term"),
    ],
)
def test_what_contradicts_a_critic_is_refused(write, overrides, said):
    assert said in refused(write(), PPO, *overrides)


def test_what_needs_a_critic_is_refused_without_one(write):
    said = refused(write(), "critic.gamma=0.9")
    assert "critic: has no effect with `algorithm: gspo`; leave it out, or use: ppo" in said


def test_a_penalty_in_the_rewards_needs_a_pass_of_its_own_before_the_first_gradient(write):
    one = ["batch.num_mini_batches=1", "mismatch.correction=none"]
    without, penalised = (
        load_config(write(), [PPO, *one, *more]).config for more in ([], ["critic.kl_coefficient=0.05"])
    )
    assert not penalises_kl(without.algorithm, without.critic) and not needs_old_log_prob_pass(without)
    assert penalises_kl(penalised.algorithm, penalised.critic) and needs_old_log_prob_pass(penalised)
    corrected = load_config(write(), [PPO, one[0], "critic.kl_coefficient=0.05"]).config
    assert not may_correct_in_training(corrected)
    notices = load_config(write(), [PPO, "critic.kl_coefficient=0.05", "kl.reference_path=there"]).notices
    assert any("a third model in memory" in line for line in notices)
    assert not any("kl.reference_path has no effect" in line for line in notices)


def test_the_critic_is_said(write):
    notices = load_config(
        write(), [PPO, "critic.warmup_steps=5", "critic.whiten=false", "advantage.std_ddof=1"]
    ).notices
    assert any("gamma 1, lambda 0.95" in line for line in notices)
    assert any("the policy stays as it is for that many rollout batches" in line for line in notices)
    assert any("advantage.std_ddof has no effect with `critic.whiten: false`" in line for line in notices)
    assert not any("the paper divides by a group's own" in line for line in notices)


def test_scales_that_follow_passes_and_fp8_parameters_count_the_critics_models_too(write):
    fp8 = ["precision=fp8", "fp8.recipe=delayed", "critic.kl_coefficient=0.1"]
    assert "delayed with a KL term" in refused(write(), PPO, *fp8)
    optimizer = "critic.optimizer={lr: 1e-6, distributed: false}"
    shared = ["precision=fp8", "fp8.recipe=delayed", "fp8.parameters=true", optimizer]
    assert "only Megatron's distributed optimizer writes FP8 parameters" in refused(write(), PPO, *shared)
