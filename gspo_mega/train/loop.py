"""The training loop: one step is one rollout batch, all its mini-batches and one publish.

    take groups of scored trajectories -> advantages -> pack, shard -> old log-probs ->
      [mini-batch: log-probs -> objective -> optimizer step] -> publish -> evaluate -> metrics -> checkpoint

With a critic the advantages come later: old log-probs -> values -> advantages -> [mini-batch: value step] -> policy.

Every rank runs these lines; rank 0 also samples. The parts behind each line are assembled in `session.py`.

Rollouts without training: every step's batch is sampled and written to the journal.

`gspo-mega train CONFIG --rollouts-only`; the same command continues where the journal ends. Another run trains on the
record with `--from-rollouts`.
"""

from __future__ import annotations

from typing import Any

import torch

from gspo_mega.algorithm.terms import objective_settings
from gspo_mega.base.episodes import RolloutBatch
from gspo_mega.config.derived import critic_of, needs_old_log_prob_pass, penalises_kl, policy_steps, train_config
from gspo_mega.config.schema import Critic
from gspo_mega.engine.policy import OldState
from gspo_mega.train.batches import fill_advantages, scored_batch
from gspo_mega.train.context import StopRequested, WorkerContext
from gspo_mega.train.critic_step import CriticStep
from gspo_mega.train.evaluation import measure_end, measure_start, measure_step
from gspo_mega.train.final_table import run_table
from gspo_mega.train.mismatch_report import correction_notice
from gspo_mega.train.reports import StepReport
from gspo_mega.train.scatter import Work
from gspo_mega.train.session import RankSession, reference_path


def run_rollouts(session: RankSession, num_steps: int) -> dict[str, Any] | None:
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


def run_train(context: WorkerContext) -> dict[str, Any] | None:
    """Train as the configuration says, from the latest checkpoint of the run or from `model.path`.

    Returns rank 0's result: {"stopped": reason} when a stop was asked for, else the final numbers. Collective.
    """
    config = train_config(context.config)
    num_steps = config.train.num_steps
    with RankSession(context, num_optimizer_steps=policy_steps(config)) as session:
        state = session.state
        if session.resumed_from is not None:
            session.say(
                f"resumed from {session.resumed_from.name}: step {state.step}, weight version {state.weight_version}"
            )
        if session.reference is not None:
            size = session.reference.num_bytes / 1024**3
            which = "the model without adapters" if size == 0 else reference_path(config)
            what = "KL term" if config.kl.coefficient > 0 else "KL penalty"
            session.say(f"reference policy of the {what}: {which}, {size:.2f} GiB of parameters on this rank")
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
        if stop is not None:
            steps = session.beside.steps_due if session.beside is not None else []
            more = f", and measures the weights of step {', '.join(map(str, steps))}" if steps else ""
            session.say(f"stopped after step {state.step} ({stop}); the same command continues{more}")
            return {"stopped": stop, "step": state.step}
        session.saving.export()
        return finish(session)


def start(session: RankSession) -> str | None:
    """Bring the servers to the engine's weights and measure where the run begins. Returns a reason to stop."""
    stop = session.servers.wait()
    if stop is not None:
        return stop
    session.servers.publish(session.state.weight_version)
    if session.snapshots is not None:
        session.snapshots.keep(session.state.weight_version)
    measure_start(session)
    session.phases.timer.start_step()  # what came before belongs to no step
    return None


