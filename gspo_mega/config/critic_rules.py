"""Rules between PPO's critic and other keys: what contradicts, and what changes meaning."""

from __future__ import annotations

from collections.abc import Iterator

from gspo_mega.base.errors import Violation
from gspo_mega.config.critic_config import critic_config, critic_of
from gspo_mega.config.recipes import RECIPES
from gspo_mega.config.schema import Config


def critic_violations(config: Config) -> Iterator[Violation]:
    """What contradicts a critic, and what needs one."""
    critic = critic_of(config)
    if critic is None:
        owners = ", ".join(name for name, recipe in RECIPES.items() if recipe.has_critic)
        if config.critic is not None:
            yield Violation(
                "critic", f"has no effect with `algorithm: {config.algorithm}`; leave it out, or use: {owners}"
            )
        return
    yield from _unused_advantage_keys(config)
    yield from _policy_alone(config)
    if config.rollout.filter_constant_groups:
        yield Violation(
            "rollout.filter_constant_groups",
            f"true with `algorithm: {config.algorithm}`: a critic learns from groups whose rewards are all equal too;"
            " valid: false",
        )
    if config.model.weights is not None and critic.path is None:
        yield Violation(
            "critic.path",
            "missing; the policy starts from model.weights, and the critic would start from model.path. Name the"
            " backbone's folder",
        )
    if critic.kl_coefficient > 0 and config.old_log_probs == "rollout":
        yield Violation(
            "critic.kl_coefficient",
            f"{critic.kl_coefficient:g} with `old_log_probs: rollout`: the servers' log-probs differ from the"
            " reference's by the gap between the engines, too; valid: 0, or `old_log_probs: trainer`",
        )
    if critic.kl_coefficient > 0 and config.model.weights is not None and config.kl.reference_path is None:
        yield Violation(
            "kl.reference_path",
            "missing; the policy starts from model.weights, and the reference of critic.kl_coefficient would be"
            " model.path. Name the reference's folder",
        )
    own = critic_config(config)
    if own.precision != config.precision and "fp8" in (own.precision, config.precision):
        yield Violation(
            "critic.precision",
            f"{own.precision} beside `precision: {config.precision}`: both models get the same packs, whose lengths"
            " FP8 rounds up; valid: leave it out",
        )
    if own.precision == "fp32" and config.engine.transformer_engine:
        yield Violation(
            "critic.precision",
            "fp32 with `engine.transformer_engine: true`, which rounds fp32 products to TF32 and has no fp32"
            " attention; valid: bf16",
        )
    if config.train is not None and critic.warmup_steps >= config.train.num_steps:
        yield Violation(
            "critic.warmup_steps",
            f"{critic.warmup_steps} of train.num_steps {config.train.num_steps}: the policy would never be trained; at"
            f" most {config.train.num_steps - 1}",
        )


def _unused_advantage_keys(config: Config) -> Iterator[Violation]:
    """Keys about advantages that are relative to a group or a batch."""
    for key in ("divide_by_std", "baseline", "std_over", "turns", "turn_discount"):
        default = type(config.advantage).model_fields[key].default
        if getattr(config.advantage, key) != default:
            yield Violation(
                f"advantage.{key}",
                f"has no effect with `algorithm: {config.algorithm}`, whose advantages are estimated from the critic's"
                " values and the rewards of turns (critic.gamma, critic.gae_lambda, critic.whiten); leave it out",
            )


def _policy_alone(config: Config) -> Iterator[Violation]:
    """What is made for a policy without a second model, or for rollouts of the weights that are trained."""
    name = config.algorithm
    if config.lora is not None:
        yield Violation(
            "lora", f"with `algorithm: {name}`: a critic is trained whole, and adapters beside one are not made; remove"
        )
    if config.objective.scope == "turn":
        yield Violation(
            "objective.scope",
            f"turn with `algorithm: {name}`: advantages reach from a turn into the next one, so that both are in one"
            " row; valid: trajectory",
        )
    if config.cluster.colocated:
        yield Violation(
            "cluster.colocated",
            f"true with `algorithm: {name}`: a critic's weights and optimizer are not moved off the GPUs while servers"
            " sample; valid: false",
        )
    if config.rollout.max_staleness > 0:
        yield Violation(
            "rollout.max_staleness",
            f"{config.rollout.max_staleness} with `algorithm: {name}`: values and advantages are of the weights that"
            " are trained, not of earlier ones that sampled; valid: 0",
        )
