"""The rules of what is learned: the algorithm and its defaults, the critic, staleness, adapters, batch invariance.

`resolve_defaults` fills in what the recipe of `algorithm` gives to other keys; the recipes are the table in
`algorithms.py`. The validators after it expect a configuration whose defaults are resolved. What follows from the model
or the device is in `plan/validate.py` (`validate_lora`) and `plan/validate_precision.py` (`validate_batch_invariance`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from gspo_mega.base.errors import Violation
from gspo_mega.config.algorithms import CORRECTION_LIMITS, PARAMETERS, RECIPES, AlgorithmName, Ratio, Recipe
from gspo_mega.config.derived import (
    critic_config,
    critic_of,
    is_one_turn,
    least_of_group,
    needs_old_log_prob_pass,
    on_publish,
)
from gspo_mega.config.precision import server_dtype
from gspo_mega.config.schema import Advantage, Config, Critic, Objective

_WITH_INVARIANCE = "with `engine.batch_invariant: true`"


def resolve_defaults(config: Config) -> Config:
    """Return `config` with the defaults that depend on another key: those that the algorithm's recipe gives to
    `objective` and to other sections, `objective.norm_constant_tokens` (from `rollout.max_new_tokens`) for a recipe
    that divides by it, and the critic of a recipe that has one.
    """
    recipe = RECIPES[config.algorithm]
    wanted: dict[str, dict[str, Any]] = {section: dict(values) for section, values in recipe.settings.items()}
    wanted["objective"] = dict(recipe.objective_defaults)
    averages_otherwise = _averages_otherwise(config.objective, config.algorithm)
    if recipe.aggregation == "sequence_mean_token_sum_norm" and not averages_otherwise:
        wanted["objective"]["norm_constant_tokens"] = config.rollout.max_new_tokens
    changes: dict[str, Any] = {}
    for section, values in wanted.items():
        current: Any = getattr(config, section) if section else config
        missing = {
            key: value
            for key, value in values.items()
            if key not in current.model_fields_set and value != getattr(current, key)
        }
        if missing:
            changes |= {section: current.model_copy(update=missing)} if section else missing
    if recipe.has_critic and config.critic is None:
        changes["critic"] = Critic()
    return config.model_copy(update=changes) if changes else config


def _averages_otherwise(objective: Objective, algorithm: AlgorithmName) -> bool:
    """Whether the configuration names an aggregation that is not its recipe's."""
    given = "aggregation" in objective.model_fields_set
    return given and objective.aggregation != RECIPES[algorithm].aggregation


def validate_objective(config: Config, command: str | None = None) -> Iterator[Violation]:
    """Yield what contradicts the algorithm. `certify` records old log-probs of its own, so `old_log_probs` has no
    effect there.
    """
    objective, recipe = config.objective, RECIPES[config.algorithm]
    yield from _validate_recipe(config, recipe, own_old_log_probs=command == "certify")
    yield from _validate_parameters(config.objective, recipe)
    yield from _validate_advantages(config)
    yield from _validate_correction(config)
    if recipe.ratio is None and objective.ratio is None:
        yield Violation(
            "objective.ratio",
            f"missing; `algorithm: {recipe.name}` needs it; valid: {', '.join(get_args(Ratio))}",
        )
    if recipe.ratio is not None and objective.ratio is not None:
        yield Violation(
            "objective.ratio", f"`algorithm: {recipe.name}` has its own ratio; leave it out, or use `algorithm: custom`"
        )
    given = objective.function is not None or {"clip_low", "clip_high"} <= objective.model_fields_set
    if objective.ratio == "token" and not given:
        grpo = RECIPES["grpo"]
        yield Violation(
            "objective.clip_low",
            "the default clip range is that of a sequence ratio; with `ratio: token` give clip_low and clip_high "
            f"(GRPO's: {grpo.clip_low:g} and {grpo.clip_high:g})",
        )
    norm = objective.aggregation == "sequence_mean_token_sum_norm"
    if norm and objective.norm_constant_tokens is None:
        yield Violation(
            "objective.norm_constant_tokens", "missing; `aggregation: sequence_mean_token_sum_norm` divides by it"
        )
    if not norm and objective.norm_constant_tokens is not None:
        yield Violation(
            "objective.norm_constant_tokens",
            f"`aggregation: {objective.aggregation}` does not use it; leave it out, or use"
            " sequence_mean_token_sum_norm",
        )


