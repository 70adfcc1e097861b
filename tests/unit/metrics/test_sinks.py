"""Sinks of metrics: every line once, through failures, kills and returns to older checkpoints; and their refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading

import pytest
from waiting import until

from gspo_mega.config import load_config
from gspo_mega.errors import ConfigError
from gspo_mega.metrics.sink_loading import sink_makers
from gspo_mega.metrics.sinks import SinkMaker, Sinks
from gspo_mega.metrics.wandb_sink import WandbSink, offline_rows
from gspo_mega.metrics.writer import MetricsWriter, read_metrics
from gspo_mega.run_folder import RunFolder, atomic_write_json

OFFLINE = {"mode": "offline", "project": "tests"}


class Lines:
    """A sink that keeps (first step, what it was given); `broken`: steps at which it raises, `gate`: what it waits for."""

    given: list
    broken: set
    gate: threading.Event

    def __init__(self, run):
        self.given.append(("first", run.first_step))

    def write(self, step, time, metrics):
        self.gate.wait()
        if step in self.broken:
            raise OSError(f"no\nroute at {step}")
        self.given.append((step, metrics))

    def close(self):
        self.given.append("closed")


@pytest.fixture
def lines():
    class Own(Lines):
        given, broken, gate = [], set(), threading.Event()

    Own.gate.set()
    return Own


def sinks_of(folder, made, said=None, name="lines"):
    return Sinks(RunFolder(folder), [SinkMaker(name, made)], {}, (said if said is not None else []).append)


def write(folder, sinks, steps, resume=None):
    with MetricsWriter(folder, sinks) as writer:
        if resume is not None:
            writer.resume_from(resume)
        for step in steps:
            writer.write(step, {"reward/mean": float(step)})


def steps_of(given):
    return [entry[0] for entry in given if isinstance(entry, tuple) and isinstance(entry[0], int)]


def test_each_line_once_over_several_starts(tmp_path, lines):
    write(tmp_path, sinks_of(tmp_path, lines), [1, 2])
    write(tmp_path, sinks_of(tmp_path, lines), [3], resume=2)
    assert steps_of(lines.given) == [1, 2, 3]
    assert [entry for entry in lines.given if entry[0] == "first"] == [("first", 1), ("first", 3)]
    assert lines.given[1] == (1, {"reward/mean": 1.0, "metrics/num_sink_failures": 0})
    write(tmp_path, sinks_of(tmp_path, lines), [2, 3], resume=1)
    assert lines.given[-4:] == [("first", 2), *lines.given[-3:-1], "closed"] and steps_of(lines.given)[-2:] == [2, 3]


def test_a_line_of_the_last_moment_reaches_the_sink_before_it_closes(tmp_path, lines, monkeypatch):
    """The thread has just handed over what there was when the last line is written and the run ends."""
    sinks = sinks_of(tmp_path, lines)
    handed_over, is_ended = threading.Event(), threading.Event()

    def hand_over(path, content):
        handed_over.set()
        assert is_ended.wait(30)
        atomic_write_json(path, content)

    monkeypatch.setattr("gspo_mega.metrics.sinks.atomic_write_json", hand_over)
    writer = MetricsWriter(tmp_path, sinks)
    writer.write(1, {})
    assert handed_over.wait(30)
    writer.write(2, {})
    for feed in sinks._feeds:
        feed.end()
    is_ended.set()
    writer.close()
    assert steps_of(lines.given) == [1, 2] and lines.given[-1] == "closed"
    assert json.loads((tmp_path / "sinks" / "lines.json").read_text()) == {"lines": 2}


def test_a_sink_added_later_gets_what_came_before(tmp_path, lines):
    write(tmp_path, None, [1, 2])
    write(tmp_path, sinks_of(tmp_path, lines), [3], resume=2)
    assert steps_of(lines.given) == [1, 2, 3]


def test_a_failing_sink_is_said_once_counted_and_tried_again_from_its_line(tmp_path, lines):
    said = []
    lines.broken |= {2}
    sinks = sinks_of(tmp_path, lines, said)
    with MetricsWriter(tmp_path, sinks) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"reward/mean": float(step)})
        until(lambda: sinks.num_failures >= 1)
        writer.write(4, {})
        until(lambda: sinks.wake() or sinks.num_failures >= 2)
        lines.broken.clear()
        writer.write(5, {})
    assert steps_of(lines.given) == [1, 2, 3, 4, 5]
    assert len(said) == 1 and "metrics sink lines failed: OSError: no route at 2; training goes on" in said[0]
    counted = [line["metrics/num_sink_failures"] for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert counted[0] == 0 and counted[-1] >= 2


def test_a_sink_that_hangs_holds_up_nothing(tmp_path, lines):
    lines.gate.clear()
    said = []
    sinks = sinks_of(tmp_path, lines, said)
    writer = MetricsWriter(tmp_path, sinks)
    for step in (1, 2):
        writer.write(step, {})
    sinks.close(seconds=0.05)
    assert said == ["notice   metrics sink lines did not finish within 0.05 s; metrics.jsonl has every line"]
    lines.gate.set()


def wandb_rows(folder):
    files = sorted((folder / "sinks" / "wandb").glob("wandb/offline-run-*/run-*.wandb"))
    return [(step, json.loads(row["reward/mean"])) for file in files for step, row in offline_rows(file)], len(files)


KILLED = """
import os, sys
from pathlib import Path
from gspo_mega.metrics.sinks import SinkMaker, Sinks
from gspo_mega.metrics.wandb_sink import WandbSink
from gspo_mega.metrics.writer import MetricsWriter
from gspo_mega.run_folder import RunFolder, atomic_write_json
folder = Path(sys.argv[1])
sinks = Sinks(RunFolder(folder), [SinkMaker("wandb", lambda run: WandbSink(run, mode="offline"))], {"seed": 1}, print)
writer = MetricsWriter(folder, sinks)
for step in (1, 2, 3):
    writer.write(step, {"reward/mean": float(step)})
