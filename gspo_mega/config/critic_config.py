"""What follows from `critic`: whether a run has one, and the configuration that its engine is built with.

One place for the session, the plan and certification. Owns no default and no refusal.
"""

from __future__ import annotations

from gspo_mega.config.recipes import RECIPES
from gspo_mega.config.schema import Config
from gspo_mega.config.schema.critic_sections import Critic


def critic_of(config: Config) -> Critic | None:
    """The critic's section where the algorithm has a critic, with its defaults where it is absent; else None."""
    if not RECIPES[config.algorithm].has_critic:
        return None
    return config.critic or Critic()


def critic_config(config: Config) -> Config:
    """The run's configuration with the critic's precision, recompute and optimizer, and without adapters: what its
    engine is built with, and what its memory and time follow from. Raises ValueError where there is no critic.
    """
    critic = critic_of(config)
    if critic is None:
        raise ValueError(f"`algorithm: {config.algorithm}` has no critic")
    return config.model_copy(
        update={
            "precision": critic.precision or config.precision,
            "recompute": critic.recompute or config.recompute,
            "optimizer": critic.optimizer or config.optimizer,
            "lora": None,
        }
    )


def penalises_kl(config: Config) -> bool:
    """Whether the tokens' rewards are less a penalty for leaving the reference, which needs a frozen model."""
    critic = critic_of(config)
    return critic is not None and critic.kl_coefficient > 0


def critic_path(config: Config) -> str:
    """The Hugging Face folder of the critic's backbone."""
    critic = critic_of(config)
    return (critic.path if critic is not None else None) or config.model.path


def compares_within_groups(config: Config) -> bool:
    """Whether an advantage is relative to the other responses to its prompt, so that equal rewards teach nothing; a
    critic's is relative to its values, one with `advantage.baseline: batch` to the whole rollout batch.
    """
    return critic_of(config) is None and config.advantage.baseline != "batch"


def least_of_group(config: Config) -> int:
    """How many episodes of a prompt need a reward for any of them to be trained on: advantages that are relative to
    their group need two, others need one.
    """
    return 2 if compares_within_groups(config) else 1


def policy_steps(config: Config) -> int:
    """The number of the policy's optimizer steps in a whole training run, which its schedule is made for. Raises
    ValueError without a section `train`.
    """
    if config.train is None:
        raise ValueError("the configuration has no section `train`")
    critic = critic_of(config)
    warmup = critic.warmup_steps if critic is not None else 0
    return (config.train.num_steps - warmup) * config.batch.num_mini_batches
