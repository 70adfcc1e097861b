"""What follows from several keys of a configuration: one answer for the session, the plan, the engine and the notices.

The parts: the configuration of one command; functions of the user; the critic and advantages; teachers; old log-probs
and the gap between the engines; lengths of episodes; how a publish is verified. `clip_range.py` says what a clip range
means for that gap, and `precision.py` whose layers compute the policy, what FP8 is, and what servers hold. Rules are
elsewhere (the `validate` modules). Nothing here imports torch or numpy, so a rank can ask before it imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from pydantic import Field

from gspo_mega.base.errors import ConfigError
from gspo_mega.config.algorithms import RECIPES, AlgorithmName
from gspo_mega.config.schema import (
    Batch,
    Config,
    Critic,
    Eval,
    Mismatch,
    Moe,
    OldLogProbs,
    Recompute,
    Rollout,
    Sft,
    Teacher,
    TeacherModel,
    Train,
    UserFunction,
)

# The configuration of one command: a `Config` that has the sections the command needs. The loader checks that they are
# given (`validate.py`), and these types tell it to the code that reads them. Sections are frozen, so narrowing a key is
# sound; the type checker does not see that, so its rule is ignored below.


class TrainConfig(Config):
    """What `gspo-mega train` runs with."""

    train: Train = Field(default=...)  # pyright: ignore[reportIncompatibleVariableOverride]


class SftConfig(Config):
    """What `gspo-mega sft` runs with."""

    sft: Sft = Field(default=...)  # pyright: ignore[reportIncompatibleVariableOverride]
    eval: Eval = Field(default=...)  # pyright: ignore[reportIncompatibleVariableOverride]


CommandConfig = TypeVar("CommandConfig", TrainConfig, SftConfig)
TeacherT = TypeVar("TeacherT", bound=TeacherModel)


def command_name(command: str | None) -> str | None:
    """The name of a command as users write it: the one that reads the section `budget` is `mismatch`."""
    return {"budget": "mismatch", "reward_model": "reward-model"}.get(command or "", command)


def train_config(config: Config) -> TrainConfig:
    """Return `config` as that of `gspo-mega train`; the sections are shared. Raises ConfigError if
    `train` is absent.
    """
    return _narrowed(config, TrainConfig)


def sft_config(config: Config) -> SftConfig:
    """Return `config` as that of `gspo-mega sft`; the sections are shared. Raises ConfigError if `sft` or `eval` is
    absent.
    """
    return _narrowed(config, SftConfig)


def _narrowed(config: Config, kind: type[CommandConfig]) -> CommandConfig:
    for key, field in kind.model_fields.items():
        if field.is_required() and getattr(config, key) is None:
            raise ConfigError(f"{key}: missing; this command needs the section")
    return kind.model_construct(config.model_fields_set, **dict(config))


# Functions of the user in place of built-in parts.


def hooks_of(config: Config) -> dict[str, UserFunction]:
    """Return the hooks of a configuration by their key (docs/hooks.md)."""
    named = {
        "advantage.function": config.advantage.function,
        "objective.function": config.objective.function,
        "rollout.group_filter": config.rollout.group_filter,
        "data.source": config.data.source,
    }
    return {key: hook for key, hook in named.items() if hook is not None}


def filters_groups(rollout: Rollout) -> bool:
    """Return whether groups that were sampled may be dropped and replaced, by the built-in filter or the user's."""
    return rollout.filter_constant_groups or rollout.group_filter is not None


# The critic, and advantages.


def critic_of(algorithm: AlgorithmName, critic: Critic | None) -> Critic | None:
    """Return the critic's section, or its defaults if the section is absent; None if the algorithm has no critic."""
    if not RECIPES[algorithm].has_critic:
        return None
    return critic or Critic()


def critic_config(config: Config) -> Config:
    """Return the run's configuration with the critic's precision, recomputation and optimizer, and without adapters.
    The critic's engine is built with it, and the plan computes its memory and time from it. Raises ValueError if there
    is no critic.
    """
    critic = critic_of(config.algorithm, config.critic)
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


def critic_path(config: Config) -> str:
    """Return the Hugging Face folder of the critic's backbone."""
    critic = critic_of(config.algorithm, config.critic)
    return (critic.path if critic is not None else None) or config.model.path


def penalises_kl(algorithm: AlgorithmName, critic: Critic | None) -> bool:
    """Return whether a penalty for leaving the reference is subtracted from the tokens' rewards. It needs a frozen
    model.
    """
    settings = critic_of(algorithm, critic)
    return settings is not None and settings.kl_coefficient > 0


def compares_within_groups(config: Config) -> bool:
    """Return whether an advantage is relative to the other responses to its prompt, so that equal rewards teach
    nothing. If rewards are not trained on, no advantage is. With a critic it is relative to the critic's values,
    with `advantage.baseline: batch` to the whole rollout batch.
    """
    if not trains_on_rewards(config.teacher) and config.advantage.baseline != "leave_one_out":
        return False
    return critic_of(config.algorithm, config.critic) is None and config.advantage.baseline != "batch"


