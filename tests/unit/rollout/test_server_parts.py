"""The parts of a server over several nodes: orders, reports, and a part that follows its head. Stand-ins play SGLang."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from waiting import until

from gspo_mega.base.run_folder import RunFolder
from gspo_mega.config import load_config
from gspo_mega.rollout.registration import Registration
from gspo_mega.rollout.server.multinode import SILENCE_SECONDS, PartReport, PartSupervisor, ServerParts, StartOrder
from gspo_mega.rollout.server.spec import ServerSpec, sglang_arguments, spec_from_config

CONFIG = Path(__file__).parents[3] / "configs/quickstart.yaml"
OVER_TWO = ["server={tensor: 4, num_nodes: 2}", "cluster.num_rollout_nodes=2", "server.drain_seconds=0"]
# Says what it was started with, then stays until it is killed.
STAND_IN = """
import shutil, sys, time
shutil.copy(sys.argv[sys.argv.index("--spec") + 1], sys.argv[1])
time.sleep(600)
"""


@pytest.fixture
def attempt(tmp_path):
    made = RunFolder(tmp_path / "run").new_attempt()
    made.logs_dir.mkdir(parents=True, exist_ok=True)
    return made


def spec_of(attempt, port=21_000) -> ServerSpec:
    return spec_from_config(
        load_config(CONFIG, OVER_TWO).config,
        model_path="model",
        weight_version=None,
        port=port,
        api_key_file=attempt.api_key_file,
        attempt="0001",
        index=0,
        generation=1,
        store=attempt.path / "store",
        rendezvous="127.0.0.1:21001",
    )


def test_each_part_is_told_its_place_by_sglangs_names(attempt):
    head = sglang_arguments(spec_of(attempt), on_cpu=True, cpu_attention_backend="x")
    part = sglang_arguments(replace(spec_of(attempt), node=1), on_cpu=True, cpu_attention_backend="x")
    places = [
        {name: found[name] for name in ("nnodes", "node_rank", "dist_init_addr", "tp_size")} for found in (head, part)
    ]
    assert places[0] == {"nnodes": 2, "node_rank": 0, "dist_init_addr": "127.0.0.1:21001", "tp_size": 4}
    assert places[1] == {**places[0], "node_rank": 1}
    alone = sglang_arguments(replace(spec_of(attempt), num_nodes=1), on_cpu=True, cpu_attention_backend="x")
    assert "nnodes" not in alone and "dist_init_addr" not in alone


def test_a_server_on_one_node_writes_no_orders(attempt):
    parts = ServerParts(attempt, 0, 1)
    assert parts.rendezvous("127.0.0.1", 21_000) is None and parts.death(1) is None and parts.missing(1) == ""
    parts.order(1, spec_of(attempt))
    assert not attempt.server_parts_dir.exists()


def test_the_head_knows_a_part_that_ended_or_is_silent_or_never_began(attempt):
    now = [0.0]
    parts = ServerParts(attempt, 0, 3, clock=lambda: now[0])
    host, port = parts.rendezvous("127.0.0.1", 21_000).rsplit(":", 1)
    assert (host, int(port) > 21_000) == ("127.0.0.1", True)
    parts.order(4, spec_of(attempt))
    assert StartOrder.read(attempt, 0) == StartOrder(4, spec_of(attempt))
    assert parts.death(4) is None
    assert parts.missing(4) == "; no `gspo-mega serve` has started its part 1, 2"
    first = PartReport(1, 4, "running", "n1", 7)
    first.write(attempt, 0)
    PartReport(2, 3, "ended", "n2", 3, "of the start before").write(attempt, 0)
    assert parts.death(4) is None and parts.missing(4).endswith("its part 2")
    now[0] = SILENCE_SECONDS + 1
    assert parts.death(4) == "its part 1 on n1 is silent for 61 s"
    replace(first, beat=8).write(attempt, 0)
    assert parts.death(4) is None
    replace(first, beat=9, state="ended", error="SGLang killed by SIGKILL").write(attempt, 0)
    assert parts.death(4) == "its part 1 on n1: SGLang killed by SIGKILL"
    (attempt.server_parts_dir / "server-0.part-1.json").write_text("{")
    assert parts.death(4) is None


class Follower:
    """A part without its loop, beside a head that only registers."""

    def __init__(self, attempt) -> None:
        self.attempt, self.seen = attempt, attempt.path / "seen.json"
        config = load_config(CONFIG, OVER_TWO).config
        self.part = PartSupervisor(config.server, attempt, 0, 1, entry=(sys.executable, "-c", STAND_IN, str(self.seen)))

    def head(self, state, generation, ordered=True) -> Registration:
        if ordered:
            ServerParts(self.attempt, 0, 2).order(generation, spec_of(self.attempt))
        return Registration("server-0", "", 0, state, generation, None, time.time())

    def follow(self, *head, **more):
        self.part._follow(self.head(*head, **more) if head else None)
        return PartReport.read(self.attempt, 0, 1)


@pytest.fixture
def follower(attempt):
    one = Follower(attempt)
    yield one
    one.part._end("over")


def running(report) -> tuple[int, str]:
    return report.generation, report.state


def test_a_part_starts_nothing_while_its_head_waits_for_a_copy(follower):
    """The number in its registration is that of an earlier start, whose order lies there still."""
    head = follower.head("starting", 2)
    follower.part._follow(replace(head, waits_for="the copy"))
    assert follower.part._running is None
    follower.part._follow(head)
    assert follower.part._running is not None


def test_a_part_runs_what_its_head_runs(follower):
    assert follower.follow() is None
    assert follower.follow("restarting", 1) is None
    assert follower.follow("starting", 2, ordered=False) is None, "the order of this start is not seen yet"
    assert running(follower.follow("starting", 2)) == (2, "running")
    first = follower.part._running
    until(lambda: follower.seen.exists() and follower.seen.read_text().endswith("}\n"))
    spec = ServerSpec(**json.loads(follower.seen.read_text()))
    assert (spec.node, spec.num_nodes, spec.rendezvous) == (1, 2, "127.0.0.1:21001")
    assert spec.port != 21_000 and spec.store.startswith(str(first.scratch.path))
    assert running(follower.follow("ready", 2)) == (2, "running") and follower.part._running is first
    assert running(follower.follow("draining", 2)) == (2, "running") and follower.part._running is first
    # The head restarts: the part's own processes end with it, and start again with it.
    assert running(follower.follow("restarting", 2)) == (2, "ended")
    assert first.process.poll() is not None and not first.scratch.path.exists()
    assert running(follower.follow("starting", 3)) == (3, "running")
    second = follower.part._running
    assert running(follower.follow("starting", 4)) == (4, "running") and second.process.poll() is not None


def test_a_part_whose_sglang_dies_reports_it_and_waits_for_the_next_start(follower):
    follower.follow("starting", 1)
    os.killpg(follower.part._running.process.pid, signal.SIGKILL)
    follower.part._running.process.wait()
    report = follower.follow("ready", 1)
    assert running(report) == (1, "ended") and report.error.startswith("SGLang killed by SIGKILL (see ")
    assert ServerParts(follower.attempt, 0, 2).death(1).startswith("its part 1 on 127.0.0.1: SGLang killed by SIGKILL")
    assert running(follower.follow("ready", 1)) == (1, "ended"), "it was started again within the same start"
    assert running(follower.follow("starting", 2)) == (2, "running")


def test_a_part_whose_head_is_silent_ends(follower, monkeypatch):
    head = follower.head("ready", 1)
    follower.part._follow(head)
    process = follower.part._running.process
    monkeypatch.setattr(follower.part._head, "_clock", lambda: time.monotonic() + SILENCE_SECONDS + 1)
    follower.part._follow(head)
    assert process.poll() is not None
    # A head that is alive after all learns of it, and starts again.
    assert ServerParts(follower.attempt, 0, 2).death(1) == "its part 1 on 127.0.0.1: the head does not run"
    follower.part._follow(replace(head, heartbeat=head.heartbeat + 2))
    assert follower.part._running is None, "the head restarts the server as a whole: this start is over"
