"""Sampling that goes on while the trainer trains: bounds, order, publishes in flight, and that nothing is lost."""

from __future__ import annotations

import asyncio
import statistics
import time

import pytest
from ahead_support import Ahead, Discarding, sample_of
from fake_answers import EOS
from waiting import until

from gspo_mega.base.errors import RolloutError
from gspo_mega.rollout import scheduler
from gspo_mega.rollout.client.completion import SamplingParams
from gspo_mega.rollout.sampler import Sampler
from gspo_mega.train.servers import paused


@pytest.fixture
def ahead(attempt):
    made = []

    def make(**settings) -> Ahead:
        made.append(Ahead(attempt, **settings))
        return made[-1]

    yield make
    for run in made:
        run.close()


def check(run: Ahead) -> None:
    """Every sample that was begun is trained once, with exactly its tokens, none too old."""
    assert run.broken() == {}


@pytest.mark.parametrize("order", ["admission", "completion"])
@pytest.mark.parametrize("bound", [1, 3])
def test_nothing_is_older_than_the_bound_and_everything_sampled_is_trained(ahead, order, bound):
    run = ahead(max_staleness=bound, order=order, token_seconds=0.01)
    run.stand_still_until_a_publish()
    run.run()
    check(run)
    assert [batch.counts["num_groups_in_flight"] for batch in run.batches] == [
        4 * min(bound, run.num_steps - 1 - step) for step in range(run.num_steps)
    ]
    partial = sum(batch.counts["num_partial_episodes"] for batch in run.batches)
    assert partial == sum(len(set(e.turns[0].weight_versions)) > 1 for e in run.episodes)
    assert partial and run.num_open[0] == 0 < max(run.num_open)
    assert sum(batch.counts["num_paused_responses"] for batch in run.batches) >= partial
    assert max(len(set(e.turns[0].weight_versions)) for e in run.episodes) <= bound + 1
    if order == "admission":
        prompts = [group.prompt.prompt_id for batch in run.batches for group in batch.groups]
        assert prompts == [f"p:{k}" for k in range(4 * run.num_steps)]
    assert {group.prompt.prompt_id for batch in run.batches for group in batch.groups} == {
        prompt.prompt_id for prompt in run.stream.drawn
    }


def test_a_publish_that_waits_leaves_every_response_of_one_version(ahead):
    run = ahead(max_staleness=2, on_publish="wait", token_seconds=0.02)
    run.stand_still_until_a_publish()
    run.run()
    check(run)
    assert sum(batch.counts["num_partial_episodes"] for batch in run.batches) == 0 < max(run.num_open)
    assert sum(batch.counts["num_paused_responses"] for batch in run.batches) == 0


def test_a_stop_ends_the_wait_for_a_long_response(ahead):
    """SIGTERM comes while a publish waits: the open responses end with their tokens, and go on behind it."""
    run, asked, ended = ahead(max_staleness=2, on_publish="wait"), [], []

    def holds(request_id: str, num_tokens: int) -> bool:
        """Every response stands still, most behind their first token, until the stop has ended it."""
        length = len(sample_of(request_id.rpartition(".")[0])[0])
        return num_tokens == min(1, length - 1) and not ended

    for server in run.servers:
        server.holds = holds
    run.publish()
    run.collector.start(0, admit=run.admit)
    until(lambda: sum(server.num_open for server in run.servers) == 48)
    until(lambda: sum(server.num_tokens for server in run.servers) >= 30)

    def on_wait() -> bool:
        asked.append(time.monotonic())
        return len(asked) > 1

    began = time.monotonic()
    with paused(run.pool, "wait", on_wait) as pause:
        assert [server.num_open for server in run.servers] == [0, 0]
        ended.append(True)
    assert pause.num_open >= 30 and 0.2 < pause.seconds <= time.monotonic() - began < 60
    assert len(asked) <= 4, "looking for a stop opens a file"
    for server in run.servers:
        server.token_seconds = 0.0
    run.batches.append(run.collector.take(0))
    for step in range(1, run.num_steps):
        run.step(step)
    check(run)
    assert sum(batch.counts["num_paused_responses"] for batch in run.batches) >= 20