def _validate_recipe(config: Config, recipe: Recipe, own_old_log_probs: bool) -> Iterator[Violation]:
    """Yield the settings that the recipe of `algorithm` forbids."""
    objective, largest = config.objective, recipe.largest_clip
    for key, value in (("clip_low", objective.clip_low), ("clip_high", objective.clip_high)):
        if largest is not None and value > largest:
            yield Violation(
                f"objective.{key}",
                f"{value:g} contradicts `algorithm: {recipe.name}`, whose ratio is a mean over a whole response and"
                f" is clipped at {recipe.clip_low:g} / {recipe.clip_high:g} in the paper; at most {largest:g} (or"
                " `algorithm: custom`, or `algorithm: grpo`)",
            )
    if recipe.fixes_aggregation and objective.aggregation != recipe.aggregation:
        yield Violation(
            "objective.aggregation",
            f"{objective.aggregation} contradicts `algorithm: {recipe.name}`; valid: {recipe.aggregation} "
            "(or `algorithm: custom`)",
        )
    if config.kl.coefficient > 0 and not recipe.takes_kl:
        yield Violation(
            "kl.coefficient",
            f"{config.kl.coefficient:g} contradicts `algorithm: {recipe.name}`, which has no KL term; valid: 0 (or"
            " `algorithm: custom`, or `algorithm: grpo`)",
        )
    for (section, key), reason in recipe.fixes.items():
        value = getattr(getattr(config, section) if section else config, key)
        own = recipe.settings[section][key]
        if value != own and not (own_old_log_probs and key == "old_log_probs"):
            shown, valid = (str(one).lower() if isinstance(one, bool) else one for one in (value, own))
            yield Violation(
                f"{section}.{key}" if section else key,
                f"{shown} contradicts `algorithm: {recipe.name}`, {reason}; valid: {valid}",
            )


def _validate_parameters(objective: Objective, recipe: Recipe) -> Iterator[Violation]:
    """Yield the keys of `objective` that belong to another algorithm."""
    for key in PARAMETERS:
        if getattr(objective, key) is not None and key not in recipe.parameters:
            owner = next(one.name for one in RECIPES.values() if key in one.parameters)
            yield Violation(
                f"objective.{key}",
                f"has no effect with `algorithm: {recipe.name}`; leave it out, or use `algorithm: {owner}`",
            )
    low, high = objective.covariance_low, objective.covariance_high
    if low is not None and high is not None and low >= high:
        yield Violation("objective.covariance_low", f"{low:g}; must be < covariance_high ({high:g})")
    if objective.dual_clip is not None and recipe.surrogate != "clip":
        yield Violation(
            "objective.dual_clip",
            f"`algorithm: {recipe.name}` bounds no term from below; leave it out",
        )


def _validate_correction(config: Config) -> Iterator[Violation]:
    """Yield what contradicts a named correction of the mismatch, and limits that belong to another one."""
    mismatch, recipe = config.mismatch, RECIPES[config.algorithm]
    limits = CORRECTION_LIMITS.get(mismatch.correction, {})
    for key in ("upper", "lower", "threshold"):
        if getattr(mismatch, key) is not None and key not in limits:
            owners = ", ".join(name for name, keys in CORRECTION_LIMITS.items() if key in keys)
            yield Violation(
                f"mismatch.{key}", f"has no effect with `correction: {mismatch.correction}`; it belongs to: {owners}"
            )
    if not limits or ("mismatch", "correction") in recipe.fixes:
        return
    if config.old_log_probs == "rollout":
        yield Violation(
            "mismatch.correction",
            f"{mismatch.correction} with `old_log_probs: rollout`: the servers' log-probs are the old ones, so the"
            " mismatch is in the policy ratio and its weight is 1; valid: none, or `old_log_probs: trainer`",
        )
    of_sequences = recipe.has_one_advantage or config.objective.ratio == "sequence"
    if of_sequences and mismatch.correction != "sequence_mis":
        yield Violation(
            "mismatch.correction",
            f"{mismatch.correction} weighs tokens, and `algorithm: {recipe.name}` has one term of a whole response;"
            " valid: none, truncate, mask, sequence_mis (or `algorithm: gspo_token`)",
        )
    for key in ("bound_nats", "kept_weight", "segment_tokens"):
        if getattr(mismatch, key) != type(mismatch).model_fields[key].default:
            yield Violation(f"mismatch.{key}", f"has no effect with `correction: {mismatch.correction}`; leave it out")
    if (low := mismatch.lower) is not None and low >= (mismatch.upper or limits["upper"]):
        yield Violation("mismatch.lower", f"{low:g} is not below mismatch.upper")


