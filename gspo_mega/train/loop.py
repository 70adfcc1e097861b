"""The training loop. One step is one rollout batch, all its mini-batches and one publish:

    take scored groups -> advantages -> pack and shard -> old log-probs ->
      [mini-batch: log-probs -> objective -> optimizer step] -> publish -> evaluate -> metrics -> checkpoint

With a critic the advantages come later: old log-probs -> values -> advantages -> [mini-batch: value step], and then the
policy's mini-batches.

`measure_start`, `measure_step` and `measure_end` decide when held-out sets are evaluated, and what waits for what, with
`eval.blocking` and without it: before the first step (step 0 of the record), after steps by the cadence of each set,
and after the last step. `RankSession` and `async_eval.py` run the evaluation itself.

Every rank runs this code. Only rank 0 samples, so `session.lead` is None on the other ranks. `session.py` assembles the
parts that the loop calls.

`run_rollouts` at the end is the loop without training (`gspo-mega train CONFIG --rollouts-only`): it samples the batch
of every step and writes it to the journal. The same command continues where the journal ends, and another run trains on
the record with `--from-rollouts`.
"""

from __future__ import annotations

from typing import Any

import torch

from gspo_mega.algorithm.terms import objective_settings
from gspo_mega.base.episodes import RolloutBatch
from gspo_mega.config.derived import (
    critic_of,
    least_of_group,
    needs_old_log_prob_pass,
    penalises_kl,
    policy_steps,
    train_config,
)
from gspo_mega.config.schema import Critic
from gspo_mega.engine.losses import TeacherScores
from gspo_mega.engine.policy import OldState
from gspo_mega.train.async_eval import DUE, EvaluationResult
from gspo_mega.train.batches import fill_advantages, scored_batch
from gspo_mega.train.context import StopRequested, WorkerContext
from gspo_mega.train.critic_step import CriticStep
from gspo_mega.train.final_table import accuracy_text, run_table
from gspo_mega.train.held_out import Evaluation
from gspo_mega.train.mismatch_report import correction_notice
from gspo_mega.train.reports import StepReport, add_to_summary, due_sets, evaluation_metrics
from gspo_mega.train.scatter import Work
from gspo_mega.train.session import RankSession, reference_path


def run_train(context: WorkerContext) -> dict[str, Any] | None:
    """Train as the configuration says, from the latest checkpoint of the run or from `model.path`.

    Returns rank 0's result, None on other ranks: the final numbers, or if a stop was requested {"stopped": reason,
    "step": step, "to_measure": steps whose weights are yet to be evaluated}, of which the launcher makes the closing
    line. Collective.
    """
    config = train_config(context.config)
    num_steps = config.train.num_steps
    with RankSession(context, num_optimizer_steps=policy_steps(config)) as session:
        state = session.state
        if session.resumed_from is not None and not session.is_from_copies:
            session.say(
                f"resumed from {session.resumed_from.name}: step {state.step}, weight version {state.weight_version}"
            )
        if session.reference is not None:
            size = session.reference.num_bytes / 1024**3
            which = "the model without adapters" if size == 0 else reference_path(config.kl, config.model)
            what = "KL term" if config.kl.coefficient > 0 else "KL penalty"
            session.say(f"reference policy of the {what}: {which}, {size:.2f} GiB of parameters on this rank")
        for folder, model in session.teachers.models.items() if session.teachers is not None else ():
            session.say(f"teacher: {folder}, {model.num_bytes / 1024**3:.2f} GiB of parameters on this rank")
        for line in session.lead.source.describe() if session.lead is not None else ():
            session.say(line)
        stop = start(session)
        if stop is None and config.train.rollouts_only:
            return run_rollouts(session, num_steps)
        while stop is None and state.step < num_steps:
            with session.profiling.step(state.step + 1):
                stop = train_step(session, num_steps)
        if stop is None:
            stop = measure_end(session)
        session.saving.checkpoint()
        session.saving.poll(wait=True)
        session.saving.end_copies()
        if stop is not None:
            steps = session.async_evaluations.steps_due if session.async_evaluations is not None else []
            return {"stopped": stop, "step": state.step, "to_measure": list(steps)}
        session.saving.export()
        return finish(session)


def start(session: RankSession) -> str | None:
    """Bring the servers to the engine's weights and evaluate the weights that the run starts from.

    Returns the reason to stop if a stop was requested while the servers started, else None. Collective.
    """
    stop = session.servers.wait()
    if stop is not None:
        return stop
    session.servers.publish(session.state.weight_version)
    if session.snapshots is not None:
        session.snapshots.keep(session.state.weight_version)
    measure_start(session)
    session.phases.timer.start_step()  # the time until here belongs to no step
    return None


