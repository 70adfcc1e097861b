"""Evaluations beside training: what is due, at which weights, and what becomes of one whose servers or run end."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))

from ahead_support import Ahead
from safetensors.numpy import load_file

from gspo_mega.base.errors import RewardError
from gspo_mega.base.records import Prompt
from gspo_mega.base.run_folder import RunFolder, atomic_write_text
from gspo_mega.checkpoint.convert import to_megatron
from gspo_mega.checkpoint.load import TrainState
from gspo_mega.checkpoint.tensor_sources import open_checkpoint
from gspo_mega.config.schema import Eval, Model
from gspo_mega.train.async_eval import DUE, AsyncEvaluations
from gspo_mega.train.context import StopRequested
from gspo_mega.train.held_out import Evaluation
from gspo_mega.verify.certify.program import make_random_folder

ROOT = Path(__file__).parents[3]
PROMPTS = [Prompt(f"held:{k}", "held", (3, 60 + k, 5), "q") for k in range(4)]


class Training:
    """A run over fakes that evaluates beside its steps; `state` is what a checkpoint would have. Versions that are
    published are on disk as folders.
    """

    def __init__(self, attempt, state=None, model="unused", **settings):
        self.run = Ahead(attempt, progress_deadline_seconds=60.0, **settings)
        self.state, self.folder, self.said = state or TrainState(), RunFolder(attempt.run_folder.path), []
        self.is_held, self.error = False, None
        for server in self.run.servers:
            server.holds = lambda rid, num_tokens: rid.startswith("eval") and self.is_held
        changes = {"eval": Eval(path="unused", blocking=False, servers=1), "model": Model(path=str(model))}
        config = self.run.config.model_copy(update=changes)
        rollouts = SimpleNamespace(pool=self.run.pool)
        lead = SimpleNamespace(
            rollouts=rollouts, run_folder=self.folder, console=self.said.append, evaluate=self.evaluate
        )
        self.evaluations = AsyncEvaluations(config, cast(Any, lead), self.state)

    def evaluate(self, step, check, names, servers):
        groups = self.run.collector.sample(PROMPTS, 2, 0.0, on_wait=check, servers=servers)
        if self.error is not None:
            raise self.error
        (version,) = {v for g in groups for e in g.episodes for turn in e.turns for v in turn.weight_versions}
        return {name: Evaluation(version / 10, 0.1, 0.0, 4, 8, 0.0, 3.0, 0) for name in names}

    def publish(self, on_disk=True):
        self.run.publish()
        if on_disk:
            self.folder.weights_version_dir(self.run.version).mkdir(parents=True)

    def begin(self, step):
        return self.evaluations.start(step, self.run.version, ["a", "b"], self.on_wait)

    def on_wait(self):
        """As the session's: servers that came back get the committed weights."""
        pool = self.run.pool
        for control in pool.servers_behind():
            control.update_from_disk("/w", pool.committed_version, deadline_seconds=5)
            pool.commit(pool.committed_version, [(control.server_id, control.generation)])

    def until(self, happened, seconds=60.0):
        end = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < end, (self.said, self.state.summary)
            self.evaluations.poll()
            self.on_wait()
            time.sleep(0.01)

    def measured(self):
        """(step, accuracy x 10: the version that was sampled from) of what has ended."""
        return [(one.step, round(10 * one.found["a"].accuracy)) for one in self.evaluations.take_results()]

    def taken(self):
        """The server that the evaluation has."""
        training = {server.server_id for server in self.run.pool.ready_servers()}
        (server,) = [server for server in self.run.servers if server.server_id not in training]
        return server

    def close(self):
        self.evaluations.close()
        self.run.close()


@pytest.fixture
def attempt(tmp_path):
    attempt = RunFolder(tmp_path / "run").new_attempt()
    atomic_write_text(attempt.api_key_file, "the-key\n", mode=0o600)
    return attempt