def _validate_advantages(config: Config) -> Iterator[Violation]:
    """Yield combinations of baseline and deviation that no estimator has, and groups too small to compare anything."""
    advantage = config.advantage
    by_batch = advantage.std_over == "batch"
    if by_batch and not advantage.divide_by_std:
        yield Violation("advantage.std_over", "batch has no effect with `divide_by_std: false`; leave it out")
    if advantage.baseline != "group" and advantage.divide_by_std and not by_batch:
        yield Violation(
            "advantage.baseline",
            f"{advantage.baseline} with a division by the group's standard deviation; set `divide_by_std: false`"
            " (RLOO), or `std_over: batch` (REINFORCE++)",
        )
    if advantage.turns == "return_to_go" and (advantage.baseline != "group" or by_batch):
        yield Violation(
            "advantage.turns",
            "return_to_go has a baseline of the group's turns; valid then: `baseline: group`, `std_over: group`",
        )
    if advantage.rewards == "separate":
        yield from _validate_separate_rewards(config)
    if config.batch.group_size < least_of_group(config):
        owners = ", ".join(name for name, recipe in RECIPES.items() if recipe.has_critic)
        whose = (
            "`advantage.baseline: leave_one_out`, which is the mean of the other responses to a prompt"
            if advantage.baseline == "leave_one_out"
            else f"`algorithm: {config.algorithm}`, whose advantages compare the responses to one prompt"
        )
        yield Violation(
            "batch.group_size",
            f"{config.batch.group_size} with {whose}; at least 2 (1 is valid with: {owners}, `advantage.baseline:"
            " batch`)",
        )
    if advantage.baseline == "batch" and config.rollout.filter_constant_groups:
        yield Violation(
            "rollout.filter_constant_groups",
            "true with `advantage.baseline: batch`: a group whose rewards are all equal has advantages against the"
            " batch's mean; valid: false",
        )


def _validate_separate_rewards(config: Config) -> Iterator[Violation]:
    """Yield what contradicts advantages of each reward function by itself."""
    key, advantage, functions = "advantage.rewards", config.advantage, config.reward.functions
    if not advantage.divide_by_std:
        yield Violation(key, "separate divides by each function's deviation; valid then: `divide_by_std: true`")
    for other in ("baseline", "std_over", "turns"):
        if getattr(advantage, other) != type(advantage).model_fields[other].default:
            yield Violation(f"advantage.{other}", f"has no effect with `{key}: separate`; leave it out")
    names = [one.name or one.function for one in functions]
    if not is_one_turn(config.rollout):
        yield Violation(
            key,
            f"separate with `rollout.episode: {config.rollout.episode.function}`, whose turns may have rewards of their"
            " own; valid then: sum",
        )
    if len(functions) < 2:
        yield Violation(key, f"separate, but the reward has {len(functions)} functions; at least 2")
    if double := sorted({name for name in names if names.count(name) > 1}):
        yield Violation(key, f"separate, and two functions are called {double[0]}; give each a `name` of its own")
    if any(source.reward is not None for source in config.data.sources):
        yield Violation(key, "separate, and a source has a reward of its own; valid then: sum")
    if config.rollout.filter_constant_groups:
        yield Violation(
            "rollout.filter_constant_groups",
            f"true with `{key}: separate`: a group with equal sums may differ in its parts; valid: false",
        )