def test_over_a_kept_cache_every_token_has_its_true_version_even_if_its_server_dies(ahead):
    """A report names the version of its own time: some tokens of the first one behind a publish are older."""
    run = ahead(
        max_staleness=2, on_publish="continue_with_cache", token_seconds=0.03, progress_deadline_seconds=1.2, servers=1
    )
    (server,) = run.servers
    run.publish()
    sampler = Sampler(run.config.rollout, run.pool)

    async def sample_all(first: int):
        params = SamplingParams(24, 1.0, 1.0, -1, (EOS,))
        return await asyncio.gather(
            *(sampler.sample("p", (3, 4, 5), params, f"turn-{i}") for i in range(first, first + 24))
        )

    run.pool.loop.run(sample_all(0))  # now it reports every few tokens
    assert 1 < run.pool.ready_servers()[0].load.report_tokens(1.2) < 8
    open_turns = run.pool.loop.submit(sample_all(24))
    until(lambda: sum(len(versions) for *_, versions in server.sampled[24:]) > 2 * 24)
    run.publish()
    time.sleep(8 * run.token_seconds)  # some have reported since, and are still open
    server.die(), server.start()
    turns, truth = open_turns.result(timeout=30), run.versions_of()
    for number, turn in enumerate(turns, start=24):
        assert (turn.token_ids, turn.log_probs) == sample_of(f"turn-{number}")
        assert turn.weight_versions == truth[f"turn-{number}"], number
    assert sum(len(set(turn.weight_versions)) > 1 for turn in turns)
    assert sampler.counts["num_request_failures"] and sampler.counts["num_continued_requests"]
    assert sampler.counts["num_discarded_tokens"], "no report was of two versions"


def test_servers_work_while_the_trainer_trains(ahead):
    run, ready = ahead(max_staleness=1, num_steps=4, token_seconds=0.05), []
    run.collector.on_ready = lambda step, groups: ready.append(step)
    for step in range(run.num_steps):
        run.step(step)
        if step < run.num_steps - 1:  # the trainer trains for as long as the servers need
            until(lambda step=step: step + 1 in ready)
    check(run)
    first, *rest = [batch.counts["trainer_wait_seconds"] for batch in run.batches]
    assert all(0 <= wait < first / 2 for wait in rest), (first, rest)


def test_with_a_bound_of_0_nothing_begins_before_it_is_asked_for(ahead):
    alone = ahead(max_staleness=0, train_seconds=0.3, num_steps=2, servers=1)
    num_asked = []
    for step in range(2):
        alone.step(step)
        num_asked.append(len(alone.asked()))
    assert num_asked == [16, 32] and alone.num_open == [0, 0]
    assert alone.batches[1].counts["servers_idle_seconds"] >= 0.3
    assert alone.collector.position.tickets is None


def test_no_request_begins_between_the_pause_and_the_commit(ahead):
    run = ahead(max_staleness=2, num_steps=4)
    for step in range(4):
        before = {}

        def during():
            before.update({s.server_id: s.num_generated for s in run.servers})
            time.sleep(0.05)
            assert {s.server_id: s.num_generated for s in run.servers} == before
            assert [s.num_open for s in run.servers] == [0, 0]

        run.publish(during)
        run.collector.start(step, admit=run.admit)
        run.batches.append(run.collector.take(step))
    check(run)


def test_a_server_that_dies_in_a_publish_loses_no_token(ahead):
    """Its open responses went on elsewhere from what they had; the server that came back is published to."""
    run = ahead(max_staleness=2, token_seconds=0.005)
    run.step(0)

    def die():
        run.servers[0].die()
        run.servers[0].register("failed", "as asked")

    run.publish(die)
    run.collector.start(1, admit=run.admit)
    run.batches.append(run.collector.take(1))
    for step in range(2, run.num_steps):
        run.step(step)
    check(run)


def test_servers_that_come_back_in_a_long_step_are_not_given_up(ahead):
    """They hold older weights, and nobody can publish to them before the trainer has done; its requests wait."""
    run = ahead(max_staleness=2, no_server_deadline_seconds=0.5, progress_deadline_seconds=5.0, num_steps=5)
    for server in run.servers:
        server.fault = lambda call, ids: "stall" if ids[:3] == [3, 4 + 10, 5] else None
    run.step(0), run.step(1)
    for server in run.servers:
        server.die()
        server.version, server.fault = 0, lambda call, ids: None
        server.start()
    until(lambda: [control.generation for control in run.pool.servers_behind()] == [2, 2])
    time.sleep(1.5)
    assert run.collector._scheduler._num_running == 1, "nothing waits"
    for step in range(2, run.num_steps):
        run.step(step)
    check(run)


def test_servers_that_stay_behind_while_the_trainer_waits_end_the_run(ahead):
    run = ahead(max_staleness=1, no_server_deadline_seconds=0.5, num_steps=3)
    run.step(0)
    run.pool.commit(1, [])
    with pytest.raises(RolloutError, match="no server could take a request for 0.5 s.*holds version 0 of 1"):
        run.collector.take(1), run.collector.take(2)


def test_a_server_that_keeps_its_requests_does_not_hold_the_publish(ahead, monkeypatch):
    monkeypatch.setattr("gspo_mega.rollout.client.server_client.GRACE_SECONDS", 0.2)
    run = ahead(max_staleness=1, token_seconds=0.05, num_steps=3, servers=1)
    run.servers[0].answers_aborts = False
    started = time.monotonic()
    run.run()
    assert time.monotonic() - started < 20
    assert sum(batch.counts.get("num_request_failures_deadline", 0) for batch in run.batches), [
        b.counts for b in run.batches
    ]
    check(run)


