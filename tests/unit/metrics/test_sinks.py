"""Sinks of metrics: every line once, through failures, kills and returns to older checkpoints; and their refusals."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

import pytest
from waiting import until
from wandb_files import offline_files, offline_rows

from gspo_mega.base.errors import ConfigError
from gspo_mega.base.run_folder import RunFolder, atomic_write_json
from gspo_mega.config import load_config
from gspo_mega.metrics import wandb_sink
from gspo_mega.metrics.sink_loading import sink_makers
from gspo_mega.metrics.sinks import SinkMaker, Sinks
from gspo_mega.metrics.wandb_sink import WandbSink
from gspo_mega.metrics.writer import MetricsWriter, read_metrics

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
    files = offline_files(folder / "sinks" / "wandb")
    return [(step, json.loads(row["reward/mean"])) for file in files for step, row in offline_rows(file)], len(files)


KILLED = """
import os, sys
from pathlib import Path
from gspo_mega.metrics.sinks import SinkMaker, Sinks
from gspo_mega.metrics.wandb_sink import WandbSink
from gspo_mega.metrics.writer import MetricsWriter
from gspo_mega.base.run_folder import RunFolder, atomic_write_json
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
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, start_new_session=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    said = []
    sinks = sinks_of(tmp_path, lambda run: WandbSink(run, **OFFLINE), said, "wandb")
    write(tmp_path, sinks, [3, 4], resume=2)
    rows, num_files = wandb_rows(tmp_path)
    # Rows of the last moments before the kill may have been in the buffer of W&B's process, so they are there twice.
    assert set(rows) == {(step, float(step)) for step in (1, 2, 3, 4)} and num_files == 2 and said == []
    assert rows[-4:] == [(step, float(step)) for step in (1, 2, 3, 4)]
    sinks = sinks_of(tmp_path, lambda run: WandbSink(run, **OFFLINE), said, "wandb")
    write(tmp_path, sinks, [3, 4, 5], resume=2)
    rows, num_files = wandb_rows(tmp_path)
    # After an end in order it has all that it was given, and cannot take it back.
    assert rows[-1] == (5, 5.0) and rows[-2] == (4, 4.0) and len(rows) <= 8 and num_files == 3 and said == []


def test_what_a_sink_had_in_its_buffer_long_ago_it_has_for_sure(tmp_path, lines):
    lines.buffer_seconds = 0.2
    sinks = sinks_of(tmp_path, lines)
    writer = MetricsWriter(tmp_path, sinks)
    writer.write(1, {})
    until(lambda: steps_of(lines.given) == [1])
    time.sleep(0.3)
    writer.write(2, {})
    ledger = tmp_path / "sinks" / "lines.json"
    until(lambda: ledger.exists() and json.loads(ledger.read_text()) == {"lines": 2, "kept_step": 1})
    # Killed here: no close. What follows is another process.
    write(tmp_path, sinks_of(tmp_path, lines), [3], resume=2)
    assert steps_of(lines.given) == [1, 2, 2, 3]
    assert json.loads(ledger.read_text()) == {"lines": 3, "kept_step": 3}


def test_a_sink_that_cannot_be_made_is_not_made_at_each_step(tmp_path):
    """W&B's start leaves a folder, so that each attempt costs one where it cannot be removed."""
    attempts, said = [], []

    def broken(run):
        attempts.append(run.first_step)
        raise ModuleNotFoundError("No module named 'wandb.sdk.internal.datastore'")

    sinks = sinks_of(tmp_path, broken, said)
    with MetricsWriter(tmp_path, sinks) as writer:
        for step in range(1, 41):
            before = sinks._feeds[0]._to_skip, len(attempts)
            writer.write(step, {})
            until(lambda: (sinks._feeds[0]._to_skip, len(attempts)) != before)
    assert len(attempts) == 7 and set(attempts) == {1}, attempts  # steps 1, 2, 4, 8, 16, 32 and the end
    assert len(said) == 1


def test_a_sink_that_fails_while_it_is_written_to_is_made_anew_now_and_then(tmp_path, lines):
    lines.broken |= set(range(2, 100))
    sinks = sinks_of(tmp_path, lines)
    with MetricsWriter(tmp_path, sinks) as writer:
        for step in range(1, 31):
            failures = sinks.num_failures
            writer.write(step, {})
            until(lambda: sinks.num_failures > failures or (steps_of(lines.given) == [1] and step == 1))
    assert sum(entry[0] == "first" for entry in lines.given) == 3  # at first, and after 4 and 16 failures


def test_a_start_of_wandb_that_fails_leaves_no_folder(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    begin = wandb.init

    def failing(**options):
        begin(**options)
        raise RuntimeError("no answer")

    monkeypatch.setattr(wandb, "init", failing)
    sinks = sinks_of(tmp_path, lambda run: WandbSink(run, **OFFLINE), name="wandb")
    write(tmp_path, sinks, [1])
    assert sinks.num_failures >= 1 and not list((tmp_path / "sinks/wandb/wandb").glob("*run-*/"))


PRIVATE = re.compile(r"^\s*(?:from|import)\s+(wandb|torch\.utils\.tensorboard|tensorboard)\.(?!utils)", re.MULTILINE)


def test_no_sink_imports_a_module_below_its_package():
    """What is not exported by the package itself moves from release to release."""
    for file in Path(wandb_sink.__file__).parent.glob("*_sink.py"):
        assert not PRIVATE.findall(file.read_text()), file


def test_a_package_that_is_missing_too_old_or_broken_is_said_before_a_run(monkeypatch):
    config = config_of("metrics.sinks=[wandb]")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.23.1")
    with pytest.raises(ConfigError, match="metrics.sinks.0: .*'wandb': the package is 0.23.1 here, and 0.24 or newer"):
        sink_makers(config.metrics)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0.0")
    monkeypatch.setitem(sys.modules, "wandb", None)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "wandb" or find(name))
    with pytest.raises(ConfigError, match="wandb 1.0.0 cannot be imported here: ModuleNotFoundError"):
        sink_makers(config.metrics)
    gone = ("wandb", "tensorboard")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in gone else find(name))
    with pytest.raises(ConfigError, match="not installed here; pip install 'gspo_mega.wandb.'"):
        sink_makers(config.metrics)
    with pytest.raises(ConfigError, match="'tensorboard': the package tensorboard is not installed here"):
        sink_makers(config_of("metrics.sinks=[tensorboard]").metrics)


def test_the_oldest_version_is_that_of_the_package():
    extras = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert extras["wandb"] == [f"wandb>={'.'.join(map(str, wandb_sink.LEAST_VERSION))}"]


# --- names in the YAML -------------------------------------------------------------------------------------------------


def config_of(*overrides):
    return load_config("configs/quickstart.yaml", overrides).config


def test_names_are_short_for_sinks_and_the_older_key_is_read():
    assert [one.sink for one in config_of().metrics.sinks] == ["jsonl", "tensorboard"]
    assert [one.sink for one in config_of("metrics.tensorboard=false").metrics.sinks] == ["jsonl"]
    both = config_of("metrics.sinks=[wandb]", "metrics.tensorboard=true").metrics.sinks
    assert [one.sink for one in both] == ["wandb", "tensorboard"]
    makers = sink_makers(config_of("metrics.sinks=[jsonl, {sink: wandb, options: {project: mine}}]").metrics)
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
        sink_makers(config_of(f"metrics.sinks={sinks}").metrics)
    assert said in str(refusal.value) and str(refusal.value).startswith("metrics.sinks.")
