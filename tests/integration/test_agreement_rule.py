"""The rule of agreement itself: what it lets pass and what it does not, on made-up rollouts."""

from __future__ import annotations

import numpy as np
import pytest
from agreement_rule import Sampled, Scored, compare

PROMPT, RESPONSE, LAYERS, TRAJECTORIES = 5, 20, 3, 600  # over 10 000 positions, so that one tie is allowed


def rollout(seed: int = 0) -> tuple[list[Sampled], dict[int, Scored]]:
    """Two trajectories a prompt, on which both sides agree exactly; margins of 0.1."""
    rng = np.random.default_rng(seed)
    sampled, scored = [], {}
    for row in range(TRAJECTORIES):
        log_probs = -rng.exponential(size=RESPONSE)
        experts = np.sort(
            rng.permuted(np.tile(np.arange(4), (PROMPT + RESPONSE - 1, LAYERS, 1)), axis=2)[..., :2], axis=2
        )
        sampled.append(Sampled(row // 2, PROMPT, log_probs, experts))
        scored[row] = Scored(log_probs.copy(), experts.copy(), np.full(experts.shape[:2], 0.1))
    return sampled, scored


def reroute(scored: Scored, position: int, layer: int, margin: float = 0.1) -> None:
    """The trainer sends a position to experts 4 and 5, of which the server knows nothing."""
    scored.experts[position, layer] = (4, 5)
    scored.margins[position, layer] = margin


def test_equal_rollouts_agree():
    agreement = compare(*rollout())
    assert agreement.problems() == []
    assert agreement.num_tokens == agreement.num_compared == TRAJECTORIES * RESPONSE
    assert agreement.num_positions == TRAJECTORIES // 2 * PROMPT + TRAJECTORIES * (RESPONSE - 1)


@pytest.mark.parametrize(
    "gap, agrees", [(9e-5, True), (-9e-5, True), (1.1e-4, False), (-1.1e-4, False), (np.nan, False)]
)
@pytest.mark.parametrize("token", [0, RESPONSE - 1])
def test_one_token_beyond_the_tolerance_is_found(token, gap, agrees):
    sampled, scored = rollout()
    scored[17].log_probs[token] += gap
    problems = compare(sampled, scored).problems()
    assert (problems == []) == agrees
    assert all("log-probs differ" in problem for problem in problems)


def test_dense_rollouts_are_compared_at_every_token():
    sampled, scored = rollout()
    for row, ours in enumerate(sampled):
        ours.experts = scored[row].experts = scored[row].margins = None
    assert compare(sampled, scored).problems() == []
    scored[3].log_probs[4] += 1
    assert "log-probs differ by 1.00e+00" in compare(sampled, scored).problems()[0]


def test_a_tie_excuses_itself_and_what_comes_of_it_and_nothing_else():
    sampled, scored = rollout()
    tie = PROMPT + 3
    reroute(scored[8], tie, 1, margin=9e-6)
    reroute(scored[8], tie, 2)
    reroute(scored[8], tie + 4, 2)
    scored[8].log_probs[4:] += 0.3  # the token made at position `tie` is the response's fifth
    agreement = compare(sampled, scored)
    assert agreement.problems() == []
    assert agreement.causes == {("trajectory 8", tie, 1): 9e-6}
    assert agreement.num_tokens - agreement.num_compared == RESPONSE - 4

    scored[8].log_probs[3] += 0.3
    assert len(compare(sampled, scored).problems()) == 1


@pytest.mark.parametrize("position, layer", [(PROMPT + 2, 2), (PROMPT + 9, 0), (PROMPT + 9, 1)])
def test_a_difference_that_the_tie_cannot_have_caused_is_not_excused(position, layer):
    sampled, scored = rollout()
    reroute(scored[8], PROMPT + 3, 1, margin=9e-6)
    reroute(scored[8], position, layer)
    assert any("without a tie" in problem for problem in compare(sampled, scored).problems())


def test_two_ties_in_ten_thousand_are_too_many():
    sampled, scored = rollout()
    reroute(scored[8], PROMPT + 3, 1, margin=1e-6)
    reroute(scored[30], PROMPT, 0, margin=1e-6)
    (problem,) = compare(sampled, scored).problems()
    assert problem.startswith("2 of ")


def test_a_tie_in_a_prompt_is_one_for_all_its_trajectories():
    sampled, scored = rollout()
    for row in (8, 9):
        reroute(scored[row], 2, 0, margin=1e-6)
    agreement = compare(sampled, scored)
    assert agreement.problems() == [] and list(agreement.causes) == [("prompt 4", 2, 0)]


def test_a_rollout_of_which_little_can_be_compared_does_not_agree():
    sampled, scored = rollout()
    for row in range(0, 20, 2):
        reroute(scored[row], 0, 0, margin=1e-6)
    assert any("could be compared" in problem for problem in compare(sampled, scored).problems())


def test_a_trajectory_that_nobody_scored_is_an_error():
    sampled, scored = rollout()
    del scored[5]
    with pytest.raises(AssertionError):
        compare(sampled, scored)
