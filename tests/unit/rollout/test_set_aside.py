"""Servers taken from training for an evaluation: it measures one version on them, training goes on with the others."""

from __future__ import annotations

import threading

import pytest
from ahead_support import Ahead, sample_of

from gspo_mega.base import processes
from gspo_mega.base.errors import RolloutError
from gspo_mega.base.records import Prompt
from gspo_mega.rollout.eval_servers import reserve_for_eval

PROMPTS = [Prompt(f"held:{k}", "held", (3, 60 + k, 5), "q") for k in range(4)]
MOST = 64


class Beside:
    """An evaluation on servers of `run` that stands still until `go` is set."""

    def __init__(self, run: Ahead, num_servers: int = 1, version: int | None = None, **more):
        self.run, self.go = run, threading.Event()
        version = run.version if version is None else version
        servers = reserve_for_eval(run.pool, MOST, num_servers, version, **more)
        assert servers is not None
        self.servers = servers
        for server in run.servers:
            server.holds = lambda rid, num_tokens: rid.startswith("eval") and not self.go.is_set()

    def begin(self):
        sample = self.run.collector.sample
        self.future = processes.run_in_thread("evaluation", lambda: sample(PROMPTS, 4, 0.0, servers=self.servers))
        return self

    def end(self):
        self.go.set()
        return self.future.result(timeout=60)


def versions(groups):
    return {version for g in groups for e in g.episodes for turn in e.turns for version in turn.weight_versions}


@pytest.fixture
def run(attempt):
    runs = []

    def make(**settings):
        runs.append(Ahead(attempt, progress_deadline_seconds=60.0, **settings))
        return runs[-1]

    yield make
    for one in runs:
        one.close()


def server_of(run, server_id):
    return next(server for server in run.servers if server.server_id == server_id)


def test_training_goes_on_and_publishes_while_one_version_is_measured(run):
    run = run(servers=3, max_staleness=2, num_steps=6)
    run.step(0)
    run.step(1)
    beside = Beside(run).begin()
    (taken,) = beside.servers.server_ids
    assert run.pool.num_set_aside == 1 and taken not in [one.server_id for one in run.pool.ready_servers()]
    for step in range(2, 5):  # nothing of the evaluation has ended: training does not wait for it
        run.step(step)
    assert not beside.future.done() and server_of(run, taken).version == 1
    groups = beside.end()
    assert versions(groups) == {1}, "the weights of the step that it was begun after"
    for episode in (episode for group in groups for episode in group.episodes):
        (turn,) = episode.turns
        assert (turn.token_ids, turn.log_probs) == sample_of(episode.episode_id) and episode.reward is not None
    asked = {body["rid"].partition("-")[0] for path, body in server_of(run, taken).calls if path == "/generate"}
    assert "eval" in asked
    beside.servers.give_back()
    assert [control.server_id for control in run.pool.servers_behind()] == [taken], (
        "it catches up like one that was away"
    )
    run.step(5)
    assert server_of(run, taken).version == 5 and run.pool.servers_behind() == []
    assert run.broken() == {}


def test_a_held_publish_does_not_hold_the_evaluation(run):
    run = run(servers=2)
    run.step(0)
    beside = Beside(run).begin()
    run.publish(during=lambda: beside.end())
    assert versions(beside.future.result()) == {0}


def test_one_server_stays_with_training_and_one_that_lacks_the_version_is_not_taken(run):
    run = run(servers=3)
    run.step(0)
    beside = Beside(run, num_servers=9)
    assert len(beside.servers.server_ids) == 2
    assert reserve_for_eval(run.pool, MOST, 1, 0) is None
    beside.servers.give_back()
    run.step(1)
    assert reserve_for_eval(run.pool, MOST, 1, 0) is None, "all hold version 1"


def test_the_evaluation_ends_with_its_server_and_another_one_can_load_the_version(run, tmp_path):
    run = run(servers=2)
    run.step(0)
    beside = Beside(run).begin()
    (taken,) = beside.servers.server_ids
    run.publish()
    server_of(run, taken).die()
    server_of(run, taken).start()  # from the weights that it held, as its next generation
    with pytest.raises(RolloutError, match=f"no server is left that holds weight version 0: {taken} went down"):
        beside.future.result(timeout=60)
    beside.servers.give_back()
    run.pool.wait_ready(2, 10)

    again = Beside(run, version=0, loads=True)
    assert again.servers.server_ids == [taken], "the one that training lacks anyway"
    server_of(run, taken).version = 1
    again.servers.load(tmp_path / "v0", 10)
    loads = [body for path, body in server_of(run, taken).calls if path == "/update_weights_from_disk"]
    assert (loads[-1]["model_path"], loads[-1]["weight_version"]) == (str(tmp_path / "v0"), "0")
    assert versions(again.begin().end()) == {0} and run.pool.committed_version == 1


def test_a_server_that_cannot_load_the_version_is_given_back(run, tmp_path):
    run = run(servers=2)
    run.step(0)
    run.step(1)
    beside = Beside(run, version=0, loads=True)
    (taken,) = beside.servers.server_ids
    server_of(run, taken).die()
    with pytest.raises(RolloutError, match=f"no server could load weight version 0: {taken}: "):
        beside.servers.load(tmp_path / "v0", 10)
    assert run.pool.num_set_aside == 0