def trains_on_rewards(teacher: Teacher | None) -> bool:
    """Return whether rewards are trained on; otherwise they are only measured, and a teacher teaches."""
    return teacher is None or teacher.reward_weight > 0


@dataclass(frozen=True)
class OneTeacher:
    """A teacher of a run: the `key` of its section, where it is (`settings`), and the `source` of the data whose rows
    it scores; None for all rows.
    """

    key: str
    settings: TeacherModel
    source: str | None = None

    @property
    def is_served(self) -> bool:
        """Whether a server scores, and not the ranks."""
        return self.settings.url is not None or self.settings.policy


def teachers(teacher: Teacher | None) -> tuple[OneTeacher, ...]:
    """Return the teachers of a run, in the order of the file. Their places are the teachers' numbers in packs."""
    if teacher is None:
        return ()
    of_source = teacher.by_source
    if not of_source:
        return (OneTeacher("teacher", teacher),)
    return tuple(OneTeacher(f"teacher.by_source.{place}", one, one.source) for place, one in enumerate(of_source))


def teacher_folders(teacher: Teacher | None) -> tuple[str, ...]:
    """Return the folders of the teachers that the ranks load, each once, in the order of the file."""
    return tuple(dict.fromkeys(one.settings.path for one in teachers(teacher) if one.settings.path is not None))


def with_teacher_folders(teacher: Teacher, folder_of: Callable[[str], str]) -> Teacher:
    """Return the section with other folders in place of those of the teachers that the ranks load."""

    def other(one: TeacherT) -> TeacherT:
        return one if one.path is None else one.model_copy(update={"path": folder_of(one.path)})

    return other(teacher).model_copy(update={"by_source": tuple(map(other, teacher.by_source))})


def has_served_teacher(teacher: Teacher | None) -> bool:
    """Return whether a server scores tokens as soon as they are sampled (`teacher.url`, `teacher.policy`)."""
    return any(one.is_served for one in teachers(teacher))


def taught_tokens(teacher: Teacher | None, max_new_tokens: int) -> int:
    """Return the length of the longest text that the run's own servers score as a teacher (`teacher.policy`), or 0.
    `max_new_tokens`: of a sampled response.
    """
    prompts = [one.settings.max_prompt_tokens or 0 for one in teachers(teacher) if one.settings.policy]
    return max(prompts) + max_new_tokens if prompts else 0


def num_served_top(teacher: Teacher | None) -> int:
    """Return how many most likely tokens a teacher's server is asked for at each place; 0 for none."""
    return (teacher.top_k or 0) if teacher is not None and has_served_teacher(teacher) else 0


def teacher_config(config: Config, has_experts: bool) -> Config:
    """Return the run's configuration as the teacher is built with it: the policy's layout and precision, and none of
    what only training needs. `has_experts`: the teacher's; without experts it is the same on all ranks of an expert
    group.
    """
    parallel = config.parallel
    if not has_experts:
        alone = {"expert": 1, "expert_tensor": 1, "expert_dispatcher": "alltoall"}
        parallel = parallel.model_copy(update=alone)
    return config.model_copy(
        update={
            "parallel": parallel,
            "moe": Moe(),
            "recompute": Recompute(),
            "lora": None,
            "teacher": None,
            "rollout": config.rollout.model_copy(update={"return_routed_experts": False}),
        }
    )


# What a group needs to be trained on, in words, by `least_of_group`.
REWARDS_NEEDED = {1: "a reward", 2: "two rewards"}


def least_of_group(config: Config) -> int:
    """Return how many episodes of a prompt must have a reward for any of them to be trained on: two if advantages are
    relative to their group, else one.
    """
    return 2 if compares_within_groups(config) else 1


def policy_steps(config: Config) -> int:
    """Return the number of the policy's optimizer steps in a whole training run, for which its schedule is made. Raises
    ValueError without a section `train`.
    """
    if config.train is None:
        raise ValueError("the configuration has no section `train`")
    critic = critic_of(config.algorithm, config.critic)
    warmup = critic.warmup_steps if critic is not None else 0
    return (config.train.num_steps - warmup) * config.batch.num_mini_batches


# Old log-probs and the gap between the engines.


def needs_old_log_prob_pass(config: Config) -> bool:
    """Return whether the trainer computes log-probs at the start of a rollout batch in a pass of its own.

    With one optimizer step per rollout batch the old policy is the current one, so only the correction needs the pass:
    it judges a response by the whole batch, before the first gradient. `may_correct_in_training` says when the pass can
    be left out. A penalty in the rewards (`critic.kl_coefficient`) needs it too, because advantages are computed before
    the first gradient.
    """
    needed = (
        not old_is_current(config.old_log_probs, config.batch)
        or corrects_engine_gap(config.mismatch, config.old_log_probs)
        or penalises_kl(config.algorithm, config.critic)
        or leaves_out_by_covariance(config.algorithm)
    )
    return config.old_log_probs == "trainer" and needed


