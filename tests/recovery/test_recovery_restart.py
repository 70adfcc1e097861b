"""`gspo-mega train` with real ranks that are killed: started again by itself, it ends where an uninterrupted run does,
to the bit, also where its rank starts in a process that was prepared.
"""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from recovery_support import NUM_STEPS, leftovers, outcome
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb_files import offline_files, offline_rows

from gspo_mega.base import failpoints
from gspo_mega.base.run_folder import read_json
from gspo_mega.launcher.prepare import free_port
from gspo_mega.metrics.writer import SINK_FAILURES, read_metrics

APART = ("run/num_restarts", "run/num_standby_ranks", SINK_FAILURES)


def scraped(port, running) -> tuple[set[float], dict[int, float]]:
    """(attempts seen, gradient norm by step) at the endpoint of rank 0, until the command ends."""
    attempts, norms = set(), {}
    while running.poll() is None:
        time.sleep(0.05)
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
                text = answer.read().decode()
        except (OSError, HTTPException):  # a rank that is killed while it answers
            continue
        found = {family.name: family.samples[0].value for family in text_string_to_metric_families(text)}
        attempts.add(found["gspo_mega_attempt"])
        if "gspo_mega_step" in found:
            norms[int(found["gspo_mega_step"])] = found["gspo_mega_optimizer_grad_norm"]
    return attempts, norms


def kill_stopped_ranks(folder, running, standbys: dict[int, int]) -> None:
    """Kill rank 0 of each attempt once it has stopped and its standby is ready; in the second attempt the standby is
    killed before. `standbys` gets their processes, by attempt.
    """
    while running.poll() is None:
        time.sleep(0.05)
        attempt = folder.latest_attempt()
        if attempt is None or attempt.number in standbys or not attempt.standby_ready_file(0).exists():
            continue
        with suppress(FileNotFoundError):  # the run has just ended
            rank = read_json(attempt.beat_file(0))["pid"]
            if Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                standby = standbys[attempt.number] = read_json(attempt.standby_ready_file(0))["pid"]
                if attempt.number == 2:
                    os.kill(standby, signal.SIGKILL)
                os.kill(rank, signal.SIGKILL)


def test_a_run_that_loses_its_rank_twice_ends_by_itself_where_an_uninterrupted_one_does(ranks, straight):
    # Every start stops at its second publish and is killed: two of three steps need a start of their own.
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        failpoints.VARIABLE: "point=step.published,hit=2,do=stop",
    }
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "gspo_mega",
        "train",
        str(ranks.config_file),
        f"run.dir={ranks.runs / 'restarted'}",
        "profile.steps=[3, 3]",
        "train.standby_processes=true",
        f"metrics.prometheus.port={port}",
        "metrics.sinks=[jsonl, tensorboard, {sink: wandb, options: {mode: offline}}]",
    ]
    running = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ranks.config_file.parent,
    )
    folder = ranks.folder("restarted")
    standbys: dict[int, int] = {}
    killing = threading.Thread(target=kill_stopped_ranks, args=(folder, running, standbys))
    killing.start()
    attempts, served = scraped(port, running)
    killing.join()
    done = subprocess.CompletedProcess(command, running.wait(), *running.communicate())
    assert done.returncode == 0, done.stdout + done.stderr + ranks.log("restarted")
    assert done.stdout.count("rank 0 was killed by SIGKILL") == len(folder.attempts()) - 1 == NUM_STEPS - 1
    lines = read_metrics(folder.metrics_file)
    assert [line["run/num_restarts"] for line in lines] == [0, 1, 2]
    assert [line["run/num_standby_ranks"] for line in lines] == [0, 1, 0]
    said = [line for line in done.stdout.splitlines() if line.startswith(("standby  rank", "notice   rank 0"))]
    assert said[0] == "standby  rank 0 started in processes that had imported everything"
    assert said[1].startswith("notice   rank 0 started in new processes: its standby process was killed by SIGKILL")
    assert len(said) == 2 and list(standbys) == [1, 2]
    assert read_json(folder.attempts()[1].beat_file(0))["pid"] == standbys[1]
    found, want = outcome(folder), dict(straight[0])
    for end in (found, want):
        end["metrics"] = [{name: value for name, value in line.items() if name not in APART} for line in end["metrics"]]
    assert {name for name in found.keys() | want.keys() if found.get(name) != want.get(name)} == set()
    assert leftovers(folder) == []
    # What Prometheus would have read meanwhile is what the run wrote.
    assert attempts and served.items() <= {line["step"]: line["optimizer/grad_norm"] for line in lines}.items()
    # The last start profiled its step, with the phases as ranges.
    with gzip.open(folder.profile_dir / "steps_3-3" / "rank_0.json.gz") as file:
        events = json.load(file)["traceEvents"]
    ranges = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert {"step 3", "rollout", "old_log_probs", "train", "report", "write"} <= set(ranges)
    assert any(event.get("cat") == "cpu_op" for event in events)
    assert f"profile  steps 3 to 3: {folder.profile_dir / 'steps_3-3'}\n" in done.stdout
    # Sinks have every step once, whatever a kill took from them.
    assert [line[SINK_FAILURES] for line in lines] == [0, 0, 0]
    norms = [(line["step"], line["optimizer/grad_norm"]) for line in lines]
    rows: dict[int, set[float]] = {}  # W&B's may be there twice: it buffers, and a kill takes the buffer
    for file in offline_files(folder.sinks_dir / "wandb"):
        for step, row in offline_rows(file):
            if "optimizer/grad_norm" in row:
                rows.setdefault(step, set()).add(float(row["optimizer/grad_norm"]))
    assert all(len(values) == 1 for values in rows.values())
    assert {step: min(values) for step, values in rows.items()} == {step: pytest.approx(norm) for step, norm in norms}
    events = EventAccumulator(str(folder.tensorboard_dir))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("optimizer/grad_norm")]
    assert shown == [(step, pytest.approx(norm, rel=1e-6)) for step, norm in norms]
    beat = read_json(folder.latest_attempt().beat_file(0))
    # One step in its last start: a forward pass for each of two mini-batches and a training pass, every tensor of an
    # export.
    assert beat["phase"] == "done" and beat["count"] > 30, beat
