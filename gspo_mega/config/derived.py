"""What an algorithm's clip range means for the difference of the two engines: one answer for a run and for `budget`.

The range is put around the servers' log-probs, as if they were used directly as the old ones and no update had been
made. What is measured follows from the recipe:

    gspo, gspo_token, luspo            log s of a response, the mean of d over it: log(1 - clip_low) to
                                       log(1 + clip_high)
    grpo, dapo, dr_grpo, ppo, minirl   d of each token, in the same range
    cispo                              d of each token; with clip_low 1 or more only the upper edge is there
    gmpo                               d of each token: -clip_low to clip_high
    dppo                               the difference of each token's probability: -clip_low to clip_high
    sapo, vespo                        nothing: they clip nothing
    custom                             by objective.ratio

with d = trainer - server, nats. Owns these meanings and the sentences about them. Imports no torch and no numpy: the
methods take numbers and arrays of either.

The configuration of one command: a `Config` that has the sections the command needs.

The loader checks that they are given (`validate.py`); these types tell it to the code that reads them.
Sections are frozen, so narrowing a key is sound; the type checker does not see that, so its rule is ignored below.

What follows from `critic`: whether a run has one, and the configuration that its engine is built with.

One place for the session, the plan and certification. Owns no default and no refusal.

Whether a step makes an old log-prob pass, and whether the engine gap is corrected: what follows from several keys.

One place for the loop, the engine, the plan and the notices. Owns no default and no refusal.

How long an episode of a configuration may be: its tokens, its turns, what of them is sampled.

What becomes of open requests when new weights are published: the setting, or its default.

Whose layers compute the policy: Transformer Engine's, or Megatron's plain ones.

Owns the choice alone, so that a rank can prepare for it before it imports torch. How the layers are built is the
engine's; what a GPU or a wheel needs for them is the plan's.

Operations of the policy's layers that Megatron can do in one kernel: which of them a run fuses, and why.

Owns the choice alone: what the configuration asks for, what it leaves to the machine, and what cannot be. Which
libraries a machine has is the engine's question; it hands their answers in.

Whether the scales of FP8 blocks are powers of two: one answer for the trainer's products and for published weights.

Owns the rule behind `fp8.block_scales`, and the variable by which Transformer Engine is told. How a scale is rounded
is `gspo_mega/algorithm/fp8.py`.

In which precision a server holds weights, computes and caches: what `server.dtype`, `server.quantization` and
`server.kv_cache` mean, for the plan, the publish and the server alike.

Owns the meaning only. SGLang's names for it are `rollout/server/spec.py`'s; the emulation on a CPU is
`cpu/sglang_quantization.py`'s; quantising what is published is `weights/`'s.

Whether a certificate of FP8 computes with fp32 numbers between its products (`certify.sharp_fp8`).

In bf16 the last bit of an activation differs from layout to layout, and FP8 turns it into half of its own error: the
tolerance hides what it should find. In fp32 one number in a million falls to the other side of an edge of FP8. Owns
the condition alone; what follows from it is in the engine's precision and in the certificate's tolerances.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import Field

from gspo_mega.base.errors import ConfigError
from gspo_mega.config.algorithms import RECIPES
from gspo_mega.config.schema import Config, Eval, Rollout, Sft, Train
from gspo_mega.config.schema.learning import Critic


class TrainConfig(Config):
    """What `gspo-mega train` runs with."""

    train: Train = Field(default=...)  # pyright: ignore[reportIncompatibleVariableOverride]


class SftConfig(Config):
    """What `gspo-mega sft` runs with."""

    sft: Sft = Field(default=...)  # pyright: ignore[reportIncompatibleVariableOverride]
    eval: Eval = Field(default=...)  # pyright: ignore[reportIncompatibleVariableOverride]


CommandConfig = TypeVar("CommandConfig", TrainConfig, SftConfig)


def train_config(config: Config) -> TrainConfig:
    """`config` as that of `gspo-mega train`, the sections shared. Raises ConfigError where `train` is absent."""
    return _narrowed(config, TrainConfig)


def sft_config(config: Config) -> SftConfig:
    """`config` as that of `gspo-mega sft`, the sections shared. Raises ConfigError where `sft` or `eval` is absent."""
    return _narrowed(config, SftConfig)


def _narrowed(config: Config, kind: type[CommandConfig]) -> CommandConfig:
    for key, field in kind.model_fields.items():
        if field.is_required() and getattr(config, key) is None:
            raise ConfigError(f"{key}: missing; this command needs the section")
    return kind.model_construct(config.model_fields_set, **dict(config))


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


def corrects_engine_gap(config: Config) -> bool:
    """Whether the gap between the two engines is corrected at all. With the server's log-probs as old ones it is in
    the policy ratio, and nothing is left to correct.
    """
    return config.mismatch.correction != "none" and config.old_log_probs == "trainer"


def needs_old_log_prob_pass(config: Config) -> bool:
    """Whether the trainer computes log-probs at the start of a rollout batch in a pass of its own.

    With one optimizer step per rollout batch old is current, so the pass is needed for the correction only: it judges a
    response by the whole batch, before the first gradient. `may_correct_in_training` says where it can be left out. A
    penalty in the rewards (`critic.kl_coefficient`) needs it, because advantages come before the first gradient, too.
    """
    needed = not old_is_current(config) or corrects_engine_gap(config) or penalises_kl(config)
    return config.old_log_probs == "trainer" and needed


def may_correct_in_training(config: Config) -> bool:
    """Whether a step in which every rank has a single pack needs no old pass: the training pass measures the gap of the
    whole batch before its gradients, and the correction is decided between the two. Diagnostics of staleness compare
    with the log-probs of a pass of their own, and so does a penalty in the rewards.
    """
    needs_own = config.diagnostics.exact_staleness or penalises_kl(config)
    return corrects_engine_gap(config) and old_is_current(config) and not needs_own


def old_is_current(config: Config) -> bool:
    """Whether the policy that is trained is the old one: one optimizer step per rollout batch. Then the ratio is 1
    exactly, and no second forward pass may put its noise there.
    """
    return config.old_log_probs == "trainer" and config.batch.num_mini_batches == 1


ONE_TURN, TOOL_LOOP = "one_turn", "tool_loop"


class EpisodeLengths(NamedTuple):
    """The most of each in one episode without branches. `tokens`: prompt, turns and what comes between them.
    `sampled`: of the turns alone. `spelled`: the keys that `tokens` follows from, for a message.
    """

    tokens: int
    turns: int
    sampled: int
    spelled: str


def is_one_turn(config: Config) -> bool:
    return config.rollout.episode.function == ONE_TURN


def episode_lengths(config: Config) -> EpisodeLengths:
    """What every length that is decided before a run follows from: servers' context, packs, estimates."""
    prompt, turn = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    spelled = f"max_prompt_tokens {prompt} + max_new_tokens {turn} = {prompt + turn}"
    tokens = prompt + turn
    if config.episodes.max_tokens is not None:
        tokens, spelled = config.episodes.max_tokens, f"episodes.max_tokens {config.episodes.max_tokens}"
    turns = 1 if is_one_turn(config) else config.episodes.max_turns
    return EpisodeLengths(tokens, turns, min(turns * turn, max(tokens - 1, 1)), spelled)