def train_step(session: RankSession, num_steps: int) -> str | None:
    """Train on one rollout batch and publish the new weights.

    Returns the reason to stop if a stop was requested before the batch could be trained on, else None. Collective.
    """
    config, state, engine = session.config, session.state, session.engine
    batch, work = next_batch(session)
    if work.stop is not None:
        return work.stop
    session.gpus.switch_to("train")
    report = StepReport(session, batch, work.num_positions, work.sharing)

    # While the critic warms up, the policy is not trained, and its passes run only if the advantages need them.
    critic = critic_of(config.algorithm, config.critic)
    trains_policy = critic is None or state.step >= critic.warmup_steps
    old: list[OldState | None] = [None] * len(work.mini_batches)
    corrects = needs_old_log_prob_pass(config) and engine.can_correct_in_training(
        [m.micro_batches for m in work.mini_batches]
    )
    if needs_old_log_prob_pass(config) and (trains_policy or penalises_kl(config.algorithm, config.critic)):
        old = old_log_probs(session, work, corrects)
    reference: list[list[torch.Tensor] | None] = [None] * len(work.mini_batches)
    if session.reference is not None:
        with session.phase("reference_log_probs"):
            reference = [session.reference.log_probs(m.micro_batches) for m in work.mini_batches]
    if critic is not None:
        report.critic = train_critic(session, critic, work, old, reference)
    if trains_policy:
        train_policy(session, work, old, reference if config.kl.coefficient > 0 else None, corrects, report)

    state.step += 1
    state.weight_version += 1
    if session.snapshots is not None:
        session.snapshots.keep(state.weight_version)
    report.published = session.servers.publish(state.weight_version)
    session.saving.finish_copy()
    with session.phase("report"):
        report.gather()
    measure_step(session, report, is_last=state.step == num_steps)
    # The step's line is written before its checkpoint, so the checkpoint's time counts for the next step.
    with session.phase("write"):
        report.write()
    if _is_due(config.checkpoint.export_every_steps, state.step):
        session.saving.export(session.run_folder.huggingface_step_dir(state.step))
    session.saving.poll()
    session.saving.keep_copy()
    if _is_due(config.checkpoint.every_steps, state.step) and state.step < num_steps:
        session.saving.checkpoint()
    return None


def _is_due(every_steps: int, step: int) -> bool:
    return every_steps > 0 and step % every_steps == 0


def next_batch(session: RankSession) -> tuple[RolloutBatch | None, Work]:
    """Sample the step's rollout batch and distribute it. Returns the batch (None on ranks other than 0) and this rank's
    share of it, or the reason to stop in `Work.stop`. Collective.
    """
    state, lead, prefetch = session.state, session.lead, session.prefetch
    session.gpus.switch_to("sample")
    if lead is None or prefetch is None:
        with session.phase("rollout"):
            return None, session.ranks.receive_work()
    prefetch.expect(state.step, state.weight_version)
    try:
        with session.phase("rollout"):
            batch = lead.source.take(state.step, state.weight_version, session.on_wait)
    except StopRequested as request:
        return None, session.ranks.hand_out_stop(str(request))
    with session.phase("assemble"):
        batch, parcels = prefetch.take(batch, state.step, state.weight_version)
        work = session.ranks.send(parcels)
        batch.drop_routes()  # every rank has the routes it needs, and the journal has all of them
        return batch, work


def old_log_probs(session: RankSession, work: Work, corrects: bool) -> list[OldState | None]:
    """The log-probs of the whole rollout batch under the weights at the start of the step, one item per mini-batch.
    Collective.

    `corrects`: the training pass decides the mismatch correction itself, so no old pass is made and the items are None.
    """
    passes: list[OldState] = []
    for mini_batch in session.each_in_phase("old_log_probs", [] if corrects else work.mini_batches):
        passes.append(session.engine.old_pass(mini_batch.micro_batches))
        if len(passes) == len(work.mini_batches):
            session.engine.correct(passes)
    if session.snapshots is not None:
        measure_staleness(session, work, passes)
    return [None] * len(work.mini_batches) if corrects else [*passes]


