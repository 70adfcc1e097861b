"""A live source that samples ahead, with real data, scoring and journal: stopped anywhere, it goes on without loss."""

from __future__ import annotations

import contextlib
import json
import time

import pytest
from collector_support import SPEC_OF_TOKENIZER, collector_config

from gspo_mega.base.run_folder import RunFolder, atomic_write_text
from gspo_mega.checkpoint.load import TrainState
from gspo_mega.config.schema import Config
from gspo_mega.data.journal.journal import Journal
from gspo_mega.data.quickstart import write_tokenizer
from gspo_mega.train.reusable_records import made_by
from gspo_mega.train.rollouts import Rollouts
from gspo_mega.train.servers import paused
from gspo_mega.train.sources import LiveSource, RecordedSource, journalled_source

REWARDS = """
import zlib

def judge(*, prompt, response, answer, metadata):
    return {"reward": zlib.crc32(response.encode()) % 7, "correct": False}
"""
NUM_STEPS, PROMPTS, SAMPLES, BOUND = 6, 3, 4, 2


class Stopped(Exception):
    pass


class Run:
    """Attempts of one run over fakes whose tokens take time. `state` is its only checkpoint."""

    def __init__(self, config: Config, folder: RunFolder, fakes) -> None:
        self.config, self.folder, self.fakes, self.state = config, folder, fakes, TrainState()
        self.batches, self.said = {}, []

    @contextlib.contextmanager
    def attempt(self, slow=lambda call, ids: None):
        attempt = self.folder.new_attempt()
        atomic_write_text(attempt.api_key_file, "the-key\n", mode=0o600)
        server = self.fakes("server-0", attempt)
        server.token_seconds, server.fault, server.version = 0.01, slow, self.state.weight_version
        server.register("ready")
        with Rollouts(self.config, SPEC_OF_TOKENIZER, attempt) as rollouts:
            rollouts.pool.wait_ready(1, 30.0)
            journal = Journal(self.folder.journal_dir)
            source = journalled_source(
                self.config, journal, LiveSource(rollouts, made_by(self.config)), self.said.append
            )
            source.restore(self.state)
            self.rollouts, self.source, self.server = rollouts, source, server
            self._commit()
            yield
        source.close()

    def _commit(self) -> None:
        with paused(self.rollouts.pool, "continue"):
            self.server.version = self.state.weight_version
            self.rollouts.pool.commit(self.state.weight_version, [("server-0", 1)])

    def step(self, on_wait=lambda: None) -> None:
        step = self.state.step
        self.batches[step] = self.source.take(step, self.state.weight_version, on_wait)
        self.state.step = step + 1
        if not self.config.train.rollouts_only:
            self.state.weight_version = step + 1
            self._commit()

    def checkpoint(self) -> TrainState:
        self.source.save_position(self.state)
        return TrainState(**json.loads(json.dumps(vars(self.state))))


@pytest.fixture
def run(tmp_path, monkeypatch):
    from fake_server import FakeServer

    (tmp_path / "model").mkdir()
    write_tokenizer(tmp_path / "model")
    (tmp_path / "ahead_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{k}+{k}", "answer": "x"}) + "\n" for k in range(10, 99))
    )
    settings = dict(max_staleness=BOUND, max_new_tokens=12, progress_deadline_seconds=5.0)
    plain = collector_config(prompts_per_step=PROMPTS, group_size=SAMPLES, **settings).model_dump()
    sections = {
        "model": {"path": str(tmp_path / "model")},
        "data": {"path": "train.jsonl", "max_prompt_tokens": 8, "chat_template": False, "shuffle": False},
        "reward": plain["reward"] | {"functions": ({"function": "ahead_rewards:judge"},)},
        "train": {"num_steps": NUM_STEPS},
    }
    made = []

    def fakes(name, attempt):
        made.append(FakeServer(name, attempt.servers_dir))
        return made[-1]

    yield Run(Config.model_validate({**plain, **sections}), RunFolder(tmp_path / "run"), fakes)
    for server in made:
        server.close()


