"""`gspo-mega eval`: held-out accuracy of a Hugging Face folder, through servers alone. No engine, one process.

The servers load `model.path` themselves, and that is what is measured: every start of one is committed as version 0.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from gspo_mega.model.huggingface import read_model_spec
from gspo_mega.run_folder import Attempt
from gspo_mega.runtime.rollouts import RolloutSide
from gspo_mega.runtime.session import StopRequested
from gspo_mega.runtime.stop import StopRequest
from gspo_mega.runtime.worker import WorkerContext


def run_eval(context: WorkerContext) -> dict[str, Any]:
    """Sample and score every held-out prompt once the servers are up; the fields of `Evaluation`, or {"stopped": reason}."""
    config = context.config
    stop_request = StopRequest(context.attempt_dir)
    trusted: set[tuple[str, int]] = set()

    def on_wait() -> None:
        # Each start once: one that was found to talk nonsense since gets no more work.
        new = {(server.server_id, server.generation) for server in side.pool.servers_behind()} - trusted
        if new:
            side.pool.commit(0, new)
            trusted.update(new)
        reason = stop_request.check()
        if reason is not None:
            raise StopRequested(reason)

    server = config.server
    with RolloutSide(config, read_model_spec(config.model.path), Attempt(context.attempt_dir)) as side:
        try:
            side.pool.wait_ready(server.num_servers, server.start_deadline_seconds * (1 + server.max_restarts), on_wait)
            on_wait()
            return asdict(side.evaluate(on_wait))
        except StopRequested as request:
            return {"stopped": str(request)}
