"""Rollout batches over servers that fail in every way: each prompt comes back once, complete, and is counted."""

from __future__ import annotations

import random
import threading
import time

import pytest
from collector_support import Stream, check_whole, collector_of
from fake_answers import EOS

from gspo_mega.base.errors import RolloutError
from gspo_mega.base.records import Prompt


def test_a_plain_batch(fakes, collect):
    server = fakes("server-0")
    stream = Stream()
    collector, _ = collect(stream=stream)
    waits = []
    batch = collector.take(3, on_wait=lambda: waits.append(1))
    check_whole(batch, stream)
    assert batch.step == 3
    assert batch.counts["num_prompts_sampled"] == 6 and batch.counts["num_trajectories"] == 24
    assert batch.counts["num_retries"] == batch.counts["num_request_failures"] == 0
    assert batch.counts["num_generated_tokens"] == sum(t.num_response_tokens for t in batch.trajectories)
    assert set(batch.phase_seconds) == {"generate", "score"}
    (path, body), *rest = server.calls
    assert path == "/generate" and len(rest) == 23
    assert body["sampling_params"] == {
        "max_new_tokens": 6,
        "temperature": 1.0,
        "top_p": 1.0,
        "stop_token_ids": [EOS],
        "skip_special_tokens": False,
        "stream_interval": 32,
    }
    stopped = next(t for t in batch.trajectories if t.finish_reason == "stop" and t.num_response_tokens > 1)
    assert stopped.response_text == " ".join(map(str, stopped.response_token_ids[:-1]))


def test_routed_experts_are_kept(fakes, collect):
    fakes("server-0")
    collector, _ = collect(return_routed_experts=True)
    for t in collector.take(0).trajectories:
        assert t.routed_experts.shape == (t.num_tokens - 1, 2, 2)


@pytest.mark.parametrize(
    "fault", [500, 400, "reset", "truncated", "not json", "abort", {"output_ids": [3], "meta_info": {}}, "hang"]
)
def test_failures_of_one_kind_lose_no_prompt(fakes, collect, fault):
    server = fakes("server-0")
    rng = random.Random(str(fault))
    server.fault = lambda call, ids: fault if rng.random() < 0.3 else None
    if isinstance(fault, dict) or fault == "not json":  # answers of no sense in a row would rightly end the only server
        server.fault = lambda call, ids: fault if call in (3, 9) else None
    stream = Stream()
    collector, _ = collect(stream=stream, progress_deadline_seconds=0.3)
    batch = collector.take(0)
    check_whole(batch, stream)
    failed = batch.counts["num_aborted_requests"] if fault == "abort" else batch.counts["num_request_failures"]
    assert failed >= 2
    if fault in ("abort", "truncated"):  # some had tokens, and went on from them
        assert 0 < batch.counts["num_continued_requests"] <= failed
    else:
        assert batch.counts["num_retries"] == failed


def wrong_lengths(call, ids):
    def worse(answer):
        answer["meta_info"]["output_token_logprobs"].append([-1.0, 3, None])
        return answer

    return worse


def test_a_server_that_only_answers_nonsense_ends_with_no_work_and_its_neighbour_does_it_all(fakes, collect):
    bad, _good = fakes("server-0"), fakes("server-1")
    bad.fault = wrong_lengths
    stream = Stream()
    collector, pool = collect(stream=stream)
    pool.wait_ready(2, 60)
    check_whole(collector.take(0), stream)
    assert [c.server_id for c in pool.servers_behind()] == ["server-0"]
    before = bad.num_generated
    collector.take(1)
    assert bad.num_generated == before


def test_tokens_of_other_weights_never_enter_a_trajectory(fakes, collect):
    stale, good = fakes("server-0"), fakes("server-1")
    stream = Stream()
    collector, pool = collect(stream=stream)
    pool.wait_ready(2, 60)
    stale.version = 5  # it changed its weights behind everybody's back
    batch = collector.take(0)
    check_whole(batch, stream)
    assert batch.counts["num_request_failures_nonsense"] >= 1
    assert good.num_generated >= 24


