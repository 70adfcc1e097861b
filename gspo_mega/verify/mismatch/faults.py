"""Find what is not rounding: a wrong temperature, another prompt, a stale cache, other weights, or a wrong product.

Rounding has a size that follows from the format, does not depend on how likely a token was, and begins at the first
token. Each check looks for one way in which an error differs from that. No I/O.

Sizes. A format with unit roundoff u rounds the operands of each product. The relative error of a sum of many products
is about u; the errors of a layer's two halves add up over L layers like independent ones, to sqrt(2 L) u. Multiplied by
the spread of the logits, which is of the order of the spread of the log-probs, this is the expected root mean square of
a difference. A bound is `slack` times that, because the argument is about orders of magnitude. `slack` is largest in
fp32, where faults are far above the bound anyway, and smallest in FP8, whose errors the argument overestimates
(measured: they are a third to a half of it).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gspo_mega.verify.mismatch.attribution import TokenPlaces, ratio_estimate
from gspo_mega.verify.mismatch.causes import ENGINES, PREFIX_CACHE, SAMPLING

UNITS: Mapping[str, float] = {"fp32": 2.0**-24, "bf16": 2.0**-9, "fp8": 2.0**-4, "int8": 2.0**-8}
"""Size of a rounding error: half the gap between 1 and its neighbour; for bf16 a quarter, with which its bounds were
set; for int8 half a step of the largest of 127.
"""


def slack(unit: float) -> float:
    """Return how many times the expected size a difference may have: 30 in fp32, 10 in bf16 and int8, 3 in FP8."""
    return 30.0 if unit < 2.0**-20 else 3.0 if unit >= UNITS["fp8"] else 10.0


# A fault moves most tokens. Without one, a few per cent of the tokens still move far: a router's tie may fall the other
# way (in fp32 for hardly any token), and a sharp model's logits spread further than its log-probs. In the quickstart's
# model with experts, 2 % pass bf16's bound in the trainer, also with replay of the servers' routes, and 2 % in the
# servers.
_MANY, _MANY_WITH_EXPERTS = 0.02, 0.15
# A slope counts as a temperature if it is this many standard errors from 0 and explains this share of the squares.
_ERRORS, _EXPLAINED = 5.0, 0.5


@dataclass(frozen=True)
class EngineFault:
    """`kind`: temperature, prompt, cache, weights, size or sampling. `cause`: the row in which it was found."""

    kind: str
    cause: str
    text: str


@dataclass(frozen=True)
class Slope:
    """The slope of x on log p + H: `value`, its standard `error`, and the share of sum x^2 that it explains."""

    value: float
    error: float
    explained: float

    @property
    def is_temperature(self) -> bool:
        return abs(self.value) > _ERRORS * self.error and self.explained > _EXPLAINED


@dataclass(frozen=True)
class Sequences:
    """The scored tokens, prompts included: each sequence's number of prompt tokens, and the difference of the engines
    under the reference at every token after the first, [tokens - 1] float64 nats.
    """

    num_prompt_tokens: list[int]
    differences: list[np.ndarray]


def expected_size(unit: float, num_layers: int, log_probs: np.ndarray) -> float:
    """Return the root mean square of a difference that rounding with this unit roundoff explains, nats: sqrt(2 L) u
    times the spread of `log_probs` [T] nats (at least 1, the spread of a sharp distribution's logits).
    """
    return math.sqrt(2 * num_layers) * unit * max(1.0, float(log_probs.std()))


def fault_bounds(units: Mapping[str, float], num_layers: int, log_probs: np.ndarray) -> dict[str, float]:
    """Return the |difference| of a token, nats, that rounding may reach in each cause. `find_faults` cannot see a fault
    below it. It is large for deep models in a coarse format. `units`: the unit roundoff of each cause.
    """
    return {name: slack(unit) * expected_size(unit, num_layers, log_probs) for name, unit in units.items()}


def temperature_slope(values: np.ndarray, log_probs: np.ndarray, entropies: np.ndarray, tokens: TokenPlaces) -> Slope:
    """Return the slope of `values` on log p + H, through 0; all [T] float64 nats, over the response tokens.

    The derivative of token y's log-prob under softmax(b z) by b is z_y - sum_k p_k z_k, which at b = 1 is log p_y + H.
    Its mean over sampled tokens is 0. So a temperature of 1/(1 + e) instead of 1 shows as e (log p + H).
    """
    x = log_probs + entropies
    square = float(x @ x)
    if square == 0 or not (size := float(values @ values)):
        return Slope(0.0, math.inf, 0.0)
    estimate = ratio_estimate(x * values, x * x, tokens.prompt[tokens.sequence])
    residual = values - estimate.value * x
    return Slope(estimate.value, estimate.error, 1 - float(residual @ residual) / size)


def first_differing(differences: np.ndarray, bound: float) -> int | None:
    """Return the position of the first |difference| above `bound`, in tokens of the sequence (the first token is 0, and
    has no log-prob); None if there is none.
    """
    places = np.flatnonzero(np.abs(differences) > bound)
    return int(places[0]) + 1 if len(places) else None


def find_faults(
    added: Mapping[str, np.ndarray],
    log_probs: np.ndarray,
    entropies: np.ndarray,
    tokens: TokenPlaces,
    units: Mapping[str, float],
    num_layers: int,
    temperature: float,
    reference: Sequences,
    has_experts: bool = False,
) -> list[EngineFault]:
    """Return the faults in the contributions of one walk, `added` [T] float64 nats by cause.

    `log_probs`, `entropies`: the trainer's, as the run computes them, [T] nats. `units`: the unit roundoff that each
    cause may show. `reference`: the engines' difference under the reference, for all tokens. `has_experts`: whether the
    model has experts. A cause with a wrong temperature is not checked for other faults.
    """
    bounds = fault_bounds({name: units[name] for name in added}, num_layers, log_probs)
    many = {name: _MANY_WITH_EXPERTS if has_experts and unit > UNITS["fp32"] else _MANY for name, unit in units.items()}
    faults = []
    for name, values in added.items():
        if name in (SAMPLING, ENGINES):
            slope = temperature_slope(values, log_probs, entropies, tokens)
            if slope.is_temperature and _is_too_large(values, bounds[name], many[name]):
                faults.append(EngineFault("temperature", name, _temperature(name, slope, temperature)))
                continue
        if name == ENGINES:
            faults += _between_engines(reference, bounds[name], many[name])
        elif _is_too_large(values, bounds[name], many[name]):
            kind, words = {
                PREFIX_CACHE: (
                    "cache",
                    "cached keys and values give other log-probs than new ones: the cache is stale, of other weights"
                    " than the server holds",
                ),
                SAMPLING: (
                    "sampling",
                    "the log-probs returned with the samples are not those of the same tokens scored again: they"
                    " describe another distribution, or the server's weights changed meanwhile",
                ),
            }.get(name, ("size", "larger than its rounding: one of its products is wrong"))
            faults.append(EngineFault(kind, name, f"{words} ({_sizes(values, bounds[name])})"))
    return faults


def _is_too_large(values: np.ndarray, bound: float, many: float) -> bool:
    return float((np.abs(values) > bound).mean()) > many


def _sizes(values: np.ndarray, bound: float) -> str:
    return (
        f"{(np.abs(values) > bound).mean():.0%} of the tokens differ by more than {bound:.1e} nats, which rounding may"
        f" reach; root mean square {math.sqrt(float((values**2).mean())):.1e}"
    )


def _temperature(cause: str, slope: Slope, temperature: float) -> str:
    # x = trainer - server = e (log p + H), and the server's 1 / T is the trainer's times (1 - e), to first order.
    there = temperature / (1 - slope.value) if slope.value < 1 else math.inf
    who = "the log-probs returned with the samples describe" if cause == SAMPLING else "the server's log-probs describe"
    return (
        f"{who} a temperature of about {there:.3g}, not {temperature:g}: the differences follow log p + entropy with"
        f" slope {slope.value:.3f} +- {slope.error:.3f}, which explains {slope.explained:.0%} of them"
    )


def _between_engines(reference: Sequences, bound: float, many: float) -> list[EngineFault]:
    """Tell other weights, which differ from the first token on, from another prompt, which differs from a later one."""
    flat = np.concatenate(reference.differences)
    if not _is_too_large(flat, bound, many):
        return []
    pairs = list(zip(reference.num_prompt_tokens, reference.differences, strict=True))
    # With a fault, most tokens after the first that differs differ as well; a router's tie does not affect them.
    marked = [
        (prompt, place, len(values))
        for prompt, values in pairs
        if (place := first_differing(values, bound)) is not None and (np.abs(values[place - 1 :]) > bound).mean() > 0.5
    ]
    early = [place for _, place, _ in marked if place <= 2]
    if len(marked) > len(pairs) / 2 and len(early) < len(marked) / 2:
        inside = sum(place <= prompt for prompt, place, _ in marked)
        first = sorted(place for _, place, _ in marked)[len(marked) // 2]
        where = (
            "in the prompt: another chat template, system message or special token"
            if inside > len(marked) / 2
            else "in the response: tokens were decoded and tokenised again, or cut"
        )
        return [
            EngineFault(
                "prompt",
                ENGINES,
                f"the engines agree up to token {first} of a sequence (the median) and differ from there on, {where}."
                f" They were not given the same tokens ({_sizes(flat, bound)})",
            )
        ]
    return [
        EngineFault(
            "weights",
            ENGINES,
            "the engines differ from the first tokens on although both compute in the reference's precision: they hold"
            f" other weights, or compute another model ({_sizes(flat, bound)})",
        )
    ]
