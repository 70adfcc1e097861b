"""A layout that has ended leaves no process group and no thread, and the groups of a layout share the thread that wakes
a hundred times a second.
"""

import pytest
from layout_models import make_folder
from rank_pool import RankDiedError, RankPool

LAYOUTS = [
    dict(tensor=2),
    dict(pipeline=2),
    dict(expert=2, optimizer=dict(distributed=True, overlap=True)),
    dict(context=2, optimizer=dict(distributed=False)),
]


def test_threads_end_with_their_layout(rank_pools, tmp_path):
    folder = make_folder(tmp_path / "moe", moe=True)
    for counts in rank_pools(2).run("groups_jobs:threads_after", folder=str(folder), layouts=LAYOUTS):
        assert counts["within"] > counts["before"] + 30  # the groups of a layout do have threads
        assert counts["after"] == [counts["before"]] * (len(LAYOUTS) + 1)
        assert counts["of_sockets"] == 1
        assert counts["groups"] == 1


@pytest.mark.parametrize("times", [1, 2])
def test_a_job_whose_rank_a_signal_kills_runs_once_more_with_a_warning(monkeypatch, tmp_path, times):
    monkeypatch.setattr(RankPool, "num_deaths", 0)
    pool = RankPool(2)
    try:
        with pytest.warns(UserWarning, match="rank 1 of 2 died of SIGSEGV in groups_jobs:die_by_a_signal"):
            if times == 1:
                answers = pool.run("groups_jobs:die_by_a_signal", marks=str(tmp_path), times=times)
                assert answers == ["rank 0", "rank 1"] and RankPool.num_deaths == 1
            else:
                with pytest.raises(RankDiedError, match="rank 1 of 2 died of SIGSEGV"):
                    pool.run("groups_jobs:die_by_a_signal", marks=str(tmp_path), times=times)
    finally:
        pool.kill()
    assert len(list(tmp_path.iterdir())) == times