def measure_staleness(session: RankSession, work: Work, passes: list[OldState]) -> None:
    """Split the mismatch of each sequence into the part of stale weights and the rest, by scoring the tokens with the
    weights that sampled them. Adds both parts to the reports of `passes`. Collective.
    """
    assert session.snapshots is not None
    missing = session.snapshots.missing([one for mini_batch in work.mini_batches for one in mini_batch.micro_batches])
    if missing:
        versions = ", ".join(map(str, missing))
        session.say(
            f"notice   diagnostics.exact_staleness: no weights of version {versions} are kept since this start of the"
            f" run; step {session.state.step + 1} does not split its gap"
        )
        return
    with session.phase("old_log_probs"):
        mini_batches = [mini_batch.micro_batches for mini_batch in work.mini_batches]
        session.snapshots.measure(mini_batches, passes, session.state.weight_version)


def train_critic(
    session: RankSession,
    settings: Critic,
    work: Work,
    old: list[OldState | None],
    reference: list[list[torch.Tensor] | None],
) -> CriticStep:
    """Compute the advantages with the critic's present values, write them into the packs, and train the critic on the
    same packs. Returns the step's results for the report. Collective.
    """
    assert session.critic is not None
    step = CriticStep(session.critic, settings, session.config.advantage.std_ddof)
    with session.phase("critic"):
        step.estimate(work.mini_batches, old, reference)
        for place, mini_batch in enumerate(work.mini_batches):
            result = step.train(place, mini_batch)
            session.count_critic_step(result.skipped, result.grad_norm)
    return step


def train_policy(
    session: RankSession,
    work: Work,
    old: list[OldState | None],
    reference: list[list[torch.Tensor] | None] | None,
    corrects: bool,
    report: StepReport,
) -> None:
    """Make the policy's optimizer steps of a rollout batch, one per mini-batch, and add each to `report`. Collective.

    `old`, `reference`: log-probs per mini-batch; `reference` is None without a KL term in the objective.
    """
    config, engine = session.config, session.engine
    settings = objective_settings(config.algorithm, config.objective)
    frozen_of = reference or [None] * len(work.mini_batches)
    scores: list[list[TeacherScores] | None] = [None] * len(work.mini_batches)
    teacher = session.teachers
    if teacher is not None and not teacher.keeps_states:
        with session.phase("teacher"):
            scores = [teacher.score(m.micro_batches) for m in work.mini_batches]
    items = zip(work.mini_batches, old, frozen_of, scores, strict=True)
    for mini_batch, before, frozen, taught in session.each_in_phase("train", items):
        if teacher is not None and teacher.keeps_states:  # which are many: those of one mini-batch at a time
            taught = teacher.score(mini_batch.micro_batches)
        result, passed = engine.train_mini_batch(
            mini_batch.micro_batches, settings, mini_batch.denominator, before, frozen, corrects, taught
        )
        session.count_step(result.skipped, result.grad_norm)
        report.add(result, before.report if before is not None else passed, passed)


def finish(session: RankSession) -> dict[str, Any] | None:
    """Rank 0: show the final table, and a notice if the mismatch correction never acted. Returns the numbers of the
    table, which are the command's result; None on other ranks.
    """
    if session.lead is None:
        return None
    if notice := correction_notice(session.config.mismatch, session.state.summary, at_end=True):
        session.say(notice)
    # Since the last step ended: no step has the time of the checkpoint and the export that follow it.
    after = session.phases.timer.finish_step()
    table, result = run_table(session, after.get("time/checkpoint_seconds", 0.0))
    session.say(table)
    return result


def run_rollouts(session: RankSession, num_steps: int) -> dict[str, Any] | None:
    """Sample the batches of `num_steps` steps with the weights of `model.path`, without training.

    Returns {"stopped": reason, "step": step} if a stop was requested, else {"step": step, "journal": its folder}.
    Collective.
    """
    state = session.state
    stop = None
    session.gpus.switch_to("sample")
    while stop is None and state.step < num_steps:
        batch = None
        if session.lead is not None:
            try:
                with session.phase("rollout"):
                    batch = session.lead.source.take(state.step, state.weight_version, session.on_wait)
                batch = scored_batch(batch, least_of_group(session.config), session.config.objective.scope)
                fill_advantages(batch, session.config, state.step)
            except StopRequested as request:
                stop = str(request)
        stop = session.ranks.agree(stop)
        if stop is None:
            state.step += 1
            StepReport(session, batch, 0).write()
    if stop is not None:
        return {"stopped": stop, "step": state.step}
    session.say(f"rollouts of {state.step} steps are in {session.run_folder.journal_dir}")
    return {"step": state.step, "journal": str(session.run_folder.journal_dir)}


