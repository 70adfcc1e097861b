"""The rank of `gspo-mega eval`: held-out accuracy of a Hugging Face folder, measured through a run's own servers.

It computes nothing itself, so it imports neither torch nor Megatron.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from gspo_mega.base import progress
from gspo_mega.base.errors import PublishError
from gspo_mega.base.run_folder import Attempt
from gspo_mega.config.prompt_sources import RESPONSES_FILE
from gspo_mega.config.schema import Server
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.rollout.pool import ServerPool
from gspo_mega.train.context import StopRequest, StopRequested, WorkerContext
from gspo_mega.train.held_out import write_responses
from gspo_mega.train.rollouts import Rollouts

# `run_eval`: the time that a server has to take its weight version.
_TELL_SECONDS = 30.0


def run_eval(context: WorkerContext) -> dict[str, Any]:
    """Sample and score every held-out prompt once the servers are up, and write every response to the attempt's
    responses file.

    Returns the fields of the first set's `Evaluation` and, as `sets`, those of every set by name; or
    {"stopped": reason}.
    """
    config = context.config
    with Rollouts(config, read_model_spec(config.model.path), Attempt(context.attempt_dir)) as rollouts:
        for line in [*rollouts.describe_ends(), *rollouts.held_out.report()]:
            context.console(line)
        try:
            on_wait = wait_for_servers(rollouts.pool, config.server, StopRequest(context.attempt_dir))
            progress.enter("eval")
            attempt = Attempt(context.attempt_dir)
            with (attempt.path / RESPONSES_FILE).open("w", encoding="utf-8") as file:
                found = rollouts.evaluate(on_wait, keep=lambda asked, groups: write_responses(file, asked, groups))
            first = next(iter(found.values()))
            return {**asdict(first), "sets": {name: asdict(one) for name, one in found.items()}}
        except StopRequested as request:
            return {"stopped": str(request)}


def wait_for_servers(pool: ServerPool, server: Server, stop_request: StopRequest) -> Callable[[], None]:
    """Wait until all servers are up with the weights of `model.path`, which no publish replaces.

    Returns a function to call during later waits. It does the same for servers that start again, and raises
    StopRequested if a stop was requested.
    """
    trusted: set[tuple[str, int]] = set()

    def on_wait() -> None:
        for behind in pool.servers_behind():
            start = (behind.server_id, behind.generation)
            # Each start is trusted once: a server that has answered nonsense since then gets no more work.
            if start not in trusted:
                with contextlib.suppress(PublishError):  # the server just went down; it is found again once it is back
                    behind.set_weight_version(0, deadline_seconds=_TELL_SECONDS)
                    pool.commit(0, [start])
                    trusted.add(start)
        stop_request.raise_if_made()

    def wait_for_start() -> None:
        progress.beat()
        on_wait()

    pool.wait_ready(server.num_servers, server.start_deadline_seconds * (1 + server.max_restarts), wait_for_start)
    on_wait()
    return on_wait
