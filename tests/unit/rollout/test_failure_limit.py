"""How many failures a batch may have, for small batches, large ones, and those whose size is not known beforehand."""

import math

import pytest

from gspo_mega.base.errors import EpisodeError
from gspo_mega.rollout.groups import FailureLimit


def outcome(num_failed, num_done, fraction=0.1, most_done=None, least_done=0):
    """Whether a batch with so many failures goes on, ends at once, or ends at its end."""
    most = num_done if most_done is None else most_done
    limit = FailureLimit("episodes", "episodes", fraction, most, least_done, EpisodeError)
    for number in range(num_done):
        limit.add("crash: it ended" if number < num_failed else None)
        try:
            limit.check()
        except EpisodeError:
            return "at once"
    try:
        limit.check_end()
    except EpisodeError:
        return "at the end"
    return "goes on"


@pytest.mark.parametrize("num_done", [2, 4, 8, 10, 19])
def test_one_failure_of_several_is_no_share_of_them(num_done):
    assert [outcome(number, num_done) for number in (0, 1, 2)] == ["goes on", "goes on", "at once"]


def test_the_fraction_holds_for_larger_batches():
    assert [outcome(number, 40) for number in (4, 5)] == ["goes on", "at once"]
    assert [outcome(number, 8, fraction=0.5) for number in (4, 5)] == ["goes on", "at once"]


def test_all_failed_is_too_many_also_of_one():
    assert outcome(1, 1) == "at once" and outcome(1, 1, fraction=1.0) == "goes on"


def test_a_fraction_of_zero_allows_none():
    assert outcome(1, 8, fraction=0.0) == "at once"


def test_where_the_size_is_not_known_the_end_decides():
    assert outcome(2, 8, most_done=math.inf) == "at the end" and outcome(1, 8, most_done=math.inf) == "goes on"
    assert outcome(2, 8, most_done=math.inf, least_done=20) == "goes on"


def test_the_error_keeps_the_counts_of_the_moment_that_made_it_certain():
    """Tasks that fail at the same time raise it, too, and any of them may be the first to end."""
    limit = FailureLimit("episodes", "episodes", 0.1, 20, 0, EpisodeError)
    said = []
    for number in range(5):
        limit.add(f"e{number}: deadline")
        try:
            limit.check()
        except EpisodeError as error:
            said.append(str(error))
    assert len(said) == 3 and set(said) == {said[0]} and said[0].startswith("3 of 3 episodes failed")
    limit.begin()
    for number in range(4):
        limit.add(f"f{number}: deadline")
    with pytest.raises(EpisodeError, match="4 of 4 episodes failed(?s:.*)f0: deadline"):
        limit.check()