def test_a_server_that_dies_gives_its_work_to_the_other(fakes, collect):
    dying, _other = fakes("server-0", delay=0.05), fakes("server-1", delay=0.05)
    dying.fault = lambda call, ids: "hang" if call >= 2 else None
    stream = Stream()
    collector, pool = collect(stream=stream, progress_deadline_seconds=30.0)
    pool.wait_ready(2, 60)
    collector.start(0)
    deadline = time.monotonic() + 30
    while dying.num_open < 5:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    killed = time.monotonic()
    dying.die()
    batch = collector.take(0)
    assert time.monotonic() - killed < 20  # not the deadline of a request
    check_whole(batch, stream)
    assert batch.counts["num_request_failures"] >= 5


def test_a_lone_server_that_comes_back_behind_is_published_to_while_the_batch_waits(fakes, collect):
    """The restarted server holds old weights: the runtime updates it inside on_wait, and the batch continues."""
    server = fakes("server-0", delay=0.05)
    server.fault = lambda call, ids: "hang" if server.generation == 1 and call >= 3 else None
    stream = Stream()
    collector, pool = collect(stream=stream, progress_deadline_seconds=30.0, no_server_deadline_seconds=20.0)
    (control,) = pool.controls()
    control.update_from_disk("/w/1", 1, deadline_seconds=60)
    pool.commit(1, [("server-0", 1)])
    republished = []

    def on_wait():
        if server.generation == 1 and server.num_generated >= 6:
            server.die()
            server.version = 0
            server.start()
        for behind in pool.servers_behind():
            behind.update_from_disk("/w/1", 1, deadline_seconds=60)
            republished.append((behind.server_id, behind.generation))
            pool.commit(1, [(behind.server_id, behind.generation)])

    batch = collector.take(0, on_wait)
    check_whole(batch, stream, version=1)
    assert republished == [("server-0", 2)]


def test_the_request_that_always_fails_stops_the_batch_and_is_named(fakes, collect):
    server = fakes("server-0")
    server.fault = lambda call, ids: 500 if ids[1] == 6 else None
    collector, _ = collect(max_attempts=3)
    with pytest.raises(
        RolloutError, match=r"prompt p:2: no answer in 3 attempts.*server-0: generate step000000-g00002.*HTTP 500"
    ):
        collector.take(0)
    server.fault = lambda call, ids: None
    assert len(collector.take(1).groups) == 6  # and the next batch is none the worse


def test_open_requests_are_bounded(fakes, collect):
    server = fakes("server-0", delay=0.02)
    collector, _ = collect(max_concurrent_requests=3)
    collector.take(0)
    assert server.most_open == 3


def test_scoring_overlaps_with_generation(fakes, collect):
    server = fakes("server-0", delay=0.3)
    scored_while_open = []

    async def score(episode):
        episode.reward = 1.0
        scored_while_open.append(server.num_open)

    collector, _ = collect(score=score)
    collector.take(0)
    assert any(scored_while_open)


def test_a_failed_reward_is_counted_and_one_that_raises_ends_the_batch(fakes, collect):
    fakes("server-0")

    async def score(episode):
        if episode.episode_id.endswith("s001"):
            episode.reward_error = "it hung"
        else:
            episode.reward = 0.0

    collector, _ = collect(score=score, max_failed_fraction=0.25)
    assert collector.take(0).counts["num_reward_failures"] == 6

    async def broken(trajectory):
        raise ZeroDivisionError("in the scorer")

    collector, _ = collect(score=broken)
    with pytest.raises(ZeroDivisionError, match="in the scorer"):
        collector.take(0)


