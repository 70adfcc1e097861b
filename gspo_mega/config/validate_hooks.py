"""The rules of hooks: functions of the user in place of built-in advantages, terms, filters of groups and orders of
prompts.

`validate_hooks` says what can be told from the configuration. Whether a function can be imported, called and used is
tried by `gspo_mega/train/hook_trial.py` before a run. Where each hook is called: `train/batches.py` (advantage),
`algorithm/objective.py` (objective), `rollout/scheduler.py` (group_filter), `data/chosen_rows.py` (source).
docs/hooks.md has the protocols.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from gspo_mega.base.errors import Violation
from gspo_mega.config.algorithms import RECIPES, AlgorithmName
from gspo_mega.config.derived import hooks_of
from gspo_mega.config.prompt_sources import names_prompts, sources_of
from gspo_mega.config.schema import Advantage, Config, Data, Objective, Rollout

_FUNCTION_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
# A hook has its own parameters, so these keys of the objective would have no effect.
_CLIP_KEYS = ("clip_low", "clip_high", "dual_clip")


def validate_hooks(config: Config) -> Iterator[Violation]:
    """Yield what is wrong with `advantage.function`, `objective.function`, `rollout.group_filter` and `data.source`, or
    contradicts them.
    """
    for key, hook in hooks_of(config).items():
        if not _FUNCTION_PATH.fullmatch(hook.function):
            yield Violation(key, f"{hook.function!r} is no function; valid: package.module:function")
    if config.advantage.function is not None:
        yield from _validate_advantage(config.algorithm, config.advantage)
    if config.objective.function is not None:
        yield from _validate_objective(config.algorithm, config.objective)
    if config.rollout.group_filter is not None and config.rollout.filter_constant_groups:
        yield Violation(
            "rollout.filter_constant_groups",
            "true with `rollout.group_filter`, which decides instead; valid: false. Your function may drop groups whose"
            " rewards are all equal, too",
        )
    if config.data.source is not None:
        yield from _validate_source(config.data, config.rollout)


def _validate_advantage(algorithm: AlgorithmName, advantage: Advantage) -> Iterator[Violation]:
    recipe = RECIPES[algorithm]
    if recipe.has_critic:
        return  # `validate_critic` refuses every key of the section
    reasons = [reason for (section, _), reason in recipe.fixes.items() if section == "advantage"]
    if reasons:
        yield Violation("advantage.function", f"contradicts `algorithm: {recipe.name}`, {reasons[0]}; leave it out")
    of_recipe = recipe.settings.get("advantage", {})
    for key, field in Advantage.model_fields.items():
        if key != "function" and getattr(advantage, key) not in (field.default, of_recipe.get(key, field.default)):
            yield Violation(
                f"advantage.{key}", "has no effect with `advantage.function`; leave it out, or make it an option of it"
            )


def _validate_objective(algorithm: AlgorithmName, objective: Objective) -> Iterator[Violation]:
    if algorithm != "custom":
        yield Violation(
            "objective.function", f"contradicts `algorithm: {algorithm}`, which has its own term; valid: custom"
        )
    if objective.ratio == "sequence_token":
        yield Violation(
            "objective.ratio",
            "sequence_token with `objective.function`: its terms are of sequences or of tokens; valid: sequence, token",
        )
    for key in _CLIP_KEYS:
        if key in objective.model_fields_set and getattr(objective, key) != type(objective).model_fields[key].default:
            yield Violation(
                f"objective.{key}", "has no effect with `objective.function`; leave it out, or make it an option of it"
            )


def _validate_source(data: Data, rollout: Rollout) -> Iterator[Violation]:
    if not names_prompts(data):
        yield Violation("data.source", "there are no files of prompts to choose from; name data.path or data.sources")
        return
    if not data.shuffle:
        yield Violation("data.shuffle", "false has no effect with `data.source`, which makes the order; leave it out")
    if any(source.weight != 1 for source in sources_of(data)):
        yield Violation(
            "data.source", "weights of sources have no effect with it, which makes the order; leave them out"
        )
    if rollout.max_staleness > 0:
        yield Violation(
            "rollout.max_staleness",
            f"{rollout.max_staleness} with `data.source`: prompts would be chosen before the batches that the"
            " choice depends on are known, so that a continued run could not repeat it; valid: 0",
        )
