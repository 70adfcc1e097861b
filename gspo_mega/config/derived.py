"""What follows from several keys of a configuration: one answer for the session, the plan, the engine and the notices.

The parts: the configuration of one command; the critic and advantages; old log-probs and the gap between the engines;
the clip range as a measure of the mismatch; lengths of episodes; whose layers compute the policy and which operations
are fused; FP8; and what servers compute in and are sent. Rules are elsewhere (the `validate` modules). Nothing here
imports torch or numpy, so a rank can ask before it imports torch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import Field

from gspo_mega.base.errors import ConfigError
from gspo_mega.config.algorithms import RECIPES, AlgorithmName
from gspo_mega.config.schema import (
    Batch,
    Certify,
    Config,
    Critic,
    Engine,
    Eval,
    Fp8,
    Mismatch,
    Moe,
    Objective,
    OldLogProbs,
    Precision,
    Recompute,
    Rollout,
    Server,
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


# What an algorithm's clip range means for the difference of the two engines: one answer for a run and for `mismatch`.
# The range is put around the servers' log-probs, as if they were used directly as the old ones and no update had been
# made. With d = trainer - server in nats, the recipe decides what is compared with the range:
#
#     gspo, gspo_token, luspo            log s of a response, the mean of d over it: log(1 - clip_low) to
#                                        log(1 + clip_high)
#     grpo, dapo, dr_grpo, ppo, minirl   d of each token, in the same range
#     cispo                              d of each token; with clip_low 1 or more there is only the upper edge
#     gmpo                               d of each token: -clip_low to clip_high
#     dppo                               the difference of each token's probability: -clip_low to clip_high
#     dppo_kl                            nothing: its range is of a divergence, not of d
#     sapo, vespo                        nothing: they clip nothing
#     custom                             follows objective.ratio


@dataclass(frozen=True)
class Band:
    """A clip range: `low` < 0 < `high`, in nats, or in probabilities with `of_probability`. `low` is -inf if the lower
    side is open. The methods take numbers, or arrays of torch or numpy.

    `per_token`: tokens are clipped instead of whole sequences. `bounds_weight`: outside the range a weight is bounded,
    no matter which sign A has, and no gradient is lost. `dual_edge`: above it the terms of A < 0 are bounded.
    """

    low: float
    high: float
    per_token: bool = False
    of_probability: bool = False
    bounds_weight: bool = False
    dual_edge: float = math.inf

    @property
    def width(self) -> float:
        """The distance between the edges; for an open range twice the distance of the upper edge from 0."""
        return max(self.high - self.low if math.isfinite(self.low) else 2 * self.high, 1e-12)

    @property
    def what(self) -> str:
        """What is compared with the range, in words."""
        if not self.per_token:
            return "mean |log s|"
        size = "difference of a token's probability" if self.of_probability else "|d| of a token"
        return f"mean {size}" if math.isfinite(self.low) else "mean rise of d over a token, doubled,"

    @property
    def units(self) -> Literal["tokens", "sequences"]:
        return "tokens" if self.per_token else "sequences"

    def widths(self, x: Any) -> Any:
        """Return how large the differences `x` are, in widths of the range. In an open range only what is above 0
        counts, and it counts double, so that noise to both sides is as large as in a range with two edges.
        """
        return abs(x) / self.width if math.isfinite(self.low) else 2 * x.clip(min=0) / self.width

    def is_clipped(self, x: Any, negative: bool) -> Any:
        """Return which differences `x` are clipped, for tokens or responses with A < 0 (`negative`) or A > 0."""
        if self.bounds_weight:
            return (x < self.low) | (x > self.high)
        return (x < self.low) | (x > self.dual_edge) if negative else x > self.high


def band_of(algorithm: AlgorithmName, objective: Objective) -> Band | None:
    """Return the clip range of these settings; None if they clip nothing, or if a function of the user decides."""
    if objective.function is not None:
        return None
    return make_band(algorithm, objective.ratio, objective.clip_low, objective.clip_high, objective.dual_clip)


def make_band(
    algorithm: str, ratio: str | None, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Band | None:
    """Return the clip range as `band_of` does, from the values of its keys. `ratio`: `objective.ratio`, for a recipe
    that leaves it open.
    """
    recipe = RECIPES[algorithm]
    bounded = recipe.facts.range_of
    if bounded in (None, "divergence"):
        return None
    if bounded in ("probability", "log_ratio"):
        return Band(-clip_low, clip_high, per_token=True, of_probability=bounded == "probability")
    return Band(
        math.log1p(-clip_low) if clip_low < 1 else -math.inf,
        math.log1p(clip_high),
        per_token=(recipe.ratio or ratio) == "token",
        bounds_weight=bounded == "weight",
        dual_edge=math.inf if dual_clip is None else math.log(dual_clip),
    )


def share_sentence(band: Band, share: str, budget: float) -> str:
    """Return the sentence about a mismatch of `share` widths of the range, which is a text with or without an error."""
    return f"the {band.what} is {share} widths of the clip range; mismatch.budget is {budget:g}"


def no_range_sentence(algorithm: str) -> str:
    """Return the sentence about the mismatch of an algorithm that clips nothing."""
    if RECIPES[algorithm].is_clipped:
        return f"{algorithm} has no range of log-probs that the mismatch is compared with; its k3 says how large it is"
    return (
        f"{algorithm} clips nothing, so the mismatch has no clip range to be compared with; its k3 says how large it is"
    )


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


# Layers and fused operations.

# Set to 1 in a process without a GPU that is to load Transformer Engine. A rank sets it from its configuration; any
# other program sets it before it imports `gspo_mega.engine`.
TRANSFORMER_ENGINE_VARIABLE = "GSPO_TRANSFORMER_ENGINE"
FusionKey = Literal["fuse_activation", "fuse_permutation", "fuse_weight_gradient"]
# Each key of `engine`, and the setting of Megatron's TransformerConfig that it decides.
FUSION_SETTINGS: dict[FusionKey, str] = {
    "fuse_activation": "bias_activation_fusion",
    "fuse_permutation": "moe_permute_fusion",
    "fuse_weight_gradient": "gradient_accumulation_fusion",
}
# The operations' names in a report.
_FUSION_NAMES: dict[FusionKey, str] = {
    "fuse_activation": "activation",
    "fuse_permutation": "permutation",
    "fuse_weight_gradient": "weight gradient",
}


def wheel_folder(prefix: str | None = None) -> Path:
    """Return the folder where `launch/setup.sh` puts Transformer Engine's wheel for a machine without a GPU. It is in
    the environment `prefix`, and no import path names it.
    """
    return Path(prefix or sys.prefix) / "opt" / "transformer_engine"


def megatron_folder(prefix: str | None = None) -> Path:
    """Return the folder where `launch/setup.sh --trace` puts the Megatron-Core of launch/env/gpu.txt. It is in the
    environment `prefix`, and only a traced rank has it on its path.
    """
    return Path(prefix or sys.prefix) / "opt" / "megatron_core"


def has_transformer_engine_layers(precision: Precision, engine: Engine, has_gpu: bool) -> bool:
    """Return whether the policy has Transformer Engine's layers. `engine.transformer_engine` decides; if it is absent,
    fp8 has them, and bf16 on a GPU. fp32 always has Megatron's plain layers.
    """
    if precision == "fp32":
        return False
    chosen = engine.transformer_engine
    return precision == "fp8" or (has_gpu if chosen is None else chosen)


@dataclass(frozen=True)
class FusionChoice:
    """Whether an operation is fused, and why, in words for a report."""

    key: FusionKey
    on: bool
    why: str


def fused_operations(
    config: Config, *, has_experts: bool, has_gpu: bool, missing: Mapping[FusionKey, str] | None = None
) -> list[FusionChoice]:
    """Return the choice for each operation. `missing`: what a machine lacks for an operation, in words, if that is
    known.

    A key that is true is chosen even if something is in its way; `fusion_obstacle` and `missing` say what that is.
    """
    choices = []
    for key in FUSION_SETTINGS:
        wanted = getattr(config.engine, key)
        against = fusion_obstacle(config, key, has_experts=has_experts, has_gpu=has_gpu) or (missing or {}).get(key)
        if wanted is not None:
            choices.append(FusionChoice(key, wanted, f"engine.{key}"))
        elif against is not None:
            choices.append(FusionChoice(key, False, against))
        else:
            choices.append(
                FusionChoice(key, has_gpu, "by default on a GPU" if has_gpu else "without a GPU only if asked")
            )
    return choices


def fused_keys(config: Config, *, has_experts: bool, has_gpu: bool) -> frozenset[FusionKey]:
    """Return the keys of `engine` whose operations are fused if no library is missing."""
    made = fused_operations(config, has_experts=has_experts, has_gpu=has_gpu)
    return frozenset(choice.key for choice in made if choice.on)


def fusion_obstacle(config: Config, key: FusionKey, *, has_experts: bool, has_gpu: bool) -> str | None:
    """Return why this model in this configuration cannot have the operation on any machine of that kind; None if it
    can.
    """
    if key == "fuse_permutation" and not has_experts:
        return "no experts"
    if key != "fuse_activation" and not has_transformer_engine_layers(config.precision, config.engine, has_gpu):
        return "Megatron's plain layers"
    if key == "fuse_weight_gradient" and config.lora is not None:
        return "layers whose weights are frozen"
    return None


def describe_fusions(choices: list[FusionChoice]) -> str:
    """Return one line: what is fused and what is not, each with its reason."""
    parts = []
    for on in (True, False):
        named = [f"{_FUSION_NAMES[choice.key]} ({choice.why})" for choice in choices if choice.on is on]
        if named:
            parts.append(("fused: " if on else "not fused: ") + ", ".join(named))
    return "; ".join(parts)


# FP8: whether the scales of blocks are powers of two, one answer for the trainer's products and for published weights.
# How a scale is rounded is in `gspo_mega/algorithm/fp8.py`.

# Set to 1, scales of blocks are any float32; otherwise they are powers of two. Transformer Engine reads the variable
# when it is imported.
FLOAT32_SCALES_VARIABLE = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
# Compute capability 10.0. Its products take powers of two, and Transformer Engine refuses other scales there.
BLACKWELL = (10, 0)


def has_powers_of_two(block_scales: str, capability: tuple[int, int] | None) -> bool:
    """Return whether `fp8.block_scales` means powers of two on a GPU of this compute capability. None stands for a
    machine without a GPU, which computes Hopper's numbers.
    """
    if block_scales == "auto":
        return capability is not None and capability >= BLACKWELL
    return block_scales == "power_of_two"


def has_block_scaled_products(precision: Precision, fp8: Fp8) -> bool:
    """Return whether the trainer has products whose scales `fp8.block_scales` decides."""
    return precision == "fp8" and fp8.recipe == "blockwise"


def block_scale_variable(
    fp8: Fp8 | None, environment: Mapping[str, str], capability: tuple[int, int] | None
) -> dict[str, str]:
    """Return the variable to set for Transformer Engine; empty if `environment` is right already.

    Only `fp8.block_scales` decides, so that products and published weights agree. For a program without it (None), a
    variable that is set stays as it is.
    """
    given = environment.get(FLOAT32_SCALES_VARIABLE)
    if fp8 is None and given:
        return {}
    wanted = "0" if has_powers_of_two("auto" if fp8 is None else fp8.block_scales, capability) else "1"
    return {} if wanted == (given or "0") else {FLOAT32_SCALES_VARIABLE: wanted}


def is_sharp_fp8(precision: Precision, certify: Certify) -> bool:
    """Return whether a certificate of FP8 keeps parameters and activations between FP8 products in fp32
    (`certify.sharp_fp8`).

    In bf16 the last bit of an activation differs from layout to layout, and FP8 turns it into half of its own error, so
    the tolerance would hide what it should find. In fp32 one number in a million falls to the other side of an edge of
    FP8. `cpu/te_loading.py::compute_sharply` says what else a sharp certificate computes differently.
    """
    return precision == "fp8" and certify.sharp_fp8


# The precision of servers, and what they are sent.

ServerDtype = Literal["fp32", "bf16"]
SERVER_DTYPES: dict[ServerDtype, str] = {"fp32": "float32", "bf16": "bfloat16"}
"""The names that config.json and SGLang use."""
WEIGHT_BLOCK = (128, 128)
"""Rows and columns of one weight block of `server.quantization: fp8_block`."""
PUBLISHED_QUANTIZED = frozenset({"fp8_block"})
"""Quantizations whose weights a server loads already quantized, with their scales. With the others it quantizes the
weights itself while it loads them.
"""
_FP8_PRODUCTS = (8, 9)
"""The first compute capability with products of FP8 operands."""
_WEIGHTS = {
    "fp8": "e4m3 weights, quantized by the server while it loads",
    "fp8_block": "e4m3 weights in 128 x 128 blocks, quantized by the trainer",
    "int8": "INT8 weights, quantized by the server while it loads",
}


def server_dtype(server: Server, precision: Precision) -> ServerDtype:
    """Return the precision of a server's activations and of its weights that are not quantized: `server.dtype`, and
    with `auto` the trainer's (bf16 for an FP8 trainer).
    """
    if server.dtype != "auto":
        return server.dtype
    return "fp32" if precision == "fp32" else "bf16"


def loads_quantized(server: Server) -> bool:
    """Return whether servers are sent quantized weights with their scales instead of plain ones."""
    return server.quantization in PUBLISHED_QUANTIZED


def publishes(train: Train | None, sft: Sft | None) -> bool:
    """Return whether servers of this configuration are sent new weights while they run. Those of an
    evaluation are not.
    """
    return train is not None or sft is not None


def publishes_adapters(config: Config) -> bool:
    """Return whether servers are sent only adapters and hold the weights of `model.path` all the time."""
    return config.lora is not None and config.publish.lora == "adapter" and publishes(config.train, config.sft)


def capability_problem(quantization: str, capability: tuple[int, int], is_published_to: bool) -> str | None:
    """Return why SGLang 0.5.23 cannot hold these weights on a GPU of this compute capability; None if it can.

    `is_published_to`: the server is sent new weights while it runs.
    """
    where = f"{quantization} on a GPU of compute capability {capability[0]}.{capability[1]}"
    if quantization in ("fp8", "fp8_block") and capability < _FP8_PRODUCTS:
        return (
            f"{where}: SGLang repacks FP8 weights for products with operands that are not rounded (Marlin). The"
            " numbers are"
            " not those that this key names, and new weights cannot be loaded into repacked ones"
        )
    if quantization == "fp8_block" and capability >= BLACKWELL and is_published_to:
        return (
            f"{where}: SGLang replaces the blocks' scales by packed powers of two of another shape (DeepGEMM), so"
            " every publish would fail; without `train` and `sft` (`gspo-mega eval`) it can be used"
        )
    return None


def describe_server_precision(server: Server, precision: Precision) -> str:
    """Return, for the plan's report, what servers compute in, hold and cache."""
    dtype = server_dtype(server, precision)
    weights = _WEIGHTS.get(server.quantization, f"{dtype} weights")
    cache = "e4m3" if server.kv_cache == "fp8" else dtype
    return f"{dtype} activations, {weights}, {cache} cache"