while not (folder / "sinks/wandb.json").exists() or '3' not in (folder / "sinks/wandb.json").read_text():
    assert not sinks.num_failures
os.killpg(0, 9)
"""


def test_wandb_has_every_step_once_after_a_kill_that_took_its_process_too(tmp_path):
    pytest.importorskip("wandb")
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], env=environment, capture_output=True, start_new_session=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    said = []
    sinks = sinks_of(tmp_path, lambda run: WandbSink(run, **OFFLINE), said, "wandb")
    write(tmp_path, sinks, [3, 4], resume=2)
    rows, num_files = wandb_rows(tmp_path)
    assert sorted(rows) == [(step, float(step)) for step in (1, 2, 3, 4)] and num_files == 2 and said == []
    sinks = sinks_of(tmp_path, lambda run: WandbSink(run, **OFFLINE), said, "wandb")
    write(tmp_path, sinks, [3, 4, 5], resume=2)
    rows, num_files = wandb_rows(tmp_path)
    assert sorted(rows) == [(step, float(step)) for step in (1, 2, 3, 4, 5)] and num_files == 3 and said == []


# --- names in the YAML -------------------------------------------------------------------------------------------------


def config_of(*overrides):
    return load_config("configs/quickstart.yaml", overrides).config


def test_names_are_short_for_sinks_and_the_older_key_is_read():
    assert [one.sink for one in config_of().metrics.sinks] == ["jsonl", "tensorboard"]
    assert [one.sink for one in config_of("metrics.tensorboard=false").metrics.sinks] == ["jsonl"]
    both = config_of("metrics.sinks=[wandb]", "metrics.tensorboard=true").metrics.sinks
    assert [one.sink for one in both] == ["wandb", "tensorboard"]
    makers = sink_makers(config_of("metrics.sinks=[jsonl, {sink: wandb, options: {project: mine}}]"))
    assert [maker.name for maker in makers] == ["wandb"]


@pytest.mark.parametrize(
    ("sinks", "said"),
    [
        ("[tensorbord]", "metrics.sinks.0: metrics sink 'tensorbord': did you mean 'tensorboard'? valid: jsonl, "),
        ("[jsonl, wandb, wandb]", "metrics.sinks.2: metrics sink 'wandb' is named twice"),
        ("[{sink: wandb, options: {projekt: x}}]", "cannot be made with a run and these options: got an unexpected"),
        ("[{sink: jsonl, options: {a: 1}}]", "metrics sink 'jsonl' takes no options"),
        ("['json:JSONDecoder']", "metrics sink 'json:JSONDecoder': JSONDecoder has no method write and no close"),
        ("['nowhere.at_all:Sink']", "metrics sink 'nowhere.at_all:Sink': there is no module 'nowhere'"),
    ],
)
def test_what_cannot_be_a_sink_is_refused_with_its_place(sinks, said):
    with pytest.raises(ConfigError) as refusal:
        sink_makers(config_of(f"metrics.sinks={sinks}"))
    assert said in str(refusal.value) and str(refusal.value).startswith("metrics.sinks.")
