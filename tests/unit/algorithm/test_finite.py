"""Numbers that are not finite are found and named, and a device is asked once per pass."""

import math

import pytest
import torch
from device_reads import DeviceReads

from gspo_mega.algorithm.terms import NonFiniteToken, check_now, deferred_checks, non_finite_log_prob, require_finite
from gspo_mega.base.errors import NumericsError

MASK, IDS = torch.tensor([0.0, 1.0, 1.0, 1.0]), torch.tensor([0, 0, 4, 4])
GOOD, BAD = torch.tensor([math.nan, -1.0, -1.0, -1.0]), torch.tensor([math.nan, -1.0, math.inf, math.nan])


class Found(Exception):
    pass


def describe(bad: NonFiniteToken) -> Found:
    return Found(bad)


def test_the_first_bad_active_token_is_named():
    require_finite(MASK, IDS, describe, log_probs=GOOD)
    with pytest.raises(Found) as caught:
        require_finite(MASK, IDS, describe, log_probs=GOOD, rollout_log_probs=BAD)
    assert caught.value.args == (NonFiniteToken("rollout_log_probs", 4, 2, math.inf),)
    with pytest.raises(
        NumericsError, match=r"x is -inf at active token 0, sequence 3 of the micro-batch; log-probs of"
    ):
        require_finite(MASK[1:2], IDS[2:3] - 1, non_finite_log_prob, x=torch.tensor([-math.inf]))


def test_a_micro_batch_without_tokens_has_none():
    require_finite(MASK[:0], IDS[:0], describe, log_probs=GOOD[:0])


def test_many_searches_read_the_device_once_and_the_first_bad_one_is_told():
    with DeviceReads() as reads, deferred_checks():
        for _ in range(5):
            require_finite(MASK, IDS, describe, log_probs=GOOD, old_log_probs=GOOD)
        assert reads.names == []
    assert len(reads.names) == 1
    done = []
    with pytest.raises(Found) as caught, deferred_checks():
        require_finite(MASK, IDS, describe, log_probs=GOOD)
        require_finite(MASK, IDS, describe, second=BAD)
        require_finite(MASK, IDS, describe, third=BAD)
        done.append("the pass ended before the search was read")
    assert done and caught.value.args[0].tensor == "second"
    with pytest.raises(Found):  # as before, at once
        require_finite(MASK, IDS, describe, log_probs=BAD)


def test_what_the_host_needs_earlier_is_read_earlier():
    with deferred_checks():
        require_finite(MASK, IDS, describe, log_probs=BAD)
        with pytest.raises(Found):
            check_now()


def test_another_error_of_the_pass_is_not_hidden():
    with pytest.raises(ValueError, match="a rank is gone"), deferred_checks():
        require_finite(MASK, IDS, describe, log_probs=BAD)
        raise ValueError("a rank is gone")
    check_now()  # nothing is left of it
