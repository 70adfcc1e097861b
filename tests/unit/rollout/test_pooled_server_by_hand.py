"""What one server's failures, idle times and states make of it, and where a run goes on behind dropped groups."""

from __future__ import annotations

import asyncio

import pytest
from collector_support import collector_config
from fake_answers import EOS
from test_age_guards import known_group
from test_refilled_groups import Pool, Prompts

from gspo_mega.agents.driver import EpisodeDriver
from gspo_mega.agents.session import Conversation
from gspo_mega.agents.turn import Limits
from gspo_mega.config.schema import Train
from gspo_mega.rollout.admission import Admission
from gspo_mega.rollout.arrival_order import Freshness
from gspo_mega.rollout.client.server_client import ServerError
from gspo_mega.rollout.collector import Collector
from gspo_mega.rollout.pooled_server import PooledServer
from gspo_mega.rollout.registration import Registration


def server() -> PooledServer:
    made = PooledServer(Registration("server-0", "http://a", 1, "ready", 1, 0, 0.0), client=None)
    made.note_verified(3)
    return made


def error(kind: str) -> ServerError:
    return ServerError("server-0", "generate", kind, "as asked")


def test_requests_that_fail_together_are_one_failure_and_rests_double():
    """.2 s after the first failure, .4 s after the second, up to the limit; an answer in between begins anew."""
    one = server()
    one.note_failure(error("connection"), 100.0)
    assert one.rest_until == pytest.approx(100.2)
    for now in (100.0, 100.1, 100.19):  # of requests that were open when it failed
        one.note_failure(error("connection"), now)
    assert one.rest_until == pytest.approx(100.2)
    one.note_failure(error("connection"), 100.2)
    assert one.rest_until == pytest.approx(100.6)
    one.note_success()
    one.note_failure(error("connection"), 200.0)
    assert one.rest_until == pytest.approx(200.2)
    rests, now = [], 300.0
    for _ in range(14):
        one.note_failure(error("status"), now)
        rests.append(one.rest_until - now)
        now = one.rest_until
    assert rests == sorted(rests) and rests[-2:] == pytest.approx([5.0, 5.0]) and one.verified_version == 3


def test_the_third_nonsense_answer_in_a_row_takes_its_version_from_a_server():
    one = server()
    assert [one.note_failure(error("nonsense"), now) for now in (1.0, 2.0)] == [False, False]
    one.note_success()
    assert [one.note_failure(error("nonsense"), now) for now in (3.0, 4.0)] == [False, False]
    assert one.note_failure(error("connection"), 4.5) is False and one.verified_version == 3
    assert one.note_failure(error("nonsense"), 5.0) is True and one.verified_version is None
    assert one.note_failure(error("nonsense"), 6.0) is False, "it is said once"
    one.note_verified(4)
    assert one.note_failure(error("nonsense"), 7.0) is False and one.verified_version == 4


def test_a_server_is_idle_while_no_request_is_open(monkeypatch):
    now = [10.0]
    monkeypatch.setattr("gspo_mega.rollout.pooled_server.time.monotonic", lambda: now[0])
    one = server()
    one.take_idle_seconds()
    now[0] = 12.0
    one.open_request(5), one.open_request(7)
    assert (one.num_open, one.load.num_tokens) == (2, 14)
    now[0] = 20.0
    one.close_request(5)
    now[0] = 21.0
    assert one.take_idle_seconds() == pytest.approx(2.0) and one.take_idle_seconds() == 0.0
    one.close_request(7)
    assert (one.num_open, one.load.num_tokens) == (0, 0)
    now[0] = 24.0
    assert one.take_idle_seconds() == pytest.approx(3.0)
    now[0] = 25.0
    assert one.take_idle_seconds() == pytest.approx(1.0)


def test_the_step_that_is_asked_for_is_admitted_whatever_the_number_of_steps():
    for order in ("admission", "completion"):
        admission = Admission(1, 1, Freshness(2), order, num_steps=2)
        admission.ask(3)
        assert admission.horizon == 3 and admission.may_admit()
        admission.admit()
        assert not admission.may_admit()


