"""A layout that is gone leaves nothing behind: no process group, and none of its threads, each of which would wake a
hundred times a second.
"""

from layout_models import make_folder

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
        assert counts["groups"] == 1
