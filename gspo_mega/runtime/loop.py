"""The training loop: one step is one rollout batch, all its mini-batches and one publish.

    take groups of scored trajectories -> advantages -> pack, shard -> old log-probs ->
      [mini-batch: log-probs -> objective -> optimizer step] -> publish -> evaluate -> metrics -> checkpoint

Every rank runs these lines; rank 0 also samples. What stands behind each is `session.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from gspo_mega import kill_points
from gspo_mega.algorithm.objective_settings import objective_settings
from gspo_mega.batches.assemble import assemble, fill_advantages, scored_batch
from gspo_mega.config.command_types import train_config
from gspo_mega.records import RolloutBatch
from gspo_mega.runtime.correction_report import correction_notice
from gspo_mega.runtime.final_table import accuracy_text, run_table
from gspo_mega.runtime.record_rollouts import run_rollouts
from gspo_mega.runtime.reference_policy import reference_path
from gspo_mega.runtime.session import Session, StopRequested, Work
from gspo_mega.runtime.step_report import StepReport, add_to_summary, evaluation_metrics
from gspo_mega.runtime.worker import WorkerContext


def run_train(context: WorkerContext) -> dict[str, Any] | None:
    """Train as the configuration says, from the latest checkpoint of the run or from `model.path`.

    Returns rank 0's result: {"stopped": reason} when a stop was asked for, else the final numbers. Collective.
    """
    config = train_config(context.config)
    num_steps = config.train.num_steps
    with Session(context, num_optimizer_steps=num_steps * config.batch.num_mini_batches) as session:
        state = session.state
        if session.resumed_from is not None:
            session.say(
                f"resumed from {session.resumed_from.name}: step {state.step}, weight version {state.weight_version}"
            )
        if session.reference is not None:
            size = session.reference.num_bytes / 1024**3
            session.say(
                f"reference policy of the KL term: {reference_path(config)}, {size:.2f} GiB of parameters on this rank"
            )
        for line in session.side.data_report() if session.side is not None else ():
            session.say(line)
        stop = start(session)
        if stop is None and config.train.rollouts_only:
            return run_rollouts(session, num_steps)
        while stop is None and state.step < num_steps:
            stop = train_step(session, num_steps)
        if stop is None:
            stop = measure_end(session)
        session.checkpoint()
        session.poll_checkpoint(wait=True)
        if stop is not None:
            session.say(f"stopped after step {state.step} ({stop}); the same command continues")
            return {"stopped": stop, "step": state.step}
        session.export()
        return finish(session)


def start(session: Session) -> str | None:
    """Bring the servers to the engine's weights and measure where the run begins. Returns a reason to stop."""
    stop = session.wait_for_servers()
    if stop is not None:
        return stop
    session.publish()
    if session.state.step == 0 and session.evaluates:
        evaluation = session.evaluate()
        if evaluation is not None:
            failed = f", {evaluation.num_reward_failures} of them not scored" if evaluation.num_reward_failures else ""
            before = session.state.summary["accuracy_before"] = [evaluation.accuracy, evaluation.standard_error]
            session.say(
                f"held-out accuracy before training: {accuracy_text(before)} ({evaluation.num_samples} samples{failed})"
            )
    session.timer.start_step()  # what came before belongs to no step
    return None


def train_step(session: Session, num_steps: int) -> str | None:
    """One rollout batch. Returns the reason when a stop was asked for before it was trained on."""
    config, state, engine = session.config, session.state, session.engine
    batch, work = take(session)
    if work.stop is not None:
        return work.stop
    report = StepReport(session, batch, work.num_positions)

    # With one optimizer step, or the server's log-probs as old ones, there is no old pass to make.
    kill_points.reached("rollout.batch")
    skip_old_pass = config.batch.num_mini_batches == 1 or config.old_log_probs == "rollout"
    with session.phase("old_log_probs"):
        old = []
        for mini_batch in work.mini_batches:
            old.append(None if skip_old_pass else engine.old_pass(mini_batch.micro_batches))
            kill_points.reached("step.old_pass")
    reference: list[list[torch.Tensor] | None] = [None] * len(work.mini_batches)
    if session.reference is not None:
        with session.phase("reference_log_probs"):
            reference = [session.reference.log_probs(m.micro_batches) for m in work.mini_batches]
    settings = objective_settings(config.algorithm, config.objective)
    with session.phase("train"):
        for mini_batch, before, frozen in zip(work.mini_batches, old, reference, strict=True):
            result, passed = engine.train_mini_batch(
                mini_batch.micro_batches, settings, mini_batch.denominator, before, frozen
            )
            session.note_step(result.skipped, result.grad_norm)
            report.add(result, before.report if before is not None else passed, passed)
            kill_points.reached("step.optimizer")

    kill_points.reached("step.trained")
    state.step += 1
    state.weight_version += 1
    report.published = session.publish()
    kill_points.reached("step.published")
    with session.phase("report"):
        report.gather()
    if session.evaluates and (_is_due(config.eval.every_steps, state.step) or state.step == num_steps):
        report.evaluation = session.evaluate()
    # The checkpoint comes after the line of its step, and counts as time of the next.
    report.write()
    kill_points.reached("step.written")
    if _is_due(config.checkpoint.export_every_steps, state.step):
        session.export(session.run_folder.huggingface_step_dir(state.step))
    session.poll_checkpoint()
    if _is_due(config.checkpoint.every_steps, state.step) and state.step < num_steps:
        session.checkpoint()
    return None


def _is_due(every_steps: int, step: int) -> bool:
    return every_steps > 0 and step % every_steps == 0


def measure_end(session: Session) -> str | None:
    """The last evaluation, where a stop or a crash came between the last step and it. Returns a reason to stop."""
    state = session.state
    if not session.evaluates or session.agree(state.summary.get("evaluated_step")) == state.step:
        return None
    evaluation = session.evaluate()
    if evaluation is None:
        return "asked for during the last evaluation"
    metrics = evaluation_metrics(evaluation)
    add_to_summary(state.summary, metrics, 0, state.step)
    if session.writer is not None:
        session.writer.write(state.step, metrics)
    return None


def take(session: Session) -> tuple[RolloutBatch | None, Work]:
    """The step's rollout batch (rank 0) and this rank's share of it."""
    if session.side is None:
        return None, session.receive_work()
    config, step = session.config, session.state.step
    try:
        with session.phase("rollout"):
            batch = session.side.take(step, session.state.weight_version, session.on_wait, session.say)
    except StopRequested as request:
        return None, session.hand_out_stop(str(request))
    with session.phase("assemble"):
        batch = scored_batch(batch)
        fill_advantages(batch, config, step)
        return batch, session.hand_out(assemble(batch, config, session.layout, step))


def finish(session: Session) -> dict[str, Any] | None:
    """Rank 0: show what never acted, then the final table; its numbers are the command's result."""
    if not session.is_lead:
        return None
    if notice := correction_notice(session.config, session.state.summary, at_end=True):
        session.say(notice)
    table, result = run_table(session)
    session.say(table)
    return result