@pytest.fixture
def train(attempt):
    made = []

    def make(**settings):
        made.append(Training(attempt, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_an_evaluation_is_in_the_runs_state_until_it_is_over(train):
    run = train()
    run.publish()
    run.is_held = True
    assert run.begin(0) and run.evaluations.versions() == {0}
    run.publish()
    run.publish()
    run.evaluations.poll()
    due = {"step": 0, "weight_version": 0, "sets": ["a", "b"]}
    assert json.loads(json.dumps(run.state.summary)) == {DUE: [due]} and run.measured() == []
    run.is_held = False
    run.until(lambda: not run.evaluations.steps_due)
    assert run.measured() == [(0, 0)] and run.state.summary == {DUE: []}
    run.until(lambda: not run.run.pool.servers_behind())


def test_the_next_evaluation_waits_for_the_one_before(train):
    run = train()
    run.publish()
    run.is_held = True
    assert run.begin(0)
    run.publish()
    waits = []

    def on_wait():
        waits.append(run.evaluations.steps_due)
        run.is_held = False
        run.on_wait()

    assert run.evaluations.start(1, 1, ["a"], on_wait) and waits[0] == [0, 1]
    run.evaluations.wait_for_all(run.on_wait)
    assert run.measured() == [(0, 0), (1, 1)]


def test_it_begins_once_where_servers_are_free_as_soon_as_the_earlier_one_is_over(train):
    run = train(servers=4)
    run.publish()
    run.is_held = True
    assert run.begin(0)
    run.publish()
    ended = run.evaluations._running.future

    def on_wait():
        run.is_held = False
        ended.result(timeout=60)
        run.on_wait()  # its server holds the next version, too, before it is known to be over
        assert not run.run.pool.servers_behind()

    assert run.evaluations.start(1, 1, ["a"], on_wait) and run.evaluations.steps_due == [1]
    assert run.run.pool.num_set_aside <= 1
    run.evaluations.wait_for_all(run.on_wait)
    assert [(one.step, one.num_begun) for one in run.evaluations.take_results()] == [(0, 1), (1, 1)]


def test_a_stop_while_it_waits_leaves_both_to_the_next_start(train):
    run = train()
    run.publish()
    run.is_held = True
    assert run.begin(0)
    run.publish()

    def stop():
        raise StopRequested("asked for")

    with pytest.raises(StopRequested):
        run.evaluations.start(1, 1, ["a"], stop)
    assert run.evaluations.steps_due == [0, 1]


def test_no_server_to_spare_leaves_it_to_the_caller(train):
    run = train(servers=1)
    run.publish()
    assert not run.begin(0) and run.evaluations.steps_due == []
    assert "fewer than 2 servers hold the weights of step 0 now; training waits" in run.said[0]


def test_an_evaluation_that_loses_its_server_is_begun_again_at_the_same_weights(train):
    run = train(servers=2)
    run.publish()
    run.is_held = True
    assert run.begin(0)
    run.publish()
    server = run.taken()
    server.die()
    server.start()
    run.is_held = False
    run.until(lambda: not run.evaluations.steps_due)
    (measured,) = run.evaluations.take_results()
    assert (measured.step, measured.found["a"].accuracy, measured.num_begun) == (0, 0.0, 2)
    assert "warning  the evaluation of step 0 failed: no server is left" in run.said[0]
    loads = [body["model_path"] for server in run.run.servers for path, body in server.calls if "from_disk" in path]
    assert str(run.folder.weights_version_dir(0)) in loads


def test_weights_that_are_nowhere_any_more_are_said_not_to_be_measured(train):
    run = train(servers=2)
    run.publish()
    run.is_held = True
    assert run.begin(7)
    run.publish(on_disk=False)
    run.folder.weights_version_dir(0).rmdir()
    server = run.taken()
    server.die()
    server.start()
    run.until(lambda: not run.evaluations.steps_due)
    assert run.measured() == []
    assert run.said[1].startswith("warning  the weights of step 7 are not measured: weight version 0 is no longer")
    assert "checkpoints/step_00000007 exists" in run.said[1]


def test_weights_that_were_not_published_are_made_of_the_checkpoint_of_their_step(train, tmp_path):
    model = make_random_folder(ROOT / "configs/models/certify_dense.json", tmp_path / "hf", seed=1)
    due = [{"step": 3, "weight_version": 1, "sets": ["a"]}]
    run = train(state=TrainState(step=5, summary={DUE: due}), model=model)
    checkpoint = run.folder.checkpoint_dir(3)
    to_megatron(open_checkpoint(model), checkpoint, progress=lambda *_: None)
    (checkpoint / "config.json").unlink()  # a run's own checkpoint has none
    loaded = {}
    for server in run.run.servers:

        def control(path, body, answer=server.control):
            if "evaluated_" in (body or {}).get("model_path", ""):
                for file in Path(body["model_path"]).glob("*.safetensors"):
                    loaded.update(load_file(file))
            return answer(path, body)

        server.control = control
    for _ in range(3):
        run.publish(on_disk=False)
    run.evaluations.wait_for_all(run.on_wait)
    assert run.measured() == [(3, 1)]
    (file,) = model.glob("*.safetensors")
    want = load_file(file)
    assert loaded.keys() == want.keys() and all((loaded[name] == want[name]).all() for name in want)
    assert not list(run.folder.weights_dir.glob("evaluated_*")), "what was made for it is removed"


def test_the_next_start_takes_up_what_was_due(train):
    due = [{"step": 3, "weight_version": 0, "sets": ["a"]}, {"step": 4, "weight_version": 2, "sets": ["a"]}]
    run = train(state=TrainState(step=5, summary={DUE: due}))
    for _ in range(3):
        run.publish()
    run.evaluations.wait_for_all(run.on_wait)
    assert run.measured() == [(3, 0), (4, 2)] and run.state.summary == {DUE: []}


def test_an_error_of_the_rewards_ends_the_run_as_in_an_evaluation_that_it_waits_for(train):
    run = train()
    run.error = RewardError("nothing says what is correct")
    run.publish()
    assert run.begin(1)
    with pytest.raises(RewardError, match="nothing says what is correct"):
        run.evaluations.wait_for_all(run.on_wait)


def test_closing_ends_it_and_leaves_it_due(train):
    run = train()
    run.publish()
    run.is_held = True
    assert run.begin(2)
    run.evaluations.close()
    run.evaluations.poll()
    assert run.evaluations.steps_due == [2] and run.measured() == []
