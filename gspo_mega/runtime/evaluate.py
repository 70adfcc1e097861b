"""`gspo-mega eval`: held-out accuracy of a Hugging Face folder, through servers alone. No engine, one process.

The servers load `model.path` themselves (weight version 0), so there is nothing to publish.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from gspo_mega import beats
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

    def check_stop() -> None:
        reason = stop_request.check()
        if reason is not None:
            raise StopRequested(reason)

    def wait_for_start() -> None:
        beats.beat()
        check_stop()

    server = config.server
    with RolloutSide(config, read_model_spec(config.model.path), Attempt(context.attempt_dir)) as side:
        try:
            side.pool.wait_ready(server.num_servers, server.start_deadline_seconds * (1 + server.max_restarts), wait_for_start)
            beats.enter("eval")
            return asdict(side.evaluate(check_stop))
        except StopRequested as request:
            return {"stopped": str(request)}
