"""Context parallelism shares per-sequence sums with one all-reduce a micro-batch, and gathers no token."""

from __future__ import annotations

import numpy as np
import pytest

NONE = dict(all_reduces=0, here=0, elsewhere=0)
ONE = dict(all_reduces=1, here=1, elsewhere=0)


@pytest.fixture(scope="module")
def run(rank_pools):
    def run(size: int, **arguments) -> list[dict]:
        return rank_pools(size).run("log_prob_head_jobs:run_context_sums", context=size, **arguments)

    return run


@pytest.mark.parametrize("ratio", ["sequence", "sequence_token", "token"])
@pytest.mark.parametrize(
    ("skipped", "use_rollout"),
    [(False, False), (True, False), (True, True)],
    ids=["old-pass", "old-is-current", "old-is-rollout"],
)
def test_one_all_reduce_a_micro_batch(run, skipped, use_rollout, ratio):
    (alone,) = run(1, skipped=skipped, use_rollout=use_rollout, ratio=ratio)
    ranks = run(2, skipped=skipped, use_rollout=use_rollout, ratio=ratio)
    assert alone["old_pass"] == alone["training"] == NONE
    for rank in ranks:
        assert rank["training"] == ONE
        assert rank["old_pass"] == (NONE if skipped else ONE)
        assert rank["wanted_entropy"] == skipped
        assert np.abs(rank["log_s"] - alone["log_s"]).max() < 1e-12
    if skipped and not use_rollout:
        assert not alone["log_s"].any(), "old is current: the ratio is exactly 1"
    else:
        assert np.abs(alone["log_s"]).min() > 1e-4, "equal log-probs would prove nothing"
    gradient = sum(rank["gradient"] for rank in ranks)
    assert np.abs(alone["gradient"]).max() > 0.01
    assert np.abs(gradient - alone["gradient"]).max() < 1e-7 * np.abs(alone["gradient"]).max()
    if ratio == "sequence":  # every rank holds the whole term
        assert all(abs(rank["loss"] - alone["loss"]) < 1e-12 for rank in ranks)
    else:
        assert abs(sum(rank["loss"] for rank in ranks) - alone["loss"]) < 1e-12