def measure_start(session: RankSession) -> None:
    """Evaluate the weights that the run starts from, and begin what an earlier start of the run left due.
    Collective.
    """
    if session.async_evaluations is not None:
        for step in session.async_evaluations.steps_due:
            session.say(f"the weights of step {step} are measured now, because the run ended before it could do so")
        session.async_evaluations.poll()
    elif due := session.state.summary.pop(DUE, []):
        steps = ", ".join(str(one["step"]) for one in due)
        session.say(f"notice   the weights of step {steps} are not measured: eval.blocking was set to true since then")
    if session.state.step > 0 or not session.evaluates:
        return
    names = [one.name for one in session.eval_sets]
    is_due = session.async_evaluations is not None and 0 in session.async_evaluations.steps_due
    if session.evaluates_async and (session.ranks.agree(is_due) or session.start_async_evaluation(names)):
        return
    found = session.evaluate(names) or {}
    if found and session.lead is not None:
        session.lead.writer.write(0, evaluation_metrics(found, names[0]))
    for name, evaluation in found.items():
        failed = f", {evaluation.num_reward_failures} of them not scored" if evaluation.num_reward_failures else ""
        before = _accuracy(evaluation)
        if name == names[0]:
            session.state.summary["accuracy_before"] = before
        whose = f" on {name}" if len(names) > 1 else ""
        session.say(
            f"held-out accuracy{whose} before training: {accuracy_text(before)} ({evaluation.num_samples}"
            f" samples{failed})"
        )


def measure_step(session: RankSession, report: StepReport, is_last: bool) -> None:
    """Evaluate the sets that are due after a step. Those of the last step are measured on all servers, after all
    earlier evaluations have ended. Collective.
    """
    due = due_sets(session, session.state.step, is_last)
    if session.evaluates_async:
        if is_last:
            session.wait_for_async_evaluations()  # after a stop request `measure_end` does this in the next start
        report.late = _finished_evaluations(session)
        if due and not is_last and session.start_async_evaluation(due):
            return
    if due:
        report.evaluations = session.evaluate(due) or {}


def measure_end(session: RankSession) -> str | None:
    """Evaluate what is still due if a stop or a crash came between the last step and its evaluation.

    Returns the reason to stop if a stop was requested, else None. Collective.
    """
    state = session.state
    stop = session.wait_for_async_evaluations() if session.evaluates_async else None
    for metrics in _finished_evaluations(session):
        _write_metrics(session, metrics)
    if stop is not None:
        return stop
    if not session.evaluates or session.ranks.agree(state.summary.get("evaluated_step")) == state.step:
        return None
    found = session.evaluate([one.name for one in session.eval_sets])
    if found is None:
        return "asked for during the last evaluation"
    _write_metrics(session, evaluation_metrics(found, session.eval_sets[0].name))
    return None


def _write_metrics(session: RankSession, metrics: dict[str, float]) -> None:
    add_to_summary(session.state.summary, metrics, 0, session.state.step)
    if session.lead is not None:
        session.lead.writer.write(session.state.step, metrics)


def _finished_evaluations(session: RankSession) -> list[dict[str, float]]:
    """Rank 0: show the asynchronous evaluations that have ended, and return their metrics, one dictionary per evaluated
    step. Empty on other ranks.
    """
    if session.async_evaluations is None:
        return []
    session.async_evaluations.poll()
    names = [one.name for one in session.eval_sets]
    lines = []
    for measured in session.async_evaluations.take_results():
        when = "before training" if measured.step == 0 else f"of step {measured.step}"
        for name, evaluation in measured.found.items():
            whose = f" on {name}" if len(names) > 1 else ""
            session.say(
                f"held-out accuracy{whose} {when}: {accuracy_text(_accuracy(evaluation))} (measured in"
                f" {measured.seconds:.1f} s while training went on, on {measured.num_servers} of"
                f" {session.config.server.num_servers} servers)"
            )
        lines.append(evaluation_metrics(measured.found, names[0]) | _timing_metrics(measured, session.state.step))
        if measured.step == 0 and names[0] in measured.found:
            session.state.summary["accuracy_before"] = _accuracy(measured.found[names[0]])
    return lines


def _accuracy(evaluation: Evaluation) -> list[float]:
    return [evaluation.accuracy, evaluation.standard_error]


def _timing_metrics(measured: EvaluationResult, step: int) -> dict[str, float]:
    return {
        "eval/measured_step": measured.step,
        "eval/beside/seconds": measured.seconds,
        "eval/beside/num_servers": measured.num_servers,
        "eval/beside/num_begun": measured.num_begun,
        "eval/beside/num_steps": step - measured.step,
    }