def mean_tokens(config: Config) -> tuple[int, int]:
    """(prompt, response) tokens of an average trajectory, by assumption: half of what may be. With several turns the
    response is all that is sampled, and what comes between the turns counts as prompt.
    """
    prompt = max(1, config.data.max_prompt_tokens // 2)
    if is_one_turn(config):
        return prompt, max(1, config.rollout.max_new_tokens // 2)
    lengths = episode_lengths(config)
    half = lengths.tokens // 2
    sampled = max(1, min(lengths.sampled // 2, half - prompt))
    return max(prompt, half - sampled), sampled


OnPublish = Literal["wait", "continue", "continue_with_cache"]


def on_publish(rollout: Rollout) -> OnPublish:
    """`rollout.on_publish`, or its default."""
    return rollout.on_publish or ("wait" if rollout.max_staleness == 0 else "continue")


# Set to 1 in a process without a GPU that shall load Transformer Engine. A rank sets it from its configuration; a
# program of its own sets it before it imports `gspo_mega.engine`.
TRANSFORMER_ENGINE_VARIABLE = "GSPO_TRANSFORMER_ENGINE"


def wheel_folder(prefix: str | None = None) -> Path:
    """Where `launch/setup.sh` puts Transformer Engine's wheel for a machine without a GPU: a folder of the environment
    that no import path names.
    """
    return Path(prefix or sys.prefix) / "opt" / "transformer_engine"


def has_transformer_engine_layers(config: Config, has_gpu: bool) -> bool:
    """Whether this configuration's policy has Transformer Engine's layers: as `engine.transformer_engine` says; without
    it in fp8, and on a GPU in bf16 too. fp32, and a policy with adapters, have Megatron's plain layers everywhere.
    """
    if config.precision == "fp32" or config.lora is not None:
        return False
    chosen = config.engine.transformer_engine
    return config.precision == "fp8" or (has_gpu if chosen is None else chosen)


FusionKey = Literal["fuse_activation", "fuse_permutation", "fuse_weight_gradient"]

# The key of `engine`, and the setting of Megatron's TransformerConfig that it decides.
FUSION_SETTINGS: dict[FusionKey, str] = {
    "fuse_activation": "bias_activation_fusion",
    "fuse_permutation": "moe_permute_fusion",
    "fuse_weight_gradient": "gradient_accumulation_fusion",
}
# In a report.
_FUSION_NAMES: dict[FusionKey, str] = {
    "fuse_activation": "activation",
    "fuse_permutation": "permutation",
    "fuse_weight_gradient": "weight gradient",
}


@dataclass(frozen=True)
class FusionChoice:
    """Whether an operation is fused. `why`: in words, for a report."""

    key: FusionKey
    on: bool
    why: str


def fused_operations(
    config: Config, *, has_experts: bool, has_gpu: bool, missing: Mapping[FusionKey, str] | None = None
) -> list[FusionChoice]:
    """The choice for each operation. `missing`: what a machine lacks for one, in words, where that is known.

    A key that is true is chosen whatever is in its way; `fusion_obstacle` and `missing` say what that is.
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
    """The keys of `engine` whose operations are fused, where no library is missing."""
    made = fused_operations(config, has_experts=has_experts, has_gpu=has_gpu)
    return frozenset(choice.key for choice in made if choice.on)


def fusion_obstacle(config: Config, key: FusionKey, *, has_experts: bool, has_gpu: bool) -> str | None:
    """Why this model in this configuration has no such operation on any machine of that kind; None where it has."""
    if key == "fuse_permutation" and not has_experts:
        return "no experts"
    if key != "fuse_activation" and not has_transformer_engine_layers(config, has_gpu):
        return "Megatron's plain layers"
    return None


def describe_fusions(choices: list[FusionChoice]) -> str:
    """One line: what is fused and what is not, each with its reason."""
    parts = []
    for on in (True, False):
        named = [f"{_FUSION_NAMES[choice.key]} ({choice.why})" for choice in choices if choice.on is on]
        if named:
            parts.append(("fused: " if on else "not fused: ") + ", ".join(named))
    return "; ".join(parts)


# 1: scales of blocks are any float32; else powers of two. Transformer Engine reads it when it is imported.
FLOAT32_SCALES_VARIABLE = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
# Compute capability 10.0: its products take powers of two, and Transformer Engine refuses others there.
BLACKWELL = (10, 0)


def has_powers_of_two(block_scales: str, capability: tuple[int, int] | None) -> bool:
    """What `fp8.block_scales` means on a GPU of this compute capability, None without one (numbers of Hopper)."""
    if block_scales == "auto":
        return capability is not None and capability >= BLACKWELL
    return block_scales == "power_of_two"


def has_block_scaled_products(config: Config) -> bool:
    """Are there products of the trainer whose scales `fp8.block_scales` decides?"""
    return config.precision == "fp8" and config.fp8.recipe == "blockwise"


def block_scale_variable(
    config: Config | None, environment: Mapping[str, str], capability: tuple[int, int] | None
) -> dict[str, str]:
    """The variable for Transformer Engine, or nothing where it is right already.

    The configuration alone decides, so that products and published weights agree. For a program without one (None) a
    variable that is set stays as it is.
    """
    given = environment.get(FLOAT32_SCALES_VARIABLE)
    if config is None and given:
        return {}
    wanted = "0" if has_powers_of_two("auto" if config is None else config.fp8.block_scales, capability) else "1"
    return {} if wanted == (given or "0") else {FLOAT32_SCALES_VARIABLE: wanted}


ServerDtype = Literal["fp32", "bf16"]
SERVER_DTYPES: dict[ServerDtype, str] = {"fp32": "float32", "bf16": "bfloat16"}
"""What config.json and SGLang call them."""
WEIGHT_BLOCK = (128, 128)
"""Rows and columns of one weight block of `server.quantization: fp8_block`."""

PUBLISHED_QUANTIZED = frozenset({"fp8_block"})
"""Quantizations whose weights a server loads already quantized, with their scales. It quantizes those of the others
itself while it loads them.
"""

_FP8_PRODUCTS = (8, 9)
"""The first compute capability with products of FP8 operands."""


def server_dtype(config: Config) -> ServerDtype:
    """The precision of a server's activations and of its weights that are not quantized: `server.dtype`, and with
    `auto` the trainer's (bf16 for an FP8 trainer).
    """
    if config.server.dtype != "auto":
        return config.server.dtype
    return "fp32" if config.precision == "fp32" else "bf16"


def loads_quantized(config: Config) -> bool:
    """True if servers are sent quantized weights with their scales; False if plain ones."""
    return config.server.quantization in PUBLISHED_QUANTIZED


def publishes(config: Config) -> bool:
    """True if servers of this configuration are sent new weights while they run; an evaluation's are not."""
    return config.train is not None or config.sft is not None


def publishes_adapters(config: Config) -> bool:
    """Do servers get adapters alone, and hold the weights of `model.path` all the time?"""
    return config.lora is not None and config.publish.lora == "adapter" and publishes(config)


def capability_problem(quantization: str, capability: tuple[int, int], is_published_to: bool) -> str | None:
    """Why SGLang 0.5.23 cannot hold these weights on a GPU of this compute capability, in words; None where it can.

    `is_published_to`: the server is sent new weights while it runs.
    """
    where = f"{quantization} on a GPU of compute capability {capability[0]}.{capability[1]}"
    if quantization in ("fp8", "fp8_block") and capability < _FP8_PRODUCTS:
        return (
            f"{where}: SGLang repacks FP8 weights for products with operands that are not rounded (Marlin), which are"
            " other numbers than this key names, and new weights cannot be loaded into what is repacked"
        )
    if quantization == "fp8_block" and capability >= BLACKWELL and is_published_to:
        return (
            f"{where}: SGLang replaces the blocks' scales by packed powers of two of another shape (DeepGEMM), so that"
            " every publish would fail; without `train` and `sft` (`gspo-mega eval`) it can be used"
        )
    return None


_WEIGHTS = {
    "fp8": "e4m3 weights, quantized by the server while it loads",
    "fp8_block": "e4m3 weights in 128 x 128 blocks, quantized by the trainer",
    "int8": "INT8 weights, quantized by the server while it loads",
}


def describe_server_precision(config: Config) -> str:
    """For the plan: what servers compute in, hold and cache."""
    dtype = server_dtype(config)
    weights = _WEIGHTS.get(config.server.quantization, f"{dtype} weights")
    cache = "e4m3" if config.server.kv_cache == "fp8" else dtype
    return f"{dtype} activations, {weights}, {cache} cache"


def is_sharp_fp8(config: Config) -> bool:
    """Whether parameters and activations between FP8 products are fp32."""
    return config.precision == "fp8" and config.certify.sharp_fp8


@dataclass(frozen=True)
class Band:
    """`low` < 0 < `high`, nats, or probabilities with `of_probability`; `low` is -inf where the lower side is open.

    `per_token`: tokens are clipped, and not whole sequences. `bounds_weight`: outside, a weight is bounded whatever the
    sign of A, and no gradient is lost. `dual_edge`: above it the terms of A < 0 are bounded.
    """

    low: float
    high: float
    per_token: bool = False
    of_probability: bool = False
    bounds_weight: bool = False
    dual_edge: float = math.inf

    @property
    def width(self) -> float:
        """The distance of the edges; of an open range twice that of the upper edge from 0."""
        return max(self.high - self.low if math.isfinite(self.low) else 2 * self.high, 1e-12)

    @property
    def what(self) -> str:
        """What is compared with the range."""
        if not self.per_token:
            return "mean |log s|"
        size = "difference of a token's probability" if self.of_probability else "|d| of a token"
        return f"mean {size}" if math.isfinite(self.low) else "mean rise of d over a token, doubled,"

    @property
    def units(self) -> Literal["tokens", "sequences"]:
        return "tokens" if self.per_token else "sequences"

    def widths(self, x: Any) -> Any:
        """How large differences `x` are, in widths of the range; of an open range only what is above 0 counts, double,
        so that noise to both sides is as large as in a range with two edges.
        """
        return abs(x) / self.width if math.isfinite(self.low) else 2 * x.clip(min=0) / self.width

    def is_clipped(self, x: Any, negative: bool) -> Any:
        """Which of the differences `x` of tokens or responses with A < 0 (`negative`), or A > 0, are clipped."""
        if self.bounds_weight:
            return (x < self.low) | (x > self.high)
        return (x < self.low) | (x > self.dual_edge) if negative else x > self.high


def band_of(config: Config) -> Band | None:
    """The range of a configuration; None where it clips nothing."""
    objective = config.objective
    return make_band(config.algorithm, objective.ratio, objective.clip_low, objective.clip_high, objective.dual_clip)


def make_band(
    algorithm: str, ratio: str | None, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Band | None:
    """As `band_of`, from the values of its keys. `ratio`: of `objective`, for a recipe that leaves it open."""
    recipe = RECIPES[algorithm]
    if not recipe.is_clipped:
        return None
    if recipe.surrogate in ("dppo", "gmpo"):
        return Band(-clip_low, clip_high, per_token=True, of_probability=recipe.surrogate == "dppo")
    return Band(
        math.log1p(-clip_low) if clip_low < 1 else -math.inf,
        math.log1p(clip_high),
        per_token=(recipe.ratio or ratio) == "token",
        bounds_weight=recipe.surrogate == "cispo",
        dual_edge=math.inf if dual_clip is None else math.log(dual_clip),
    )


def share_sentence(band: Band, share: str, budget: float) -> str:
    """`share`: in widths of the range, with an error or without."""
    return f"the {band.what} is {share} widths of the clip range; mismatch.budget is {budget:g}"


def no_range_sentence(algorithm: str) -> str:
    return (
        f"{algorithm} clips nothing, so the mismatch has no clip range to be compared with; its k3 says how large it is"
    )