def train_step(session: RankSession, num_steps: int) -> str | None:
    """One rollout batch. Returns the reason when a stop was asked for before it was trained on."""
    config, state, engine = session.config, session.state, session.engine
    batch, work = take(session)
    if work.stop is not None:
        return work.stop
    session.gpus.turn("train")
    report = StepReport(session, batch, work.num_positions)

    # While the critic warms up, the policy's passes are made where its advantages need them.
    critic = critic_of(config)
    trains_policy = critic is None or state.step >= critic.warmup_steps
    old: list[OldState | None] = [None] * len(work.mini_batches)
    corrects = needs_old_log_prob_pass(config) and engine.can_correct_in_training(
        [m.micro_batches for m in work.mini_batches]
    )
    if needs_old_log_prob_pass(config) and (trains_policy or penalises_kl(config)):
        passes: list[OldState] = []
        for mini_batch in session.each("old_log_probs", [] if corrects else work.mini_batches):
            passes.append(engine.old_pass(mini_batch.micro_batches))
            if len(passes) == len(work.mini_batches):
                engine.correct(passes)
        old = [None] if corrects else [*passes]
        if session.snapshots is not None:
            measure_staleness(session, work, passes)
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
    with session.phase("report"):
        report.gather()
    measure_step(session, report, is_last=state.step == num_steps)
    # The checkpoint comes after the line of its step, and counts as time of the next.
    with session.phase("write"):
        report.write()
    if _is_due(config.checkpoint.export_every_steps, state.step):
        session.saving.export(session.run_folder.huggingface_step_dir(state.step))
    session.saving.poll()
    if _is_due(config.checkpoint.every_steps, state.step) and state.step < num_steps:
        session.saving.checkpoint()
    return None


def train_policy(
    session: RankSession,
    work: Work,
    old: list[OldState | None],
    reference: list[list[torch.Tensor] | None] | None,
    corrects: bool,
    report: StepReport,
) -> None:
    """The policy's optimizer steps of a rollout batch. Collective."""
    config, engine = session.config, session.engine
    settings = objective_settings(config.algorithm, config.objective)
    frozen_of = reference or [None] * len(work.mini_batches)
    for mini_batch, before, frozen in session.each("train", zip(work.mini_batches, old, frozen_of, strict=True)):
        result, passed = engine.train_mini_batch(
            mini_batch.micro_batches, settings, mini_batch.denominator, before, frozen, corrects
        )
        session.note_step(result.skipped, result.grad_norm)
        report.add(result, before.report if before is not None else passed, passed)


def train_critic(
    session: RankSession,
    settings: Critic,
    work: Work,
    old: list[OldState | None],
    reference: list[list[torch.Tensor] | None],
) -> CriticStep:
    """Give the packs their advantages by the critic's present values, then train it on them. Collective."""
    assert session.critic is not None
    step = CriticStep(session.critic, settings, session.config.advantage.std_ddof)
    with session.phase("critic"):
        step.estimate(work.mini_batches, old, reference)
        for place, mini_batch in enumerate(work.mini_batches):
            result = step.train(place, mini_batch)
            session.note_critic_step(result.skipped, result.grad_norm)
    return step


def measure_staleness(session: RankSession, work: Work, passes: list[OldState]) -> None:
    """Split the gap of the step's tokens with the weights that sampled them. Collective."""
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


def _is_due(every_steps: int, step: int) -> bool:
    return every_steps > 0 and step % every_steps == 0


def take(session: RankSession) -> tuple[RolloutBatch | None, Work]:
    """The step's rollout batch (rank 0) and this rank's share of it."""
    state, lead, preparation = session.state, session.lead, session.preparation
    session.gpus.turn("sample")
    if lead is None or preparation is None:
        with session.phase("rollout"):
            return None, session.ranks.receive_work()
    preparation.expect(state.step, state.weight_version)
    try:
        with session.phase("rollout"):
            batch = lead.source.take(state.step, state.weight_version, session.on_wait)
    except StopRequested as request:
        return None, session.ranks.hand_out_stop(str(request))
    with session.phase("assemble"):
        batch, parcels = preparation.take(batch, state.step, state.weight_version)
        work = session.ranks.send(parcels)
        batch.drop_routes()  # every rank has its own, and the journal has all
        return batch, work


def finish(session: RankSession) -> dict[str, Any] | None:
    """Rank 0: show what never acted, then the final table; its numbers are the command's result."""
    if session.lead is None:
        return None
    if notice := correction_notice(session.config.mismatch, session.state.summary, at_end=True):
        session.say(notice)
    table, result = run_table(session)
    session.say(table)
    return result
