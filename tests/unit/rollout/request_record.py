"""What a one-turn batch asks of a server and keeps of its answers, in full and in order, to be compared with a record.

The record, `data/one_turn_requests.json`, was made by the release before episodes, whose only rollout was one turn.
Since then requests with a finite top_k also ask for sampling masks.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from collector_support import Stream, collector_of

RECORD = Path(__file__).parent / "data" / "one_turn_requests.json"


async def _score(sample) -> None:
    """Some rewards differ within a group, those of one group do not, and one scoring fails."""
    name = sample.episode_id if hasattr(sample, "episode_id") else sample.trajectory_id
    if name == "step000004-g00003-s001":
        sample.reward_error = "judge: it hung"
    else:
        sample.reward = 0.0 if "-g00002-" in name else float(sum(map(ord, name)) % 3)


def one_after_the_other(fakes, pools) -> dict:
    """Step 4 and an evaluation with one request at a time, through refusals, aborts and broken connections."""
    server = fakes("server-0")
    server.token_seconds = 0.001  # a request takes longer than what this process does between two of them
    server.fault = lambda call, ids: {3: 500, 8: "abort", 13: "truncated", 20: "reset", 30: "abort"}.get(call)
    settings = {"max_concurrent_requests": 1, "return_routed_experts": True, "max_failed_fraction": 0.1}
    filtered = {"filter_constant_groups": True, "max_oversampling": 2.0}
    stream = Stream()
    pool = pools(**settings, **filtered)
    collector = collector_of(pool, _score, stream, temperature=0.7, top_p=0.9, top_k=5, **settings, **filtered)
    batch = collector.take(4)
    held_out = collector.sample([stream.next() for _ in range(3)], 2, 0.0)
    return {
        "requests": [_request(body) for path, body in server.calls if path == "/generate"],
        "step": [_row(row) for group in batch.groups for row in group.trajectories],
        "counts": {name: value for name, value in batch.counts.items() if name in _COUNTS},
        "eval": [_row(row) for group in held_out for row in group.trajectories],
    }


_COUNTS = (
    "num_trajectories",
    "num_reward_failures",
    "num_truncated",
    "num_retries",
    "num_request_failures",
    "num_aborted_requests",
    "num_continued_requests",
    "num_discarded_tokens",
    "num_generated_tokens",
    "num_prompts_sampled",
    "num_groups_filtered",
    "num_groups_unscored",
    "num_groups_missing",
)


def all_at_once(fakes, pools, monkeypatch) -> list[dict]:
    """The requests of step 0 in the order in which the client is given them, all before the first answer."""
    server, calls = fakes("server-0"), []
    server.fault = lambda call, ids: "hang"
    pool = pools(progress_deadline_seconds=60.0)
    (pooled,) = pool.ready_servers()
    generate = pooled.client.generate

    def noted(input_ids, params, *, request_id, **others):
        calls.append({"rid": request_id, "input_ids": list(input_ids), "sampling_params": params.as_json()})
        return generate(input_ids, params, request_id=request_id, **others)

    monkeypatch.setattr(pooled.client, "generate", noted)
    collector = collector_of(pool, _score, progress_deadline_seconds=60.0)
    collector.start(0)
    while server.num_open < 24:
        pool.loop.check()
    collector.close()
    return calls


def _request(body: dict) -> dict:
    """Without what is random (the end of the id) or measured (how often the server reports)."""
    params = {name: value for name, value in body["sampling_params"].items() if name != "stream_interval"}
    return {**body, "rid": body["rid"].rpartition(".")[0], "sampling_params": params}


def _row(row) -> dict:
    routes = row.routed_experts
    return {
        "id": row.trajectory_id,
        "prompt": [row.prompt.prompt_id, row.prompt.text, list(row.prompt.token_ids)],
        "tokens": row.response_token_ids,
        "mask": row.response_mask,
        "log_probs": row.rollout_log_probs,
        "versions": row.weight_versions,
        "finish": row.finish_reason,
        "text": row.response_text,
        "routes": None
        if routes is None
        else [list(routes.shape), hashlib.sha256(routes.astype("<i4").tobytes()).hexdigest()],
        "reward": [row.reward, row.reward_error, row.correct],
    }


def plain(value) -> object:
    """As JSON gives it back."""
    return json.loads(json.dumps(value, default=list))
