"""When held-out sets are evaluated, in a training run and by `gspo-mega eval`.

`measure_start`, `measure_step` and `measure_end` are called by the training loop: before the first step (step 0 of the
record), after steps by the cadence of each set, and after the last step. They decide what waits for what, with
`eval.blocking` and without it, and are collective. `RankSession` and `async_eval.py` run the evaluation itself.

`run_eval` is the entry point of `gspo-mega eval`: the held-out accuracy of a Hugging Face folder, measured only with
servers, in one process without an engine. The servers load `model.path` themselves. Every start of a server is told
that it holds version 0, and version 0 is committed for it.
"""

from __future__ import annotations

from gspo_mega.train.async_eval import DUE, EvaluationResult
from gspo_mega.train.final_table import accuracy_text
from gspo_mega.train.held_out import Evaluation
from gspo_mega.train.reports import StepReport, add_to_summary, due_sets, evaluation_metrics
from gspo_mega.train.session import RankSession


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
