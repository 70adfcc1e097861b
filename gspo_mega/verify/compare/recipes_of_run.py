"""The configurations that a comparison computes: the run's own for its own algorithm and for the other form of the
same objective (GSPO and GSPO-token), a recipe's defaults for others.

Owns what differs between two algorithms of one comparison, and what does not. Imports no torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from gspo_mega.base.errors import ConfigError
from gspo_mega.config.objective_rules import resolve_defaults
from gspo_mega.config.recipes import RECIPES
from gspo_mega.config.schema import Advantage, Config, Kl, Objective


def check_algorithms(config: Config, names: Sequence[str]) -> tuple[str, ...]:
    """`names` without repetition. Raises ConfigError for one that is no recipe, for one with a critic, whose values no
    journal has, and for `custom` in a run that is not of it: it has no defaults.
    """
    for name in names:
        if name not in RECIPES:
            near = difflib.get_close_matches(name, RECIPES, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"valid: {', '.join(RECIPES)}"
            raise ConfigError(f"--algorithms: {name!r} is no algorithm; {hint}")
        if RECIPES[name].has_critic:
            raise ConfigError(
                f"--algorithms: the gradient of {name} is made of a critic's values, which a run does not record;"
                f" valid: {', '.join(other for other, recipe in RECIPES.items() if not recipe.has_critic)}"
            )
        if name == "custom" and config.algorithm != "custom":
            raise ConfigError(
                "--algorithms: custom has no defaults of its own, and the run's algorithm is"
                f" {config.algorithm}; name a recipe"
            )
    return tuple(dict.fromkeys(names))


def config_of(config: Config, name: str) -> Config:
    """The run's configuration with algorithm `name`: its objective and advantages. The run's own algorithm keeps the
    run's, and so does the other form of the same objective, so that GSPO-token is GSPO in any range where advantages
    are equal; another has its paper's defaults, whatever the run says. One mini-batch, no KL term and no router loss:
    what is compared is the objective.
    """
    changes = {
        "batch": config.batch.model_copy(update={"num_mini_batches": 1}),
        "kl": Kl(),
        "moe": config.moe.model_copy(
            update={"load_balancing": "none", "load_balancing_coefficient": 0.0, "z_loss_coefficient": 0.0}
        ),
    }
    if name != config.algorithm and _is_other_form(config.algorithm, name):
        advantage = config.advantage
        if RECIPES[name].has_one_advantage:
            advantage = advantage.model_copy(update={"turns": "episode", "turn_discount": 1.0})
        changes |= {"algorithm": name, "advantage": advantage}
    elif name != config.algorithm:
        changes |= {"algorithm": name, "objective": Objective(scope=config.objective.scope), "advantage": Advantage()}
    changed = config.model_copy(update=changes)
    # What a recipe sets outside of these sections is the comparison's own: all algorithms see the same old policy.
    resolved = resolve_defaults(changed)
    return changed.model_copy(update={"objective": resolved.objective, "advantage": resolved.advantage})


def range_of(config: Config, name: str) -> dict[str, Any]:
    """The clip range that algorithm `name` is compared with, as keys of `objective`, and whose it is: `run` or `paper`.
    None where it clips nothing.
    """
    if not RECIPES[name].is_clipped:
        return {"clip_low": None, "clip_high": None, "range_of": None}
    objective = config_of(config, name).objective
    is_runs = name == config.algorithm or _is_other_form(config.algorithm, name)
    return {
        "clip_low": objective.clip_low,
        "clip_high": objective.clip_high,
        "range_of": "run" if is_runs else "paper",
    }


def _is_other_form(own: str, name: str) -> bool:
    """Whether two algorithms are one objective, whose ratio of a response is taken whole or token by token."""
    one, other = RECIPES[own], RECIPES[name]
    of_response = {one.ratio, other.ratio} == {"sequence", "sequence_token"}
    return of_response and one.objective_defaults == other.objective_defaults