async def right_if_long(episode) -> None:
    episode.reward = float(episode.num_sampled_tokens > 2)


def test_behind_dropped_groups_a_run_goes_on_with_the_prompt_that_was_not_drawn(monkeypatch):
    """With the filter on and nothing sampled ahead: the position is that of the first prompt of the next batch."""
    monkeypatch.setattr("gspo_mega.rollout.sampler._BACKOFF_SECONDS", 0.0)
    settings = dict(
        group_size=2, prompts_per_step=2, filter_constant_groups=True, max_oversampling=8.0, max_attempts=60
    )
    config = collector_config(**settings).model_copy(update={"train": Train(num_steps=40)})
    pool, prompts = Pool(), Prompts()
    pool.freshness = Freshness(0)
    collector = Collector(
        config, pool, prompts, EpisodeDriver(Conversation(str), Limits(1, 40)), right_if_long, [EOS],
        snapshot=lambda: prompts.count,
    )  # fmt: skip
    num_dropped = 0
    try:
        for step in range(6):
            batch = collector.take(step)
            num_dropped += batch.counts["num_groups_filtered"]
            assert collector.position.prompts == prompts.count and collector.position.tickets is None
            partial = sum(len(set(e.turns[0].weight_versions)) > 1 for e in batch.episodes)
            assert batch.counts["num_partial_episodes"] == partial == 0
    finally:
        collector.close()
        pool.loop.close()
    assert num_dropped, "no group was dropped"


def test_an_episode_of_two_versions_is_a_partial_one(monkeypatch):
    monkeypatch.setattr("gspo_mega.rollout.sampler._BACKOFF_SECONDS", 0.0)
    config = collector_config(group_size=2, prompts_per_step=1, max_staleness=2, max_attempts=60)
    config = config.model_copy(update={"train": Train(num_steps=40)})
    pool = Pool()
    pool.freshness, pool.committed_version = Freshness(2), 5
    driver = EpisodeDriver(Conversation(str), Limits(1, 40))
    collector = Collector(config, pool, Prompts(), driver, right_if_long, [EOS])
    try:
        collector.start(5, {0: known_group(0, [4, 5])})
        assert collector.take(5).counts["num_partial_episodes"] == 1
    finally:
        collector.close()
        pool.loop.close()


def test_a_server_that_drains_ends_its_requests():
    ended: list[str] = []

    class Flight:
        def end(self, cause: str) -> None:
            ended.append(cause)

    one = server()
    one.load.flights = {Flight(), Flight()}
    one.note_state("ready")
    assert not one.is_draining and ended == []
    one.note_state("draining")
    assert one.is_draining and ended == ["drained"] * 2
    assert asyncio.run(_answered(one)) == "answer"


async def _answered(one: PooledServer) -> str:
    async def call() -> str:
        return "answer"

    return await one.run(call())


@pytest.mark.parametrize(("turns", "num_filtered"), [("return_to_go", 0.0), ("episode", 2.0)])
def test_the_filter_keeps_groups_of_equal_sums_where_turns_have_rewards(monkeypatch, turns, num_filtered):
    monkeypatch.setattr("gspo_mega.rollout.sampler._BACKOFF_SECONDS", 0.0)

    async def score(episode) -> None:
        episode.turns[0].reward = 0.25
        episode.reward = 1.0

    settings = dict(
        group_size=2, prompts_per_step=1, filter_constant_groups=True, max_oversampling=2.0, max_attempts=60
    )
    config = collector_config(**settings).model_copy(update={"train": Train(num_steps=40)})
    config = config.model_copy(update={"advantage": config.advantage.model_copy(update={"turns": turns})})
    pool = Pool()
    pool.freshness = Freshness(0)
    collector = Collector(config, pool, Prompts(), EpisodeDriver(Conversation(str), Limits(1, 40)), score, [EOS])
    try:
        batch = collector.take(0)
        assert batch.counts["num_groups_filtered"] == num_filtered and len(batch.groups) == 1
    finally:
        collector.close()
        pool.loop.close()