def test_a_straggler_is_waited_for_where_it_is_next(ahead):
    """In order of admission the batch has it; in order of completion a later one, and still in time."""
    waits = {}
    for order in ("admission", "completion"):
        run = ahead(max_staleness=2, num_steps=5, order=order)
        for server in run.servers:
            server.fault = lambda call, ids: "stall" if ids[:3] == [3, 4, 5] and len(ids) == 3 else None
        run.run()
        check(run)
        (step,) = [s for s, b in enumerate(run.batches) for g in b.groups if g.prompt.prompt_id == "p:0"]
        waits[order] = step, run.batches[step].counts["straggler_wait_seconds"]
    assert waits["admission"][0] == 0 and waits["admission"][1] > 1.0
    assert waits["completion"][0] > 0


def test_an_error_ends_all_sampling_and_is_raised_by_the_take_that_meets_it(ahead):
    run = ahead(max_staleness=2, max_attempts=2)
    run.step(0)
    for server in run.servers:
        server.fault = lambda call, ids: 500
    with pytest.raises(RolloutError, match="no answer in 2 attempts"):
        for step in range(1, run.num_steps):
            run.step(step)
    for server in run.servers:
        server.fault = lambda call, ids: None
    begun = run.collector.position
    assert begun.tickets == {"first": 4 * len(run.batches), "done": []} and begun.prompts == 4 * len(run.batches)


@pytest.mark.parametrize("order", ["admission", "completion"])
def test_forty_faults_lose_double_and_bias_nothing(ahead, order):
    """Drop, stall, truncate, garbage, duplicate, wrong version, 500, and 20 times slower, five of each."""
    run = ahead(
        max_staleness=2,
        order=order,
        num_steps=10,
        servers=3,
        prompts_per_step=6,
        progress_deadline_seconds=0.3,
        max_attempts=60,
    )
    faults = run.inject(40, seed=7, share=0.25)
    run.run()
    assert len(faults) == 8 and set(faults.values()) == {5}, faults
    assert sum(batch.counts["num_request_failures"] for batch in run.batches) >= 20
    check(run)


def test_a_silent_request_is_named_before_its_deadline(ahead):
    run = ahead(max_staleness=1, num_steps=2, progress_deadline_seconds=1.0, token_seconds=0.0)
    for server in run.servers:
        server.fault = lambda call, ids: "stall" if ids[:3] == [3, 4, 5] and len(ids) == 3 else None
    run.step(0)
    silent = [line for line in run.said if line.startswith("waiting  prompt p:0: no new token from server-")]
    assert len(silent) >= 1 and "rollout.progress_deadline_seconds" in silent[0], run.said
    assert 0.5 <= float(silent[0].partition(" for ")[2].partition(" s")[0]) < 1.0
    assert any(line.startswith("waited   step 1:") and line.endswith("of prompt p:0") for line in run.said), run.said
    run.step(1)
    check(run)


def test_lengths_control_discarding_is_seen(ahead, monkeypatch):
    """The certificate's control: trained responses are shorter than sampled ones, and `check` sees it."""

    def admission_of(config):
        return Discarding(4, 4, scheduler.Freshness(1), "completion", num_steps=10)

    monkeypatch.setattr(scheduler, "admission_of", admission_of)
    # A token takes longer than a busy machine holds a thread up, or the order of completion would not be that of lengths.
    run = ahead(max_staleness=1, token_seconds=0.03, train_seconds=0.0, num_steps=10)
    run.run()
    trained = [episode.num_sampled_tokens for episode in run.episodes]
    sampled = [len(sample_of(name)[0]) for name in run.asked()]
    assert len(trained) < len(sampled)
    assert statistics.mean(trained) < statistics.mean(sampled) - 1.0, (
        statistics.mean(trained),
        statistics.mean(sampled),
    )
    assert {"lost", "biased"} <= run.broken().keys() and "doubled" not in run.broken(), run.broken()


@pytest.mark.parametrize("order", ["admission", "completion"])
def test_the_next_steps_groups_are_told_while_this_one_trains(ahead, order):
    """They are those that the next step then has: in order of admission always, in the other as told last."""
    run, told = ahead(max_staleness=1, order=order, train_seconds=0.3, token_seconds=0.001), {}
    run.collector.on_ready = lambda step, groups: told.setdefault(step, []).append(groups)
    run.run()
    check(run)
    assert told and set(told) <= set(range(1, run.num_steps)), "no step behind the last one, and not the first"
    for step, groups in told.items():
        assert [id(group) for group in groups[-1]] == [id(group) for group in run.batches[step].groups]
        assert len(groups) == 1 or order == "completion"


def test_without_sampling_ahead_nothing_is_told(ahead):
    run, told = ahead(max_staleness=0, num_steps=2), []
    run.collector.on_ready = lambda step, groups: told.append(step)
    run.run()
    assert told == []