def test_evaluation_goes_through_the_same_machinery(fakes, collect):
    server = fakes("server-0")
    server.fault = lambda call, ids: 500 if call % 5 == 0 else None
    collector, _ = collect(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1)
    prompts = [Prompt(f"e:{i}", "e", (3, 4), "t") for i in range(10)]
    groups = collector.sample(prompts, 2, 0.0)
    assert [g.prompt for g in groups] == prompts
    assert all(len(g.trajectories) == 2 and None not in [t.reward for t in g.trajectories] for g in groups)
    params = server.calls[0][1]["sampling_params"]
    assert (params["temperature"], params["top_p"], "top_k" in params) == (0.0, 1.0, False)
    assert all(t.sampling_masks is None for g in groups for t in g.trajectories)
    batch = collector.take(0)
    body = server.calls[-1][1]
    params = body["sampling_params"]
    assert (params["temperature"], params["top_p"], params["top_k"], params["min_p"]) == (0.7, 0.9, 5, 0.1)
    assert body["return_sampling_mask"] and "return_sampling_mask" not in server.calls[0][1]
    for row in batch.trajectories:
        assert (row.sampling_masks.counts == 2).all() and len(row.sampling_masks) == row.num_response_tokens
    assert batch.sampled["response/kept_tokens_mean"] == batch.sampled["response/kept_tokens_max"] == 2


def test_an_error_while_waiting_ends_the_batch_and_its_requests(fakes, collect):
    server = fakes("server-0")
    server.fault = lambda call, ids: "hang"
    collector, _ = collect(progress_deadline_seconds=60.0)

    def on_wait():
        if server.num_open:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collector.take(0, on_wait)
    deadline = time.monotonic() + 30
    while server.num_open:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_closing_leaves_no_thread(fakes, pools):
    server = fakes("server-0")
    server.fault = lambda call, ids: "hang"
    before = set(threading.enumerate())
    pool = pools(progress_deadline_seconds=60.0)
    collector = collector_of(pool)
    collector.start(0)
    while not server.num_open:
        time.sleep(0.01)
    ours = set(threading.enumerate()) - before
    assert ours, "requests are open, and a thread of the pool's waits for them"
    collector.close()
    pool.close()
    for thread in ours:
        thread.join(5.0)
        assert not thread.is_alive(), thread
    assert set(threading.enumerate()) <= before


def test_batches_are_taken_in_turn(fakes, collect):
    fakes("server-0")
    collector, _ = collect()
    collector.start(0)
    with pytest.raises(RuntimeError, match="step 0 was started"):
        collector.start(1)
    with pytest.raises(RuntimeError, match="step 1 asked for, step 0 was started"):
        collector.take(1)
    assert collector.take(0).step == 0


def test_a_storm_of_failures_over_three_servers(fakes, collect):
    servers = [fakes(f"server-{i}", delay=0.01) for i in range(3)]
    rng = random.Random(0)
    kinds = [500, "reset", "truncated", "abort", "hang", *[None] * 15]
    for server in servers:
        server.fault = lambda call, ids: rng.choice(kinds)
    stream = Stream()
    settings = dict(prompts_per_step=30, group_size=4, progress_deadline_seconds=0.2, max_attempts=40)
    collector, pool = collect(stream=stream, **settings)
    pool.wait_ready(3, 60)
    check_whole(collector.take(0), stream, prompts=30)


def test_groups_that_are_there_already_are_not_sampled_and_every_other_trajectory_is_handed_on(fakes, collect):
    server = fakes("server-0")
    stream, kept = Stream(), []
    collector, _ = collect(stream=stream)
    first = collector.take(3)
    known = {group.group_id: group for group in first.groups[1:4]}
    num_calls = len(server.calls)
    again_stream = Stream()
    again, _ = collect(stream=again_stream)
    again.start(3, known, kept.append)
    batch = again.take(3)
    check_whole(batch, again_stream)
    assert [batch.groups[number] is group for number, group in known.items()] == [True] * 3
    assert len(server.calls) - num_calls == 12 == len(kept)
    assert {t.group_id for t in kept} == {0, 4, 5} and all(t.reward is not None for t in kept)
    assert batch.counts["num_trajectories"] == 24 and batch.counts["num_prompts_sampled"] == 6
    assert batch.counts["num_generated_tokens"] == sum(t.num_response_tokens for t in batch.trajectories)
