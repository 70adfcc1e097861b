"""Replayed routes through shared prefixes: the same log-probs and gradient as of whole rows, and rows part where their
experts do.
"""

from __future__ import annotations

import numpy as np
import pytest
from layout_models import make_folder

JOB = "shared_replay_jobs:replayed"
# Tokens of two groups' prompts, of 9 and 14, that are not computed again: all of three rows; or, where experts differ,
# all of one row, four of another and none of a third.
SAVED = {"R2": 3 * (9 + 14), "R3": (9 + 4) + (14 + 4)}


@pytest.mark.parametrize("replay", ["R2", "R3"])
def test_rows_that_share_follow_the_routes_of_whole_rows(rank_pools, tmp_path, replay):
    folder = str(make_folder(tmp_path / "moe", moe=True))
    (off,) = rank_pools(1).run(JOB, folder=folder, parallel={}, replay=replay, share="off")
    results = {
        "one rank": rank_pools(1).run(JOB, folder=folder, parallel={}, replay=replay, share="prompts")[0],
        "EP2": rank_pools(2).run(JOB, folder=folder, parallel=dict(tensor=2, expert=2), replay=replay, share="prompts")[
            0
        ],
    }
    assert results["one rank"]["computed"] == off["computed"] - SAVED[replay]
    for layout, got in results.items():
        assert np.abs(got["log_probs"] - off["log_probs"]).max() < 1e-5, layout
        norms = {name: np.linalg.norm(wanted) for name, wanted in off["gradient"].items()}
        assert sum(norm == 0 for norm in norms.values()) <= 3, "few experts may have no token"
        for name, norm in norms.items():
            assert np.linalg.norm(got["gradient"][name] - off["gradient"][name]) <= 1e-5 * norm, (layout, name)
