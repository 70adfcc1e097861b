"""`metrics.samples_every_steps`: responses that TensorBoard, Weights & Biases and sinks of one's own are given."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from report_runs import batch_of
from wandb_files import offline_files, offline_rows

from gspo_mega.base.run_folder import RunFolder
from gspo_mega.config import load_config
from gspo_mega.metrics.sink_loading import TensorBoardSink
from gspo_mega.metrics.sinks import SampleRow, SinkMaker, Sinks
from gspo_mega.metrics.wandb_sink import WandbSink
from gspo_mega.metrics.writer import MetricsWriter
from gspo_mega.train.rank0 import Rank0

ROWS = [SampleRow("1+1=", "2\n# <b>", 1.0, 0.5), SampleRow("2+2=", "5", None, None)]


class Own:
    def __init__(self, run):
        self.given = run.config["given"]

    def write(self, step, time, metrics):
        self.given.append(step)

    def write_samples(self, step, rows):
        self.given.append((step, rows))

    def close(self): ...


class Plain(Own):
    write_samples = None  # as in a sink that was written before there were samples


def write(folder, make, steps=(1, 2, 3), config=None, name="reward/mean"):
    """Lines of these steps; ROWS are kept for the second."""
    said: list[str] = []
    sinks = Sinks(RunFolder(folder), [SinkMaker("one", make)], config or {}, said.append)
    with MetricsWriter(folder, sinks) as writer:
        for step in steps:
            if step == 2:
                sinks.keep_samples(step, ROWS)
            writer.write(step, {name: 0.5})
    return said


def test_a_sink_is_given_rows_before_their_line(tmp_path):
    given: list = []
    assert write(tmp_path, Own, config={"given": given}) == []
    assert given == [1, (2, ROWS), 2, 3]


def test_a_sink_that_takes_none_has_its_lines(tmp_path):
    given: list = []
    assert write(tmp_path, Plain, config={"given": given}) == [] and given == [1, 2, 3]


def test_only_the_last_steps_are_kept(tmp_path):
    given: list = []
    sinks = Sinks(RunFolder(tmp_path), [SinkMaker("one", Own)], {"given": given})
    for step in range(1, 101):
        sinks.keep_samples(step, ROWS)
    with MetricsWriter(tmp_path, sinks) as writer:
        for step in (36, 37, 100):
            writer.write(step, {"reward/mean": 0.5})
    assert given == [36, (37, ROWS), 37, (100, ROWS), 100]


def test_a_line_of_an_evaluation_has_no_rows(tmp_path):
    given: list = []
    write(tmp_path, Own, config={"given": given}, name="eval/accuracy")
    assert given == [1, 2, 3]


def test_wandb_has_a_table_in_the_row_of_the_step(tmp_path):
    pytest.importorskip("wandb")
    assert write(tmp_path, lambda run: WandbSink(run, project="tests", mode="offline")) == []
    (file,) = offline_files(tmp_path / "sinks/one")
    rows = dict(offline_rows(file))
    assert set(rows) == {1, 2, 3} and not any("samples" in name for step in (1, 3) for name in rows[step])
    assert "reward/mean" in rows[2]
    path = json.loads(rows[2]["samples/path"])
    found = json.loads((Path(file).parent / "files" / path).read_text())
    assert found["columns"] == ["prompt", "response", "reward", "advantage"]
    assert found["data"] == [["1+1=", "2\n# <b>", 1.0, 0.5], ["2+2=", "5", None, None]]


def test_tensorboard_has_a_text_of_the_step(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert write(tmp_path, TensorBoardSink) == []
    events = accumulator.EventAccumulator(str(RunFolder(tmp_path).tensorboard_dir))
    events.Reload()
    (event,) = events.Tensors("samples/text_summary")
    (text,) = event.tensor_proto.string_val
    assert event.step == 2
    assert text.decode() == (
        "**reward 1.000, advantage 0.500**\n\n    1+1=\n\n    2\n    # <b>\n\n**not scored**\n\n    2+2=\n\n    5"
    )


def test_rows_are_of_every_group_at_the_steps_that_are_asked_for(tmp_path):
    """Rank 0's own method, with what it uses of a rank 0."""
    batch = batch_of(10)
    for number, row in enumerate(batch.trajectories):
        row.advantage = float(number)
    kept: dict = {}
    lead: Any = SimpleNamespace(_samples_every=2, _sinks=SimpleNamespace(keep_samples=kept.__setitem__))
    for step in (1, 2, 3):
        Rank0.keep_samples(lead, step, batch)
    (rows,) = kept.values()
    assert list(kept) == [2] and len(rows) == 8
    sizes = {len(group.trajectories) for group in batch.groups}
    firsts = [group.trajectories[place % len(group.trajectories)] for place, group in enumerate(batch.groups)]
    assert sizes != {1} and [row.advantage for row in rows] == [row.advantage for row in firsts[:8]]
    assert all(row.prompt and row.response for row in rows)
    lead._samples_every = None
    Rank0.keep_samples(lead, 4, batch)
    assert list(kept) == [2]


def test_a_key_that_no_sink_uses_is_a_notice():
    said = "metrics.samples_every_steps has no effect without a sink"
    assert any(said in one for one in notices_of("metrics.samples_every_steps=2", "metrics.sinks=[jsonl]"))
    assert not any(said in one for one in notices_of("metrics.samples_every_steps=2"))


def notices_of(*overrides):
    return load_config("configs/quickstart.yaml", overrides).notices
