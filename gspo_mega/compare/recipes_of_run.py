"""The configurations that a comparison computes: the run's own for its own algorithm, a recipe's defaults for others.

Owns what differs between two algorithms of one comparison, and what does not. Imports no torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from gspo_mega.config.objective_rules import resolve_defaults
from gspo_mega.config.recipes import RECIPES
from gspo_mega.config.schema import Advantage, Config, Kl, Objective
from gspo_mega.errors import ConfigError


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
    """The run's configuration with algorithm `name`: its objective and advantages. The run's own algorithm keeps
    the run's; another has its paper's defaults, whatever the run says. One mini-batch, no KL term and no router loss:
    what is compared is the objective.
    """
    changes = {
        "batch": config.batch.model_copy(update={"num_mini_batches": 1}),
        "kl": Kl(),
        "moe": config.moe.model_copy(
            update={"load_balancing": "none", "load_balancing_coefficient": 0.0, "z_loss_coefficient": 0.0}
        ),
    }
    if name != config.algorithm:
        changes |= {"algorithm": name, "objective": Objective(scope=config.objective.scope), "advantage": Advantage()}
    changed = config.model_copy(update=changes)
    # What a recipe sets outside of these sections is the comparison's own: all algorithms see the same old policy.
    resolved = resolve_defaults(changed)
    return changed.model_copy(update={"objective": resolved.objective, "advantage": resolved.advantage})
