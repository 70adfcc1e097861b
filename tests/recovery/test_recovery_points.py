"""Every declared point was killed at, and every change of the disk lies between two of them."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

from recovery_support import KILLED
from test_recovery_publish import publish
from watch import differing, look, outside_operations

from gspo_mega.base import failpoints

# What only a publish to servers does.
PUBLISHED_ALONE = ("commit.write", "commit.rename", "prune", "index.write", "index.rename")


def noted(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def operations_that_changed(lines: list[dict]) -> set[str]:
    return {line["point"].rpartition(".")[0] for line in lines if line["point"].endswith(".after") and line["changed"]}


def test_saves_journal_and_exports_change_the_disk_in_operations_alone(ranks, tmp_path):
    """The last run goes over what the two before it, killed in an export and in a save, have left."""
    files = [tmp_path / name for name in ("first", "second", "third")]
    assert ranks.train("watched", "point=publish.rename.before", watch=files[0]) == [KILLED]
    assert ranks.train("watched", "point=save.rename.before", watch=files[1]) == [KILLED]
    assert ranks.train("watched", "", watch=files[2]) == [0], ranks.log("watched")
    changed = set()
    for file in files:
        assert not outside_operations(noted(file)), "\n".join(outside_operations(noted(file)))
        changed |= operations_that_changed(noted(file))
    # What only flushes or opens changes nothing; nothing is in the way here, and a run's exports have one file and no
    # versions.
    if metadata.version("megatron-core") >= "0.19":  # keeps nothing apart from tensors
        changed.add("save.common")
    silent = {name for name in failpoints.OPERATIONS if name.endswith((".sync", ".drop", ".aside", "journal.open"))}
    silent |= {name for name in failpoints.OPERATIONS if name.startswith("copy.")}  # in memory
    assert failpoints.OPERATIONS.keys() - silent - changed == {f"publish.{name}" for name in PUBLISHED_ALONE} | {
        "journal.routes.write",
        "journal.routes.rename",
    }


def test_a_publish_through_the_disk_changes_it_in_operations_alone(ranks, tmp_path):
    folder, source = tmp_path / "weights", str(ranks.config_file.parent / "model")
    assert publish(ranks, folder, source, "point=publish.commit.rename.before,hit=2") == KILLED
    assert publish(ranks, folder, source, watch=tmp_path / "notes") == 0
    lines = noted(tmp_path / "notes")
    assert not outside_operations(lines), "\n".join(outside_operations(lines))
    assert {f"publish.{name}" for name in PUBLISHED_ALONE} <= operations_that_changed(lines)


def test_a_change_between_two_operations_is_seen(tmp_path):
    before = look([str(tmp_path)])
    (tmp_path / "stray").write_text("x")
    assert differing(before, look([str(tmp_path)])) == [str(tmp_path), str(tmp_path / "stray")]
    lines = [
        ("save.sync.before", []),
        ("save.sync.after", ["a"]),
        ("save.rename.before", ["b"]),
        ("save.rename.after", []),
        ("step.written", ["c"]),
    ]
    found = outside_operations([{"point": point, "changed": changed} for point, changed in lines])
    assert found == ["before save.rename.before: b", "before step.written: c"]


def test_every_declared_point_was_killed_at(all_kills):
    assert set(failpoints.POINTS) - all_kills == set()
