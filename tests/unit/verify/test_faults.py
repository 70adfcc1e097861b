"""Each fault is made, found and named; rounding of the sizes that are met is not called a fault."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gspo_mega.verify.mismatch.attribution import TokenPlaces
from gspo_mega.verify.mismatch.causes import ENGINES, PREFIX_CACHE, SAMPLING
from gspo_mega.verify.mismatch.faults import (
    UNITS,
    Sequences,
    expected_size,
    fault_bounds,
    find_faults,
    first_differing,
    temperature_slope,
)

LAYERS, PROMPT, RESPONSE, COUNT, VOCABULARY = 4, 6, 20, 24, 50
TOKENS = TokenPlaces(np.repeat(np.arange(COUNT), RESPONSE), np.arange(COUNT) // 2, np.zeros(COUNT, int))


def distributions(seed=0):
    """Logits of every response token [T, V], and the tokens drawn from them."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=2.0, size=(COUNT * RESPONSE, VOCABULARY))
    gumbel = -np.log(-np.log(rng.random(logits.shape)))
    return logits, (logits + gumbel).argmax(axis=1)


def at_temperature(logits, drawn, temperature):
    """(log-probs of the drawn tokens, entropies) of softmax(logits / temperature)."""
    scaled = logits / temperature
    log_p = scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))
    return log_p[np.arange(len(drawn)), drawn], -(np.exp(log_p) * log_p).sum(axis=1)


LOGITS, DRAWN = distributions()
LOG_P, ENTROPY = at_temperature(LOGITS, DRAWN, 1.0)


def noise(size, seed=1, shape=COUNT * RESPONSE):
    return np.random.default_rng(seed).normal(scale=size, size=shape)


def whole(values):
    """Differences of all tokens from those of the responses: the prompts agree to rounding."""
    parts = np.split(values, COUNT)
    return Sequences(
        [PROMPT] * COUNT, [np.concatenate([noise(1e-8, i, PROMPT - 1), part]) for i, part in enumerate(parts)]
    )


def find(added, units=None, reference=None, temperature=1.0, has_experts=False):
    units = dict.fromkeys(added, UNITS["fp32"]) | (units or {})
    reference = reference or whole(added.get(ENGINES, np.zeros(COUNT * RESPONSE)))
    return find_faults(added, LOG_P, ENTROPY, TOKENS, units, LAYERS, temperature, reference, has_experts)


def test_the_size_that_rounding_explains():
    # sqrt(2 x 8) = 4 times the unit, times the spread of the log-probs or 1.
    assert expected_size(2.0**-24, 8, np.zeros(3)) == 4 * 2.0**-24
    assert expected_size(2.0**-9, 8, np.array([0.0, 4.0])) == 4 * 2.0**-9 * 2


@pytest.mark.parametrize(("layers", "bf16", "fp8"), [(28, 0.15, 1.4), (48, 0.19, 1.8), (94, 0.27, 2.6)])
def test_bounds_grow_with_depth_as_the_documentation_says(layers, bf16, fp8):
    units = {PREFIX_CACHE: UNITS["bf16"], "server weights": UNITS["fp8"]}
    bounds = fault_bounds(units, layers, np.zeros(3))
    assert bounds[PREFIX_CACHE] == pytest.approx(bf16, rel=0.03)
    assert bounds["server weights"] == pytest.approx(fp8, rel=0.03)


def test_a_stale_cache_below_the_bound_is_not_seen():
    # What docs/budget.md says of a bf16 server; in fp32 the same cache is found (below).
    stale = {PREFIX_CACHE: noise(0.01)}
    bound = fault_bounds({PREFIX_CACHE: UNITS["bf16"]}, LAYERS, LOG_P)[PREFIX_CACHE]
    assert np.abs(stale[PREFIX_CACHE]).max() < bound
    assert find(stale, {PREFIX_CACHE: UNITS["bf16"]}) == []
    assert [fault.kind for fault in find(stale)] == ["cache"]


def test_a_wrong_scale_in_a_quantized_server_is_larger_than_its_rounding():
    # FP8 rounding of this model is expected at .18 nats; measured servers show .04 to .07. Half a nat is a wrong scale.
    for size, kinds in ((0.1, []), (1.0, ["size"])):
        found = find({"server weights": noise(size)}, {"server weights": UNITS["fp8"]})
        assert [fault.kind for fault in found] == kinds


def test_rounding_is_no_fault():
    sizes = {"fp32": 3e-7, "bf16": 2e-2, "fp8": 0.1, "int8": 3e-2}
    for name, size in sizes.items():
        added = {
            cause: noise(size, i) for i, cause in enumerate((SAMPLING, PREFIX_CACHE, ENGINES, "trainer precision"))
        }
        assert find(added, dict.fromkeys(added, UNITS[name])) == [], name


