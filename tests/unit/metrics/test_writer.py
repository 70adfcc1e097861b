"""metrics.jsonl and TensorBoard: strict JSON, durable lines, repair and resume."""

from __future__ import annotations

import json
import math

import pytest
import torch

from gspo_mega.base.errors import DataError
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.metrics.sink_loading import TensorBoardSink
from gspo_mega.metrics.sinks import SinkMaker, Sinks
from gspo_mega.metrics.writer import MetricsWriter, read_metrics


def strict_lines(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_lines_are_strict_json_and_on_disk_at_once(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(1, {"reward/mean": torch.tensor(0.5), "rollout/num_retries": 3})
    assert not (tmp_path / "tensorboard").exists()
    (line,) = strict_lines(tmp_path / "metrics.jsonl")
    assert line.pop("time") > 1e9
    assert line == {"step": 1, "reward/mean": 0.5, "rollout/num_retries": 3}


def test_non_finite_values_are_null_and_counted(tmp_path):
    with MetricsWriter(tmp_path, tensorboard(tmp_path)) as writer:
        writer.write(1, {"reward/mean": math.nan, "mismatch/chi2_sequence": math.inf, "policy/entropy": 1.0})
    (line,) = strict_lines(tmp_path / "metrics.jsonl")
    assert line["reward/mean"] is None and line["mismatch/chi2_sequence"] is None
    assert line["policy/entropy"] == 1.0 and line["metrics/num_non_finite"] == 2


def test_a_name_outside_the_catalogue_is_refused_and_nothing_written(tmp_path):
    writer = MetricsWriter(tmp_path)
    with pytest.raises(ValueError, match="reward/mena"):
        writer.write(1, {"policy/entropy": 1.0, "reward/mena": 1.0})
    assert not writer.path.exists()


def tensorboard(folder):
    return Sinks(RunFolder(folder), [SinkMaker("tensorboard", TensorBoardSink)])


def write_steps(folder, steps, sinks=None, resume=None):
    with MetricsWriter(folder, sinks) as writer:
        if resume is not None:
            writer.resume_from(resume)
        for step in steps:
            writer.write(step, {"reward/mean": float(step)})


def test_resume_drops_later_steps_and_continues(tmp_path):
    write_steps(tmp_path, range(1, 6))
    write_steps(tmp_path, [4, 5, 6], resume=3)
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    write_steps(tmp_path, [1], resume=-1)
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1]


def test_lines_that_a_continued_run_replaces_are_kept_aside_once(tmp_path):
    aside = RunFolder(tmp_path).superseded_metrics_file
    write_steps(tmp_path, range(1, 6))
    before = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    write_steps(tmp_path, [], resume=5)
    assert not aside.exists(), "nothing is replaced"
    write_steps(tmp_path, [], resume=3)
    assert aside.read_bytes().splitlines() == before[3:]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*before, b""]))  # killed before the lines left this file
    write_steps(tmp_path, [4], resume=3)
    assert aside.read_bytes().splitlines() == before[3:]
    write_steps(tmp_path, [], resume=-1)
    assert [line["step"] for line in strict_lines(aside)] == [4, 5, 1, 2, 3, 4]


@pytest.mark.parametrize("resume", [None, 2])
def test_a_torn_last_line_is_cut_off(tmp_path, resume):
    write_steps(tmp_path, [1, 2])
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "rewa')
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2
    write_steps(tmp_path, [3], resume=resume)
    assert [line["step"] for line in strict_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]


@pytest.mark.parametrize("foreign", [b"hello\n", b"[]\n", b'{"step": "one"}\n'])
def test_a_foreign_line_is_named_not_dropped(tmp_path, foreign):
    write_steps(tmp_path, [1])
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(foreign)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(DataError, match=r"metrics\.jsonl:2: is not a line of metrics"):
        MetricsWriter(tmp_path).resume_from(1)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_resume_after_the_first_write_is_a_mistake(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(1, {})
    with pytest.raises(RuntimeError, match="before the first write"):
        writer.resume_from(0)


def test_tensorboard_shows_the_resumed_curve(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_steps(tmp_path, [1, 2, 3], tensorboard(tmp_path))
    with MetricsWriter(tmp_path, tensorboard(tmp_path)) as writer:
        writer.resume_from(2)
        writer.write(3, {"reward/mean": 30.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_tensorboard_shows_an_evaluation_at_the_step_that_it_measured(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsWriter(tmp_path, tensorboard(tmp_path)) as writer:
        writer.resume_from(-1)
        writer.write(4, {"reward/mean": 4.0})
        writer.write(5, {"reward/mean": 5.0, "eval/accuracy": 0.25, "eval/measured_step": 2})
        writer.write(6, {"reward/mean": 6.0, "eval/accuracy": 0.5})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(4, 4.0), (5, 5.0), (6, 6.0)]
    assert [(e.step, e.value) for e in events.Scalars("eval/accuracy")] == [(2, 0.25), (6, 0.5)]
