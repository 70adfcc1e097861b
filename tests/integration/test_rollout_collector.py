"""Rollout batches from the real server, also when it is killed in the middle of one."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import numpy as np
import pytest
from servers import Serve, run_config
from test_rollout_server import check_response
from tiny_models import EOS_TOKEN_ID, byte_tokenizer, perturb
from waiting import until

from gspo_mega.agents.driver import EpisodeDriver
from gspo_mega.agents.session import Conversation
from gspo_mega.agents.turn import Limits
from gspo_mega.base.records import Prompt
from gspo_mega.base.run_folder import RunFolder, atomic_write_json
from gspo_mega.config import load_config
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.rollout.collector import Collector
from gspo_mega.rollout.pool import ServerPool


class Stream:
    def __init__(self):
        self.drawn = []

    def next(self):
        index = len(self.drawn)
        self.drawn.append(Prompt(f"p:{index}", "p", tuple(10 + (index + j) % 90 for j in range(4 + index % 9)), "text"))
        return self.drawn[-1]


async def score(episode):
    episode.reward = float(episode.turns[0].token_ids[0] % 2)


def collector_of(config, pool, stream):
    return Collector(
        config,
        pool,
        stream,
        EpisodeDriver(Conversation(byte_tokenizer().decode), Limits(1, 2**20)),
        score,
        [EOS_TOKEN_ID],
    )


def open_requests(pool):
    return [flight for entry in pool.ready_servers() for flight in list(entry.load.flights)]


def check_whole(batch, stream, config, version):
    assert [g.prompt.prompt_id for g in batch.groups] == [p.prompt_id for p in stream.drawn]
    assert len(batch.groups) == config.batch.prompts_per_step
    assert len({t.trajectory_id for t in batch.trajectories}) == config.batch.prompts_per_step * config.batch.group_size
    assert all(set(t.weight_versions) == {version} for t in batch.trajectories)


def test_a_batch_with_its_routed_experts(moe_server):
    stream = Stream()
    with moe_server.pool() as pool:
        pool.wait_ready(1, 60)
        batch = collector_of(moe_server.config, pool, stream).take(0)
    check_whole(batch, stream, moe_server.config, 0)
    assert batch.counts["num_request_failures"] == 0
    texts = byte_tokenizer()
    for t in batch.trajectories[:6]:
        assert t.routed_experts.shape == (t.num_tokens - 1, 3, 2) and t.routed_experts.dtype == np.uint8
        check_response(moe_server.model, t.prompt.token_ids, t.response_token_ids, t.rollout_log_probs)
        kept = t.response_token_ids[:-1] if t.finish_reason == "stop" else t.response_token_ids
        assert t.response_text == texts.decode(kept)


def test_samples_of_one_prompt_differ(dense_server):
    with dense_server.pool() as pool:
        pool.wait_ready(1, 60)
        collector = collector_of(dense_server.config, pool, Stream())
        prompt = Prompt("e:0", "e", (20, 21, 22), "text")
        (sampled,) = collector.sample([prompt], 8, 1.0)
        (greedy,) = collector.sample([prompt], 3, 0.0)
    # Of the few that end at once any two may be alike.
    longer = [tuple(t.response_token_ids) for t in sampled.trajectories if len(t.response_token_ids) > 4]
    assert len(sampled.trajectories) == 8 and len(set(longer)) == len(longer) >= 3
    assert len({tuple(t.response_token_ids) for t in greedy.trajectories}) == 1


@pytest.mark.parametrize("behind", [False, True], ids=["weights on disk", "weights published over"])
def test_kill_in_the_middle_of_a_rollout(dense_model, tmp_path, behind):
    """SGLang is killed with open requests. It restarts with the current weights, and every prompt comes back once.

    With `behind`, it starts from older weights, and the test publishes the newest ones to it, as the runtime does.
    """
    moved = perturb(dense_model, tmp_path / "v4", seed=4)
    path = run_config(
        tmp_path,
        dense_model,
        batch={"prompts_per_step": 64, "group_size": 4},
        rollout={"max_new_tokens": 400},
    )
    config, spec = load_config(path).config, read_model_spec(dense_model)
    serve = Serve(path, tmp_path / "run")
    stream = Stream()
    try:
        serve.wait_for("ready")
        with ServerPool(config.rollout, spec, serve.attempt) as pool:
            pool.wait_ready(1, 60)
            (control,) = pool.controls()
            control.update_from_disk(str(moved), 4, deadline_seconds=60)
            pool.commit(4, [(control.server_id, control.generation)])
            if not behind:
                current = RunFolder(tmp_path / "run").current_weights_file
                current.parent.mkdir()
                atomic_write_json(current, {"weight_version": 4, "path": str(moved)})
            collector = collector_of(config, pool, stream)
            collector.start(0)
            until(lambda: len(requests := open_requests(pool)) >= 64 and any(r.num_tokens for r in requests), 60)
            os.kill(serve.sglang_pid(), signal.SIGKILL)
            republished = []

            def on_wait():
                for server in pool.servers_behind():
                    server.update_from_disk(str(moved), 4, deadline_seconds=60)
                    pool.commit(4, [(server.server_id, server.generation)])
                    republished.append(server.generation)

            batch = collector.take(0, on_wait)
        check_whole(batch, stream, config, 4)
        assert batch.counts["num_request_failures"] >= 50
        assert republished == ([2] if behind else [])
        registration = serve.registration()
        assert (registration.generation, registration.weight_version) == (2, None if behind else 4)
        for t in batch.trajectories[::64]:
            check_response(moved, t.prompt.token_ids, t.response_token_ids, t.rollout_log_probs)
    finally:
        serve.stop()


def test_requests_cut_short_by_an_abort_go_on_from_their_tokens(dense_server):
    config = dense_server.config.model_copy(
        update={"rollout": dense_server.config.rollout.model_copy(update={"max_attempts": 50})}
    )
    dense, num_aborted = replace(dense_server, config=config), 0
    with dense.pool() as pool:
        pool.wait_ready(1, 60)
        (control,) = pool.controls()
        try:
            for _ in range(20):  # on a busy machine all may be complete before the abort comes
                stream = Stream()
                collector = collector_of(config, pool, stream)
                collector.start(0)
                until(lambda: any(request.num_tokens for request in open_requests(pool)), 60)
                control.abort_all(deadline_seconds=60)
                batch = collector.take(0)
                check_whole(batch, stream, config, 0)
                num_aborted = batch.counts["num_aborted_requests"]
                # One that had tokens goes on from them, one that had none is tried again, one that had its last one is
                # done.
                again = batch.counts["num_continued_requests"] + batch.counts["num_retries"]
                assert again <= num_aborted and batch.counts["num_discarded_tokens"] == 0
                if again >= 1:
                    break
        finally:
            dense_server.restore_weights()
    assert 1 <= again <= num_aborted
