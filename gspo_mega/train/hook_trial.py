"""Try the hooks of a configuration before a run, on a small made-up batch and on the rows of its files.

`try_hooks` calls each function as the run will, and checks what it returns with the run's own functions. So a function
that cannot be imported, that does not take the arguments, that returns the wrong shape, or that fails on a group
without a success is refused before any process starts. docs/hooks.md describes the protocols.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from gspo_mega.algorithm.hooks import AdvantageInputs, load_advantage, user_advantages
from gspo_mega.algorithm.objective import policy_objective
from gspo_mega.algorithm.terms import objective_settings
from gspo_mega.base.errors import HookError
from gspo_mega.base.group_results import GroupResult, ResponseResult
from gspo_mega.config.algorithms import AlgorithmName
from gspo_mega.config.derived import hooks_of
from gspo_mega.config.schema import Config, Objective, UserFunction
from gspo_mega.data.chosen_rows import SOURCE_KEY, ChosenRows, load_source
from gspo_mega.data.prompts import PromptSource
from gspo_mega.rollout.scheduler import is_kept_by, load_group_filter

# One group with a success and a failure, one without a success, one without a failure.
_REWARDS = (1.0, 0.0, 0.0, 0.0, 1.0, 1.0)
_GROUPS = (0, 0, 1, 1, 2, 2)
_NUM_DRAWS = 4


def try_hooks(config: Config, sources: Sequence[PromptSource]) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield (key, function) for each hook; the function tries it. It raises HookError, NumericsError or DataError.

    `sources`: the files of prompts of the run, as far as they were read; without any, `data.source` is only loaded.
    """
    weights = {one.name or one.function: one.weight for one in config.reward.functions}
    tries: dict[str, Callable[[UserFunction], None]] = {
        "advantage.function": lambda hook: try_advantage(hook, weights),
        "objective.function": lambda hook: try_objective(config.algorithm, config.objective, hook),
        "rollout.group_filter": lambda hook: try_group_filter(hook, weights),
        "data.source": lambda hook: try_source(hook, sources, config.run.seed, weights),
    }
    for key, hook in hooks_of(config).items():
        yield key, partial(tries[key], hook)


def try_advantage(hook: UserFunction, weights: dict[str, float]) -> None:
    """Call `advantage.function` on three groups of two. `weights`: of the reward functions, by name. Raises
    HookError.
    """
    rewards = torch.tensor(_REWARDS, dtype=torch.float64)
    inputs = AdvantageInputs(
        rewards=rewards,
        group_ids=torch.tensor(_GROUPS),
        parts={name: rewards.clone() for name in weights},
        weights=weights,
        lengths=torch.arange(1, len(_REWARDS) + 1),
    )
    user_advantages(load_advantage(hook), inputs)


def try_objective(algorithm: AlgorithmName, objective: Objective, hook: UserFunction) -> None:
    """Compute the whole objective with `objective.function` on three sequences, once at ratio 1 and once away from it,
    and its gradient. Raises HookError, and NumericsError for a term that is not finite.
    """
    settings = objective_settings(algorithm, objective)
    said = f"objective.function: {hook.function}"
    segment_ids = torch.tensor([0, 0, 0, 1, 1, 2])
    old = torch.tensor([-0.1, -2.0, -0.7, -1.0, -3.0, -0.5], dtype=torch.float64)
    for moved in (0.0, 0.3):
        shift = moved * torch.tensor([1.0, -1.0, 0.5, 2.0, -0.5, -1.0], dtype=torch.float64)
        log_probs = (old + shift).requires_grad_()
        output = policy_objective(
            settings,
            log_probs=log_probs,
            old_log_probs=old,
            mask=torch.ones(6),
            segment_ids=segment_ids,
            num_sequences=3,
            advantages=torch.tensor([1.0, -1.0, 0.0]),
            lengths=torch.tensor([3, 2, 1]),
            denominator=3,
            group_sizes=torch.tensor([3, 3, 3]),
        )
        if not output.objective_sum.requires_grad:
            raise HookError(f"{said}: its terms have no gradient")
        output.objective_sum.backward()
        if log_probs.grad is None or not bool(torch.isfinite(log_probs.grad).all()):
            raise HookError(f"{said}: the gradient is not finite where log-ratios are {shift.tolist()}")


def try_group_filter(hook: UserFunction, weights: dict[str, float]) -> None:
    """Call `rollout.group_filter` on a group with a success and one without. Raises HookError."""
    keeps = load_group_filter(hook)
    for rewards in ((1.0, 0.0), (0.0, 0.0)):
        is_kept_by(keeps, _group("trial:0", "trial", rewards, weights))


def _group(prompt_id: str, source: str, rewards: Sequence[float], weights: dict[str, float]) -> GroupResult:
    responses = tuple(
        ResponseResult(reward, dict.fromkeys(weights, reward), bool(reward), num_tokens=8, is_truncated=False)
        for reward in rewards
    )
    return GroupResult(prompt_id, source, "", None, {}, responses)


def try_source(hook: UserFunction, sources: Sequence[PromptSource], seed: int, weights: dict[str, float]) -> None:
    """Draw a few prompts, report results of them, and draw some more; then restore the state from between, and check
    that the same prompts come again. Raises HookError or DataError.
    """
    chooser = load_source(hook)
    if not sources:
        return
    stream = ChosenRows(sources, chooser, seed=seed)
    first = [stream.next() for _ in range(_NUM_DRAWS)]
    results = [_group(one.prompt_id, one.source, (1.0, 0.0), weights) for one in first]
    stream.observe(results)
    between = stream.state_dict()
    after = [stream.next().prompt_id for _ in range(_NUM_DRAWS)]
    again = ChosenRows(sources, chooser, seed=seed)
    again.load_state_dict(between)
    if (repeated := [again.next().prompt_id for _ in range(_NUM_DRAWS)]) != after:
        raise HookError(
            f"{SOURCE_KEY}: {chooser.name}: after restore(state()) the next rows are {', '.join(repeated)}; before they"
            f" were {', '.join(after)}. A continued run would sample other prompts: the state must hold all that next()"
            " depends on"
        )
