"""Advantages and terms of the user's own: what `advantage.function` and `objective.function` get, and what is checked
of what they return. docs/hooks.md shows one of each.

    def advantage(inputs: AdvantageInputs, **options) -> Tensor        [N], one advantage per response
    def objective(inputs: ObjectiveInputs, **options) -> Tensor | UserTerms

The advantages are computed on rank 0, over the whole rollout batch. A term is computed by each rank of the last
pipeline stage for each micro-batch; its inputs say what is local. Like built-in terms, it must not depend on anything
but its inputs, so that it is the same in every layout and when a step is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gspo_mega.base.errors import NumericsError
from gspo_mega.base.user_functions import LoadedHook, load_hook
from gspo_mega.config.schema import UserFunction

ADVANTAGE_KEY, OBJECTIVE_KEY = "advantage.function", "objective.function"


@dataclass(frozen=True)
class AdvantageInputs:
    """A rollout batch of N responses (episodes) with a reward, on the host.

    `rewards` [N] float64, finite. `group_ids` [N] int64: equal for the responses to one prompt; groups of any size, at
    least 2. `parts`: for each reward function its values [N] float64, NaN where it did not score. `weights`: the weight
    of each function in the reward. `lengths` [N] int64: sampled tokens. `step`: from 0.
    """

    rewards: Tensor
    group_ids: Tensor
    parts: Mapping[str, Tensor]
    weights: Mapping[str, float]
    lengths: Tensor
    step: int = 0


def load_advantage(settings: UserFunction) -> LoadedHook:
    """Return `advantage.function`. Raises HookError if it cannot be loaded or called."""
    return load_hook(ADVANTAGE_KEY, settings.function, settings.options, 1)


def user_advantages(hook: LoadedHook, inputs: AdvantageInputs) -> Tensor:
    """The advantages that `hook` gives to a batch: [N] float64, without gradient. Raises HookError if it fails, or
    returns something else than N finite numbers.
    """
    returned = hook(inputs)
    values = _tensor(hook, returned).detach().double().cpu()
    if values.shape != inputs.rewards.shape:
        raise hook.bad_result(f"a tensor of shape {list(values.shape)}; [{inputs.rewards.numel()}] was expected")
    bad = ~torch.isfinite(values)
    if bool(bad.any()):
        place = int(bad.to(torch.uint8).argmax())
        raise hook.bad_result(
            f"{float(values[place])} for response {place}, whose reward is {float(inputs.rewards[place]):g}; advantages"
            " must be finite"
        )
    return values


@dataclass(frozen=True)
class ObjectiveInputs:
    """A micro-batch of S sequences, of whose tokens this rank holds T. All numbers are float64.

    Of tokens, [T], local: `log_probs` (nats, with gradient); `old_log_probs`; `log_ratio`: their difference, with
    gradient; `advantages`; `counts` bool: False where a token contributes nothing; `segment_ids` int64: which sequence
    a token belongs to. Of sequences, [S], whole: `lengths`: active tokens on all context-parallel ranks; and
    `sequence_log_ratio`: log s_i, the mean of the log-ratio, with gradient; `sequence_advantages`; `sequence_counts`
    bool.

    `sequence_mean(values: [T]) -> [S]`: the mean over all active tokens of each sequence, with gradient in the tokens
    held here. It is a collective over the context-parallel ranks: call it equally often on every micro-batch.

    With `objective.ratio: token` neither `sequence_log_ratio` nor what `sequence_mean` returns has a gradient, because
    a term of one token must not have a gradient in a token that another rank holds.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    log_ratio: Tensor
    advantages: Tensor
    counts: Tensor
    segment_ids: Tensor
    lengths: Tensor
    sequence_log_ratio: Tensor
    sequence_advantages: Tensor
    sequence_counts: Tensor
    sequence_mean: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class UserTerms:
    """What a term may return besides the plain tensor of its values. `values`: [S] with `objective.ratio: sequence`,
    [T] with `token`, with gradient; the advantage is a factor in them. `high`, `low`: bool of the same shape, where the
    term was clipped or masked because its ratio is too large or too small; they are only counted.
    """

    values: Tensor
    high: Tensor | None = None
    low: Tensor | None = None


def load_objective(settings: UserFunction) -> LoadedHook:
    """Return `objective.function`. Raises HookError if it cannot be loaded or called."""
    return load_hook(OBJECTIVE_KEY, settings.function, settings.options, 1)


def user_terms(hook: LoadedHook, inputs: ObjectiveInputs, of_sequences: bool) -> UserTerms:
    """The terms that `hook` gives to a micro-batch, with all flags. Entries that do not count are 0 without gradient.

    Raises HookError if it fails, or returns something else than such terms.
    """
    returned = hook(inputs)
    terms = returned if isinstance(returned, UserTerms) else UserTerms(_tensor(hook, returned))
    counts = inputs.sequence_counts if of_sequences else inputs.counts
    flags = []
    for name, values in (("values", terms.values), ("high", terms.high), ("low", terms.low)):
        if values is not None and values.shape != counts.shape:
            unit = "sequence" if of_sequences else "token"
            raise hook.bad_result(
                f"{name} of shape {list(values.shape)}; with `objective.ratio: {unit}` one number per {unit} was"
                f" expected, {list(counts.shape)}"
            )
        if name != "values":
            flags.append(torch.zeros_like(counts) if values is None else values.detach().bool() & counts)
    return UserTerms(torch.where(counts, terms.values.double(), 0.0), *flags)


def non_finite_term(hook: LoadedHook) -> Callable[[Any], NumericsError]:
    """What describes a term that is not finite, for `require_finite`."""
    return lambda bad: NumericsError(f"{hook.key}: {hook.name}: {bad}; terms must be finite")


def _tensor(hook: LoadedHook, returned: Any) -> Tensor:
    if isinstance(returned, Tensor):
        return returned
    try:
        return torch.as_tensor(returned, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise hook.bad_result(f"{type(returned).__name__}, which is no tensor of numbers") from error
