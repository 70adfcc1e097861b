"""Rollouts without training: every step's batch is sampled and written to the journal.

`gspo-mega train CONFIG --rollouts-only`; the same command continues where the journal ends. Another run trains on the
record with `--from-rollouts`.
"""

from __future__ import annotations

from typing import Any

from gspo_mega.train.assemble import fill_advantages, scored_batch
from gspo_mega.train.session import Session
from gspo_mega.train.step_report import StepReport
from gspo_mega.train.stop import StopRequested


def run_rollouts(session: Session, num_steps: int) -> dict[str, Any] | None:
    """Sample the batches of `num_steps` steps from `model.path`. Returns rank 0's result as `run_train`. Collective."""
    state = session.state
    stop = None
    session.gpus.turn("sample")
    while stop is None and state.step < num_steps:
        batch = None
        if session.lead is not None:
            try:
                with session.phase("rollout"):
                    batch = session.lead.source.take(state.step, state.weight_version, session.on_wait)
                batch = scored_batch(batch, session.config)
                fill_advantages(batch, session.config, state.step)
            except StopRequested as request:
                stop = str(request)
        stop = session.ranks.agree(stop)
        if stop is None:
            state.step += 1
            StepReport(session, batch, 0).write()
    if stop is not None:
        session.say(f"stopped after step {state.step} ({stop}); the same command continues")
        return {"stopped": stop, "step": state.step}
    session.say(f"rollouts of {state.step} steps are in {session.run_folder.journal_dir}")
    return {"step": state.step, "journal": str(session.run_folder.journal_dir)}