def check(run: Run) -> list[str]:
    """Every prompt once, in order, whole, fresh; the journal has exactly the batches. Returns the episodes' ids."""
    groups = [group for step in range(NUM_STEPS) for group in run.batches[step].groups]
    assert [g.prompt.text for g in groups] == [f"{k}+{k}" for k in range(10, 10 + NUM_STEPS * PROMPTS)]
    assert [g.group_id for g in groups] == list(range(NUM_STEPS * PROMPTS))
    assert all(len(group.episodes) == SAMPLES for group in groups)
    ids = [episode.episode_id for group in groups for episode in group.episodes]
    assert len(set(ids)) == len(ids)
    for step, batch in run.batches.items():
        versions = {v for e in batch.episodes for v in e.turns[0].weight_versions}
        assert step - BOUND <= min(versions) and max(versions) <= step
    replay = RecordedSource(run.folder.journal_dir)
    for step in range(NUM_STEPS):
        again = replay.take(step, 0, lambda: None)
        assert [e.episode_id for e in again.episodes] == [e.episode_id for e in run.batches[step].episodes]
        assert again.trajectories == run.batches[step].trajectories
    return ids


def test_a_run_without_interruption(run):
    with run.attempt():
        while run.state.step < NUM_STEPS:
            run.step()
        assert run.source.state_dict()["tickets"]["first"] == NUM_STEPS * PROMPTS
    check(run)


def test_a_run_that_is_stopped_while_it_waits_samples_nothing_complete_again(run):
    """Its checkpoint is of the step before; groups ahead of it are complete, half complete and not begun."""

    def slow(call, ids):
        """No answer about the eighth prompt ever gets beyond its beginning."""
        stuck = run.rollouts.tokenizer.encode("17+17", add_special_tokens=False)
        return "stall" if list(ids[: len(stuck)]) == stuck else None

    with run.attempt(slow):
        run.step(), run.step()
        saved = run.checkpoint()
        assert saved.prompts["tickets"]["first"] == 2 * PROMPTS
        begun = time.monotonic()

        def on_wait():
            if run.state.step == 2 and time.monotonic() - begun > 1.0:
                raise Stopped

        with pytest.raises(Stopped):
            while True:
                run.step(on_wait)
    run.state = saved
    done_before = {k: v for k, v in run.batches.items() if k >= 2}
    recorded = {
        episode.episode_id
        for step in Journal(run.folder.journal_dir).steps()
        for group in Journal(run.folder.journal_dir).read(step).groups.values()
        for episode in group.episodes
    }
    with run.attempt():
        while run.state.step < NUM_STEPS:
            run.step()
        asked = {body["rid"].rpartition(".")[0] for path, body in run.server.calls if path == "/generate"}
    ids = check(run)
    for step, batch in done_before.items():
        assert [e.episode_id for e in run.batches[step].episodes] == [e.episode_id for e in batch.episodes]
    assert recorded <= set(ids), "complete, and not trained"
    assert len(recorded) > 2 * PROMPTS * SAMPLES
    assert not asked & recorded and asked | recorded == set(ids)


def test_a_run_whose_last_steps_are_lost_is_replayed_from_the_journal(run):
    """Killed after step 4 with the checkpoint of step 1: steps 2 to 4 come from the journal, and what was ahead too."""
    with run.attempt():
        run.step()
        saved = run.checkpoint()
        for _ in range(3):
            run.step()
    lost = dict(run.batches)
    run.state = saved
    with run.attempt():
        while run.state.step < NUM_STEPS:
            run.step()
    check(run)
    for step in range(1, 4):
        assert run.batches[step].trajectories == lost[step].trajectories
    assert sum("are in the journal and are not sampled again" in line for line in run.said) == 3


def test_rollouts_alone_are_sampled_ahead_and_a_stopped_recording_goes_on(run):
    """The version stays 0: what is open at the stop is taken over, and the record is whole."""
    train = run.config.train.model_copy(update={"rollouts_only": True})
    run.config = run.config.model_copy(update={"train": train})
    with run.attempt():
        for _ in range(NUM_STEPS // 2):
            run.step()
        saved = run.checkpoint()
        assert saved.prompts["tickets"]["first"] == NUM_STEPS // 2 * PROMPTS
    run.state = saved
    with run.attempt():
        while run.state.step < NUM_STEPS:
            run.step()
    assert {v for b in run.batches.values() for e in b.episodes for v in e.turns[0].weight_versions} == {0}
    groups = [group for step in range(NUM_STEPS) for group in run.batches[step].groups]
    assert [g.prompt.text for g in groups] == [f"{k}+{k}" for k in range(10, 10 + NUM_STEPS * PROMPTS)]
    replay = RecordedSource(run.folder.journal_dir)
    for step in range(NUM_STEPS):
        assert replay.take(step, 0, lambda: None).trajectories == run.batches[step].trajectories
    assert run.batches[0].counts["num_groups_in_flight"] == PROMPTS * BOUND