def test_a_router_that_falls_the_other_way_is_no_fault():
    values = noise(1e-7)
    values[::200] = 0.3
    assert find({ENGINES: values, SAMPLING: values}) == []


def test_experts_that_change_in_low_precision_are_no_fault():
    # Seven of a hundred tokens of a small bf16 model went to other experts; a dense model has no such excuse.
    values = noise(1e-2)
    values[::14] = 0.3
    bf16 = {"trainer precision": UNITS["bf16"]}
    assert find({"trainer precision": values}, bf16, has_experts=True) == []
    assert [fault.kind for fault in find({"trainer precision": values}, bf16)] == ["size"]
    # In fp32 no such thing happens, with or without experts.
    assert [fault.kind for fault in find({"trainer precision": values}, has_experts=True)] == ["size"]


@pytest.mark.parametrize("there", [1.02, 1.3, 0.8])
def test_a_wrong_temperature_is_named_with_its_value(there):
    wrong, _ = at_temperature(LOGITS, DRAWN, there)
    (fault,) = find({SAMPLING: LOG_P - wrong + noise(1e-7)})
    assert fault.kind == "temperature" and fault.cause == SAMPLING
    named = float(fault.text.partition("about ")[2].partition(",")[0])
    assert named == pytest.approx(there, rel=0.12)


def test_a_wrong_temperature_of_the_trainer_shows_between_the_engines():
    wrong, _ = at_temperature(LOGITS, DRAWN, 1.2)
    (fault,) = find({ENGINES: LOG_P - wrong})
    assert fault.kind == "temperature" and "the server's log-probs describe" in fault.text


def test_the_slope_of_a_small_change_of_temperature():
    wrong, _ = at_temperature(LOGITS, DRAWN, 1 / 0.999)
    slope = temperature_slope(LOG_P - wrong, LOG_P, ENTROPY, TOKENS)
    assert slope.value == pytest.approx(1e-3, rel=0.02)
    assert slope.explained > 0.999


def test_noise_has_no_slope():
    slope = temperature_slope(noise(0.1), LOG_P, ENTROPY, TOKENS)
    assert not slope.is_temperature and slope.explained < 0.1
    assert (
        temperature_slope(
            np.zeros(5), np.zeros(5), np.zeros(5), TokenPlaces(np.zeros(5, int), np.zeros(1), np.zeros(1, int))
        ).error
        == math.inf
    )


def test_other_weights_differ_from_the_first_token_on():
    differences = [noise(1e-3, i, PROMPT + RESPONSE - 1) for i in range(COUNT)]
    responses = np.concatenate([part[PROMPT - 1 :] for part in differences])
    (fault,) = find({ENGINES: responses}, reference=Sequences([PROMPT] * COUNT, differences))
    assert fault.kind == "weights"


def test_weights_that_differ_by_less_than_the_precision_are_found_in_fp32_alone():
    differences = [noise(1e-4, i, PROMPT + RESPONSE - 1) for i in range(COUNT)]
    responses = np.concatenate([part[PROMPT - 1 :] for part in differences])
    reference = Sequences([PROMPT] * COUNT, differences)
    assert [f.kind for f in find({ENGINES: responses}, reference=reference)] == ["weights"]
    assert find({ENGINES: responses}, {ENGINES: UNITS["bf16"]}, reference) == []


@pytest.mark.parametrize(("place", "where"), [(4, "in the prompt"), (PROMPT + 5, "in the response")])
def test_another_prompt_is_named_with_its_place(place, where):
    differences = [noise(1e-7, i, PROMPT + RESPONSE - 1) for i in range(COUNT)]
    for i, part in enumerate(differences):
        part[place - 1 :] += noise(0.05, 100 + i, len(part) - place + 1)
    responses = np.concatenate([part[PROMPT - 1 :] for part in differences])
    (fault,) = find({ENGINES: responses}, reference=Sequences([PROMPT] * COUNT, differences))
    assert fault.kind == "prompt" and f"up to token {place} " in fault.text and where in fault.text


def test_a_stale_cache_is_named():
    (fault,) = find({PREFIX_CACHE: noise(0.01), ENGINES: noise(1e-7)})
    assert fault.kind == "cache" and "stale" in fault.text


def test_samples_that_another_policy_drew_are_named():
    (fault,) = find({SAMPLING: noise(0.05)})
    assert fault.kind == "sampling"


def test_a_product_that_is_wrong_is_larger_than_its_rounding():
    (fault,) = find({"trainer packing": noise(1e-3)})
    assert fault.kind == "size" and fault.cause == "trainer packing"


def test_the_first_place_that_differs_counts_tokens():
    assert first_differing(np.array([0.0, 1e-9, 0.1]), 1e-6) == 3
    assert first_differing(np.zeros(3), 1e-6) is None
