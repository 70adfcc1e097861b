"""The journal gives back exactly what it was given, as far as it goes; a torn end costs that end only."""

from __future__ import annotations

import os
from dataclasses import asdict

import numpy as np
import pytest
from whole_groups import whole_groups

from gspo_mega.base import failpoints
from gspo_mega.base.episodes import Group, RolloutBatch, one_turn_episode, one_turn_row
from gspo_mega.base.errors import JournalError
from gspo_mega.base.records import Prompt
from gspo_mega.data.journal.frames import FrameFile, encode_frame
from gspo_mega.data.journal.journal import Journal


def make_group(number: int, size: int = 2, routes: bool = False) -> Group:
    prompt = Prompt(
        f"train:{number}",
        "train",
        (1, 2, 3 + number),
        f"What is {number}? \N{SNOWMAN}",
        answer=str(number),
        metadata={"k": [1, None]},
    )
    rows = []
    for sample in range(size):
        length = 2 + sample
        rows.append(
            one_turn_row(
                trajectory_id=f"step000004-g{number:05d}-s{sample:03d}",
                group_id=number,
                prompt=prompt,
                response_token_ids=list(range(length)),
                response_mask=[1] * length,
                rollout_log_probs=[-0.1 / (k + 1) for k in range(length)],
                weight_versions=[4] * length,
                finish_reason="stop",
                response_text="a\nb",
                reward=sample / 3,
                reward_parts={"f": sample / 3},
                reward_error="late" if sample else None,
                routed_experts=np.arange((2 + length) * 6, dtype=np.int32).reshape(2 + length, 3, 2)
                if routes
                else None,
            )
        )
    return Group.from_rows(number, prompt, rows)


def same(one: Group, other: Group) -> bool:
    def plain(group):
        return [
            {k: (v.tolist(), v.dtype.str) if isinstance(v, np.ndarray) else v for k, v in asdict(t).items()}
            for t in group.trajectories
        ]

    return one.prompt == other.prompt and plain(one) == plain(other)


def write(journal, groups, *, finish=False, known=(), step=4):
    with journal.begin(step, 4, 2, {g.group_id: g for g in known}) as writer:
        for group in groups:
            for episode in reversed(group.episodes):
                writer.add(episode)
        if finish:
            kept = [*known, *groups]
            writer.finish(
                RolloutBatch(step, kept, {"num_trajectories": 4.0}, {"generate": 0.1}, {"reward/mean": 1 / 3}),
                {"seed": 1},
            )


def test_what_was_written_comes_back_exactly(tmp_path):
    journal = Journal(tmp_path / "journal")
    groups = [make_group(0), make_group(1, routes=True)]
    write(journal, groups, finish=True)
    record = journal.read(4)
    assert (record.step, record.weight_version, record.group_size, record.num_torn_bytes) == (4, 4, 2, 0)
    assert all(same(a, b) for a, b in zip(record.batch.groups, groups, strict=True))
    assert (record.batch.counts, record.batch.phase_seconds, record.prompts) == (
        {"num_trajectories": 4.0},
        {"generate": 0.1},
        {"seed": 1},
    )
    assert record.batch.sampled == {"reward/mean": 1 / 3}
    assert journal.steps() == [4] and journal.read(5) is None


def test_cut_anywhere_every_whole_record_before_the_cut_is_there(tmp_path):
    journal = Journal(tmp_path / "journal")
    groups = [make_group(0), make_group(1)]
    write(journal, groups, finish=True)
    whole = journal.file(4).read_bytes()
    counts = []
    for length in range(8, len(whole)):
        journal.file(4).write_bytes(whole[:length])
        record = journal.read(4)
        counts.append(-1 if record is None else sum(len(g.episodes) for g in record.groups.values()))
        assert record is None or (
            record.batch is None and all(same(g, groups[n]) for n, g in whole_groups(record).items())
        )
    assert counts == sorted(counts) and set(counts) == {-1, 0, 1, 2, 3, 4}


def test_a_step_begun_anew_keeps_what_is_known_and_drops_the_future(tmp_path):
    journal = Journal(tmp_path / "journal")
    write(journal, [], finish=False, step=6)
    complete, incomplete = make_group(0), make_group(1)
    incomplete.episodes.pop()
    write(journal, [complete, incomplete])
    with journal.file(4).open("ab") as file:
        file.write(b"torn")
    record = journal.read(4)
    assert record.num_torn_bytes == 4 and set(whole_groups(record)) == {0} and set(record.groups) == {0, 1}
    assert journal.steps() == [4]
    write(journal, [make_group(2)], known=[record.groups[0]], finish=True)
    again = journal.read(4)
    assert (
        [g.group_id for g in again.batch.groups] == [0, 2]
        and set(again.groups) == {0, 2}
        and same(again.groups[0], complete)
    )


def test_old_steps_are_pruned(tmp_path):
    journal = Journal(tmp_path / "journal")
    for step in range(4):
        write(journal, [make_group(0)], step=step)
    journal.prune(before_step=2)
    assert journal.steps() == [2, 3]


def test_a_newer_format_is_refused(tmp_path):
    journal = Journal(tmp_path)
    (tmp_path / "step_00000001").write_bytes(
        b"GSPOJRN1" + encode_frame({"kind": "begin", "format_version": 3, "step": 1})
    )
    with pytest.raises(JournalError, match="newer gspo_mega"):
        journal.read(1)


@pytest.mark.parametrize("fault", ["disk_full", "denied"])
def test_a_disk_that_refuses_is_named_and_what_was_written_stays(tmp_path, fault):
    journal = Journal(tmp_path / "journal")
    groups = [make_group(0), make_group(1)]
    failpoints.arm(f"point=journal.append.before,hit=3,do={fault}", rank=0)
    try:
        with pytest.raises(JournalError, match="cannot be written: (No space|Permission)"):
            write(journal, groups, finish=True)
    finally:
        failpoints.arm(None, rank=0)
    assert same(whole_groups(journal.read(4))[0], groups[0])


def test_a_really_full_disk_tears_one_record_at_most(tmp_path):
    journal = Journal(tmp_path / "journal")
    with journal.begin(4, 4, 2, {}) as writer:
        for episode in make_group(0).episodes:
            writer.add(episode)
        os.close(writer._descriptor)
        descriptor = os.open("/dev/full", os.O_WRONLY)
        assert descriptor == writer._descriptor
        with pytest.raises(JournalError, match="No space left on device"):
            writer.add(make_group(1).episodes[0])
    assert len(whole_groups(journal.read(4))) == 1


def test_a_frame_tells_its_whole_content(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(
        b"GSPOJRN1" + encode_frame({"a": [1.5, None]}, {"x": np.zeros((0, 3), np.int16), "y": np.array([1.0, np.nan])})
    )
    ((values, arrays),) = FrameFile(path).frames()
    assert values == {"a": [1.5, None]} and arrays["x"].shape == (0, 3) and np.isnan(arrays["y"][1])
    with pytest.raises(ValueError):
        encode_frame({"a": float("nan")})


def test_what_cannot_be_written_down_is_named_with_its_prompt(tmp_path):
    prompt = Prompt("train:7", "train", (1,), "text", metadata={"x": float("nan")})
    with (
        Journal(tmp_path).begin(0, 0, 1, {}) as writer,
        pytest.raises(
            JournalError, match="step_00000000: s0-g0, of prompt train:7, cannot be written: .*not JSON compliant"
        ),
    ):
        writer.add(one_turn_episode("s0-g0", 0, prompt, [1], [-0.5], [0], "stop"))