def leaves_out_by_covariance(algorithm: AlgorithmName) -> bool:
    """Return whether tokens are left out by their covariance over a whole mini-batch, before its first gradient."""
    return "covariance_share" in RECIPES[algorithm].parameters


def may_correct_in_training(config: Config) -> bool:
    """Return whether a step in which every rank has a single pack needs no old pass: the training pass measures the gap
    of the whole batch before its gradients, and the correction is decided between the two. Diagnostics of staleness and
    a penalty in the rewards need log-probs of a separate pass.
    """
    needs_own = (
        config.diagnostics.exact_staleness
        or penalises_kl(config.algorithm, config.critic)
        or leaves_out_by_covariance(config.algorithm)
    )
    return (
        corrects_engine_gap(config.mismatch, config.old_log_probs)
        and old_is_current(config.old_log_probs, config.batch)
        and not needs_own
    )


def old_is_current(old_log_probs: OldLogProbs, batch: Batch) -> bool:
    """Return whether the policy that is trained is the old one, because a rollout batch has one optimizer step. The
    ratio is then exactly 1, and no second forward pass may add its noise to it.
    """
    return old_log_probs == "trainer" and batch.num_mini_batches == 1


def corrects_engine_gap(mismatch: Mismatch, old_log_probs: OldLogProbs) -> bool:
    """Return whether the gap between the two engines is corrected. If the server's log-probs are the old ones, the gap
    is in the policy ratio and nothing is left to correct.
    """
    return mismatch.correction != "none" and old_log_probs == "trainer"


# Lengths of episodes, and open requests at a publish.

ONE_TURN, TOOL_LOOP = "one_turn", "tool_loop"
OnPublish = Literal["wait", "continue", "continue_with_cache"]


class EpisodeLengths(NamedTuple):
    """The most that one episode without branches may have. `tokens`: prompt, turns and what comes between them.
    `turns`: the number of turns. `sampled`: tokens of the turns only. `spelled`: the keys that `tokens` follows from,
    for a message.
    """

    tokens: int
    turns: int
    sampled: int
    spelled: str


def is_one_turn(rollout: Rollout) -> bool:
    return rollout.episode.function == ONE_TURN


def has_sampling_masks(rollout: Rollout) -> bool:
    """Return whether tokens are sampled from a set of kept ones, which servers return and log-probs are normalised
    over.
    """
    return rollout.top_k > 1


def episode_lengths(config: Config) -> EpisodeLengths:
    """Return the lengths from which every length that is decided before a run follows: servers' context, packs and
    estimates.
    """
    prompt, turn = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    spelled = f"max_prompt_tokens {prompt} + max_new_tokens {turn} = {prompt + turn}"
    tokens = prompt + turn
    if config.episodes.max_tokens is not None:
        tokens, spelled = config.episodes.max_tokens, f"episodes.max_tokens {config.episodes.max_tokens}"
    turns = 1 if is_one_turn(config.rollout) else config.episodes.max_turns
    return EpisodeLengths(tokens, turns, min(turns * turn, max(tokens - 1, 1)), spelled)


def mean_tokens(config: Config) -> tuple[int, int]:
    """Return (prompt, response) tokens of an average trajectory, assumed to be half of the maximum. With several turns
    the response is all that is sampled, and what comes between the turns counts as prompt.
    """
    prompt = max(1, config.data.max_prompt_tokens // 2)
    if is_one_turn(config.rollout):
        return prompt, max(1, config.rollout.max_new_tokens // 2)
    lengths = episode_lengths(config)
    half = lengths.tokens // 2
    sampled = max(1, min(lengths.sampled // 2, half - prompt))
    return max(prompt, half - sampled), sampled


def on_publish(rollout: Rollout) -> OnPublish:
    """Return what happens to open requests when new weights are published: `rollout.on_publish`, or its default."""
    return rollout.on_publish or ("wait" if rollout.max_staleness == 0 else "continue")


# How a publish is verified.

Verification = Literal["tensors", "replicas"]


def resolve_verification(chosen: Verification | Literal["auto"], server_tensor: int, on_gpu: bool) -> Verification:
    """Return how a publish is verified (`sync/verify.py` does it). `chosen`: `publish.verify`. `server_tensor`:
    `server.tensor`. `on_gpu`: trainer and servers run on GPUs.

    On a CPU, SGLang's checksums are SHA-256, and the trainer can compute them for a server of one rank. On a GPU, and
    for shares of a tensor, it cannot.
    """
    if chosen != "auto":
        return chosen
    return "replicas" if on_gpu or server_tensor > 1 else "tensors"
