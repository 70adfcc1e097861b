"""What the recipe of `algorithm` gives to other keys, and what contradicts it.

Owns the defaults that depend on the algorithm and the refusals of its keys; the recipes are the table `recipes.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from gspo_mega.base.errors import Violation
from gspo_mega.config.critic_config import least_of_group
from gspo_mega.config.recipes import PARAMETERS, RECIPES, Ratio, Recipe
from gspo_mega.config.schema import Config, Critic


def resolve_defaults(config: Config) -> Config:
    """Fill in the defaults that depend on another key: those that the algorithm's recipe gives to `objective` and to
    other sections, the constant of a recipe that divides by one, `rollout.max_new_tokens`, and the critic of a recipe
    that has one.
    """
    recipe = RECIPES[config.algorithm]
    wanted: dict[str, dict[str, Any]] = {section: dict(values) for section, values in recipe.settings.items()}
    wanted["objective"] = dict(recipe.objective_defaults)
    if recipe.aggregation == "sequence_mean_token_sum_norm" and not _averages_otherwise(config):
        wanted["objective"]["norm_constant_tokens"] = config.rollout.max_new_tokens
    changes: dict[str, Any] = {}
    for section, values in wanted.items():
        of: Any = getattr(config, section) if section else config
        missing = {
            key: value for key, value in values.items() if key not in of.model_fields_set and value != getattr(of, key)
        }
        if missing:
            changes |= {section: of.model_copy(update=missing)} if section else missing
    if recipe.has_critic and config.critic is None:
        changes["critic"] = Critic()
    return config.model_copy(update=changes) if changes else config


def _averages_otherwise(config: Config) -> bool:
    """Whether the configuration names an aggregation that is not its recipe's."""
    objective = config.objective
    given = "aggregation" in objective.model_fields_set
    return given and objective.aggregation != RECIPES[config.algorithm].aggregation


def objective_violations(config: Config, command: str | None = None) -> Iterator[Violation]:
    """What contradicts the algorithm, of a configuration whose defaults are resolved. `certify` records old log-probs
    of its own, so that `old_log_probs` says nothing there.
    """
    objective, recipe = config.objective, RECIPES[config.algorithm]
    yield from _contradictions(config, recipe, own_old_log_probs=command == "certify")
    yield from _parameters(config, recipe)
    yield from _advantages(config)
    if recipe.ratio is None and objective.ratio is None:
        yield Violation(
            "objective.ratio",
            f"missing; `algorithm: {recipe.name}` needs it; valid: {', '.join(get_args(Ratio))}",
        )
    if recipe.ratio is not None and objective.ratio is not None:
        yield Violation(
            "objective.ratio", f"`algorithm: {recipe.name}` has its own ratio; leave it out, or use `algorithm: custom`"
        )
    if objective.ratio == "token" and not {"clip_low", "clip_high"} <= objective.model_fields_set:
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


def _contradictions(config: Config, recipe: Recipe, own_old_log_probs: bool) -> Iterator[Violation]:
    """Settings that the recipe of `algorithm` forbids."""
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


def _parameters(config: Config, recipe: Recipe) -> Iterator[Violation]:
    """Keys of `objective` that another algorithm has."""
    objective = config.objective
    for key in PARAMETERS:
        if getattr(objective, key) is not None and key not in recipe.parameters:
            owner = next(one.name for one in RECIPES.values() if key in one.parameters)
            yield Violation(
                f"objective.{key}",
                f"has no effect with `algorithm: {recipe.name}`; leave it out, or use `algorithm: {owner}`",
            )
    if objective.dual_clip is not None and recipe.surrogate != "clip":
        yield Violation(
            "objective.dual_clip",
            f"`algorithm: {recipe.name}` bounds no term from below; leave it out",
        )


def _advantages(config: Config) -> Iterator[Violation]:
    """Combinations of baseline and deviation that no estimator has, and groups in which one compares nothing."""
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
