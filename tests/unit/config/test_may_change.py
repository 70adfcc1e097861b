"""What may differ when a run is continued stands beside each key in the schema."""

from __future__ import annotations

import pytest

from gspo_mega.config.explain import all_keys
from gspo_mega.config.schema import Config
from gspo_mega.config.schema.section import may_change

# Written out, so that a mark that is lost or added by mistake is noticed. A section stands for all its keys.
MAY_CHANGE = {
    "run.dir",
    "cluster",
    "parallel",
    "recompute",
    "batch.micro_batch_tokens",
    "batch.log_prob_chunk_tokens",
    "train.num_steps",
    "train.max_restarts",
    "train.standby_processes",
    "train.keep_servers",
    "train.on_lost_node",
    "train.min_nodes",
    "sft.max_steps",
    "run.modules_dir",
    "eval.every_steps",
    "eval.blocking",
    "eval.servers",
    "checkpoint",
    "journal",
    "metrics",
    "diagnostics",
    "alerts",
    "profile",
    "engine.fuse_activation",
    "engine.fuse_permutation",
    "engine.fuse_weight_gradient",
    "watchdog",
    "plan",
    "budget",
    "server",
    "publish",
    "rollout.max_concurrent_requests",
    "rollout.progress_deadline_seconds",
    "rollout.request_deadline_seconds",
    "rollout.max_attempts",
    "rollout.no_server_deadline_seconds",
    "reward.deadline_seconds",
    "reward.http",
    "reward.num_workers",
    "reward.recycle_after",
    "reward.try_first",
    "reward.memory_bytes",
    "mismatch.budget",
    "data.accept_changed",
    "episodes.turn_deadline_seconds",
    "episodes.deadline_seconds",
    "episodes.num_workers",
    "episodes.episodes_per_worker",
    "teacher.url",
    "teacher.api_key_variable",
    "teacher.concurrency",
    "episodes.blocked_seconds",
    "episodes.recycle_after",
    "episodes.memory_bytes",
    "episodes.endpoint",
}


def test_the_keys_that_may_change():
    for path in all_keys():
        key = ".".join(path)
        expected = any(".".join(path[:length]) in MAY_CHANGE for length in range(1, len(path) + 1))
        assert may_change(Config, key) == expected, key


@pytest.mark.parametrize(
    ("key", "expected"), [("server.options.some_option", True), ("unknown.key", False), ("optimizer.unknown", False)]
)
def test_keys_below_a_section_or_outside_the_schema(key, expected):
    assert may_change(Config, key) == expected
