"""Ranks that sample ahead of their training, killed beside a real SGLang server: what was sampled ahead is not lost, the
order is kept, and the journal replays to the same weights. What a start of the run knows of stale tokens it says in parts.
"""

from __future__ import annotations

from ahead_check import check_ahead, check_order, check_parts, check_same_end
from live_support import NUM_GROUPS
from recovery_support import KILLED

STALENESS, NUM_STEPS = 1, 5
PARTS = ("diagnostics.exact_staleness=true", "mismatch.segment_tokens=1")
REWARD = "reward.functions=[{function: 'run_support:distinct'}]"  # with which every step has something to learn
AHEAD = (f"rollout.max_staleness={STALENESS}", f"train.num_steps={NUM_STEPS}", *PARTS, REWARD)
# Of one run, one after the other: (point, hit).
KILLS = (
    ("rollout.admitted", NUM_GROUPS + 2),  # of the second step, before the first is complete
    ("rollout.trajectory", 7),  # completed ahead of its step, or with it
    ("publish.paused", 2),  # the first publish of a start only brings the servers to the start's weights
    ("publish.committed", 4),  # of a step whose successor has, at the next start, tokens of weights from before it
)


def test_killed_while_it_samples_ahead_it_goes_on_and_replays(live):
    for point, hit in KILLS:
        assert live.train("ahead", f"point={point},hit={hit}", *AHEAD) == [KILLED], (
            f"{point}: {live.ranks.log('ahead')}"
        )
    assert live.train("ahead", "", *AHEAD) == [0], live.ranks.log("ahead")
    lags = check_ahead(live, "ahead", NUM_STEPS, STALENESS, PARTS[1], REWARD)
    assert set(lags) == {0, STALENESS}, "some tokens were sampled ahead"
    split, not_split = check_parts(live.ranks.folder("ahead"), NUM_STEPS)
    assert split and not_split, "gaps of stale tokens in parts, and one whose weights a kill took along"


# A start of a run in a layout of its own: its settings, its number of ranks, and the kill that ends it.
MOVES = (
    ((), 1, f"point=rollout.admitted,hit={2 * NUM_GROUPS + 2}"),  # requests of two steps are on the server
    ((), 2, "point=rollout.trajectory,hit=9"),
    (("parallel.context=2",), 2, ""),
)


def test_killed_with_rollouts_in_flight_it_goes_on_in_other_layouts(live):
    """From one rank to two data ranks, to two context ranks. In each start's layout the journal replays to the same
    weights: what was in flight is neither lost nor there twice, and no layout changes the order.
    """
    ran = []
    for settings, num_ranks, kill in MOVES:
        codes = live.train("moved", kill, *AHEAD, *settings, num_ranks=num_ranks)
        assert codes[0] == (KILLED if kill else 0), live.ranks.log("moved")
        latest = live.ranks.folder("moved").latest_checkpoint_file
        ran.append((settings, num_ranks, int(latest.read_text().removeprefix("step_"))))
    steps = [step for _, _, step in ran]
    assert 0 < steps[0] < steps[1] < steps[2] == NUM_STEPS, f"each layout trained: {steps}"
    lags = check_order(live.ranks.folder("moved"), NUM_STEPS, STALENESS)
    assert set(lags) == {0, STALENESS}, "some tokens were sampled ahead"
    recorded = f"train.from_rollouts={live.ranks.folder('moved').path}"
    for settings, num_ranks, step in ran:
        codes = live.train(
            "moved-replay", "", *AHEAD, *settings, f"train.num_steps={step}", recorded, num_ranks=num_ranks
        )
        assert codes == [0] * num_ranks, live.ranks.log("moved-replay")
    check_same_end(live.ranks.folder("moved-replay"), live.ranks.folder("moved"))