def validate_critic(config: Config) -> Iterator[Violation]:
    """Yield what contradicts the critic of an algorithm that has one, and a section `critic` that has no effect."""
    critic = critic_of(config.algorithm, config.critic)
    if critic is None:
        owners = ", ".join(name for name, recipe in RECIPES.items() if recipe.has_critic)
        if config.critic is not None:
            yield Violation(
                "critic", f"has no effect with `algorithm: {config.algorithm}`; leave it out, or use: {owners}"
            )
        return
    yield from _validate_unused_advantage_keys(config.advantage, config.algorithm)
    yield from _validate_critic_features(config)
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
            f"{own.precision} with `precision: {config.precision}`: both models get the same packs, whose lengths"
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


def _validate_unused_advantage_keys(advantage: Advantage, algorithm: AlgorithmName) -> Iterator[Violation]:
    """Yield the keys of advantages that are relative to a group or a batch, which a critic replaces."""
    for key in ("function", "divide_by_std", "baseline", "std_over", "rewards", "turns", "turn_discount"):
        default = type(advantage).model_fields[key].default
        if getattr(advantage, key) != default:
            yield Violation(
                f"advantage.{key}",
                f"has no effect with `algorithm: {algorithm}`, whose advantages are estimated from the critic's"
                " values and the rewards of turns (critic.gamma, critic.gae_lambda, critic.whiten); leave it out",
            )


def _validate_critic_features(config: Config) -> Iterator[Violation]:
    """Yield the features that need a policy without a second model, or that sample with earlier weights."""
    name = config.algorithm
    if config.lora is not None:
        yield Violation(
            "lora",
            f"with `algorithm: {name}`: adapters together with a critic, which is trained whole, are not"
            " implemented; remove it",
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
            f"{config.rollout.max_staleness} with `algorithm: {name}`: values and advantages belong to the weights"
            " that are trained, not to the earlier ones that sampled; valid: 0",
        )


def validate_staleness(config: Config) -> Iterator[Violation]:
    """Yield what makes it impossible for `diagnostics.exact_staleness` to measure staleness."""
    if not config.diagnostics.exact_staleness:
        return
    if not needs_old_log_prob_pass(config):
        yield Violation(
            "diagnostics.exact_staleness",
            "true, but no pass measures the gap that it splits; valid: false, or `old_log_probs: trainer` with several"
            " mini-batches or a mismatch.correction",
        )
    if config.precision == "fp8":
        yield Violation(
            "diagnostics.exact_staleness",
            "true with `precision: fp8`: earlier weights are kept in bf16 or fp32 only; valid: false",
        )
    if config.rollout.max_staleness > 0 and on_publish(config.rollout) == "continue_with_cache":
        yield Violation(
            "diagnostics.exact_staleness",
            "true with `rollout.on_publish: continue_with_cache`: tokens after a publish belong to no version, so"
            " no kept"
            " weights reproduce them; valid: false, or `on_publish: continue`",
        )


def validate_lora(config: Config) -> Iterator[Violation]:
    """Yield what contradicts adapters (`lora`) in every model."""
    yield from _validate_published_adapters(config)
    lora = config.lora
    if lora is None:
        return
    if config.precision == "fp8":
        yield Violation("precision", "fp8 with `lora`: adapters on FP8 layers were not tried; valid then: bf16, fp32")
    if lora.dropout > 0 and config.parallel.tensor > 1:
        yield Violation(
            "lora.dropout",
            f"{lora.dropout:g} with parallel.tensor {config.parallel.tensor}: tensor ranks would drop different inputs"
            " of one adapter; valid then: 0",
        )
    if config.moe.expert_bias_update_rate > 0:
        yield Violation(
            "moe.expert_bias_update_rate",
            f"{config.moe.expert_bias_update_rate:g} with `lora`: it moves the model's own bias, which neither an"
            " adapter nor its checkpoint holds; valid then: 0",
        )
    for name in {target for target in lora.targets if lora.targets.count(target) > 1}:
        yield Violation("lora.targets", f"{name!r} occurs {lora.targets.count(name)} times; list it once")


