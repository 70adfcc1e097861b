"""kill -9 at every file operation of a publish through the disk: what is committed is whole at every moment."""

from __future__ import annotations

import pytest
from publish_job import NUM_VERSIONS, check
from recovery_support import KILLED

from gspo_mega.base import failpoints
from gspo_mega.base.errors import PublishError

# Without servers nothing is paused or committed on them; with them, test_recovery_ahead.py kills there.
ELSEWHERE = ("publish.paused", "publish.sent", "publish.committed", "publish.aside.before", "publish.aside.after")
POINTS = [point for point in failpoints.POINTS if point.startswith("publish.") and point not in ELSEWHERE]


@pytest.fixture(scope="module")
def source(ranks):
    return str(ranks.config_file.parent / "model")


def publish(ranks, folder, source, fault="", watch=None):
    job = {"module": "publish_job", "arguments": [str(folder), source], "environment": {failpoints.VARIABLE: fault}}
    if watch is not None:
        job["watch"] = {"folders": [str(folder)], "file": str(watch)}
    (code,) = ranks.call([job])
    return code


def test_every_point_is_reached(ranks, source, tmp_path):
    record = tmp_path / "reached"
    assert publish(ranks, tmp_path / "weights", source, f"record={record}") == 0
    assert set(record.read_text().split()) == set(POINTS)
    assert check(tmp_path / "weights") == NUM_VERSIONS


@pytest.mark.parametrize("point", POINTS)
def test_what_is_committed_is_whole_and_the_next_publish_goes_on(ranks, source, tmp_path, point):
    folder = tmp_path / "weights"
    # The second time: a version is committed before.
    assert publish(ranks, folder, source, f"point={point},hit=2") == KILLED
    committed = check(folder)
    assert publish(ranks, folder, source) == 0
    assert check(folder) == NUM_VERSIONS >= committed
    assert sorted(path.name for path in folder.iterdir() if not path.name.endswith(".part")) == [
        "current.json",
        f"v{NUM_VERSIONS:08d}",
    ]


@pytest.mark.parametrize("point", [point for point in POINTS if point.endswith(".before")])
@pytest.mark.parametrize("do", ["disk_full", "denied"])
def test_a_disk_that_refuses_leaves_what_is_committed(ranks, source, tmp_path, point, do):
    folder = tmp_path / "weights"
    assert publish(ranks, folder, source, f"point={point},hit=2,do={do}") == PublishError.exit_code
    committed = check(folder)
    assert publish(ranks, folder, source) == 0
    assert check(folder) == NUM_VERSIONS >= committed