def _validate_published_adapters(config: Config) -> Iterator[Violation]:
    """Yield what contradicts `publish.lora: adapter`."""
    if config.publish.lora != "adapter":
        return
    said = "with `publish.lora: adapter`"
    if config.lora is None:
        yield Violation("publish.lora", "adapter without `lora`: there are no adapters to publish; valid then: merged")
        return
    if config.publish.method != "disk":
        yield Violation(
            "publish.method", f"{config.publish.method} {said}: SGLang loads adapters from a folder; valid then: disk"
        )
    if config.model.weights is not None:
        yield Violation(
            "model.weights", f"set {said}: servers hold the weights of model.path; leave it out, or publish them merged"
        )
    if config.train is not None and config.train.rollouts_only:
        yield Violation(
            "publish.lora", "adapter with `train.rollouts_only`: nothing is trained or published; valid then: merged"
        )
    if config.server.quantization != "none":
        yield Violation(
            "server.quantization",
            f"{config.server.quantization} {said}: adapters with quantized layers were not compared with the"
            " trainer's; valid then: none",
        )
    if config.server.speculative is not None:
        yield Violation(
            "server.speculative", f"set {said}: the draft would propose tokens of a policy without them; leave it out"
        )
    if config.cluster.colocated:
        yield Violation(
            "cluster.colocated",
            f"true {said}: whether adapters that a server holds survive giving its GPU away was not tried; valid then:"
            " false, or `publish.lora: merged`",
        )
    if config.server.attention_data > 1:
        yield Violation(
            "server.attention_data",
            f"{config.server.attention_data} {said}: SGLang then takes only adapters that stay loaded; valid then: 1",
        )
    if on_publish(config.rollout) == "continue_with_cache":
        yield Violation(
            "rollout.on_publish",
            f"continue_with_cache {said}: an open request keeps the adapter that it began with, and SGLang does not"
            " unload that before the request ends; valid then: wait, continue",
        )
    if config.eval is not None and not config.eval.blocking:
        yield Violation(
            "eval.blocking",
            f"false {said}: a server that is set aside loads a version as whole weights; valid then: true",
        )


def validate_batch_invariance(config: Config) -> Iterator[Violation]:
    """Yield the settings with which trainer and servers would add in different orders or round differently."""
    if not config.engine.batch_invariant:
        return
    parallel, server = config.parallel, config.server
    if config.precision == "fp8":
        yield Violation(
            "precision", f"fp8 {_WITH_INVARIANCE}: only plain layers have these operations; valid then: fp32, bf16"
        )
    for key in ("transformer_engine", "fuse_activation"):
        if getattr(config.engine, key):
            yield Violation(
                f"engine.{key}",
                f"true {_WITH_INVARIANCE}, whose operations are different ones; valid then: false, or leave it out",
            )
    ways = {name: getattr(parallel, name) for name in ("tensor", "pipeline", "context")} | {"server": server.tensor}
    for name, size in ways.items():
        if size > 1:
            key = "server.tensor" if name == "server" else f"parallel.{name}"
            why = "was not compared" if name == "pipeline" else "divides sums over ranks"
            yield Violation(key, f"{size} {_WITH_INVARIANCE}: it {why}; valid then: 1")
    if config.lora is not None:
        yield Violation("lora", f"set {_WITH_INVARIANCE}: adapters were not compared; leave one of the two out")
    if server.quantization != "none":
        yield Violation("server.quantization", f"{server.quantization} {_WITH_INVARIANCE}: it rounds; valid then: none")
    if server.kv_cache != "auto":
        yield Violation("server.kv_cache", f"{server.kv_cache} {_WITH_INVARIANCE}: it rounds; valid then: auto")
    if config.precision != "fp8" and server_dtype(config.server, config.precision) != config.precision:
        yield Violation(
            "server.dtype", f"{server.dtype} {_WITH_INVARIANCE} and `precision: {config.precision}`; valid then: auto"
        )
    if server.attention_backend is not None:
        yield Violation(
            "server.attention_backend",
            f"{server.attention_backend} {_WITH_INVARIANCE}, which uses its own backend; leave it out",
        )
    if server.speculative is not None:
        yield Violation("server.speculative", f"set {_WITH_INVARIANCE}: its passes were not compared; leave it out")
    if config.objective.entropy_coefficient > 0:
        yield Violation(
            "objective.entropy_coefficient",
            f"set {_WITH_INVARIANCE}: its gradient was not compared; valid then: 0",
        )
