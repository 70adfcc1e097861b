"""When sets are measured beside training, and where their results go."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gspo_mega.train.async_eval import DUE, EvaluationResult
from gspo_mega.train.held_out import Evaluation
from gspo_mega.train.loop import measure_end, measure_start, measure_step

FOUND = {"a": Evaluation(0.5, 0.1, 0.5, 4, 4, 0.0, 3.0, 0), "b": Evaluation(0.25, 0.1, 0.2, 4, 4, 0.0, 3.0, 0)}


class Beside:
    def __init__(self, due=(), ended=()):
        self.steps_due, self.ended, self.num_polls = list(due), list(ended), 0

    def poll(self):
        self.num_polls += 1

    def take_results(self):
        ended, self.ended = self.ended, []
        return ended


class Session:
    """`begins`: whether servers can be spared. `acts`: what was asked for, in order."""

    def __init__(self, beside=None, step=3, begins=True, stop=None, summary=None):
        self.async_evaluations, self.evaluates_async, self.evaluates = beside, beside is not None, True
        self.eval_sets = tuple(SimpleNamespace(name=name, is_due=lambda step: step % 2 == 1) for name in "ab")
        self.state = SimpleNamespace(step=step, summary={} if summary is None else summary)
        self.config = SimpleNamespace(server=SimpleNamespace(num_servers=4))
        self.ranks = SimpleNamespace(agree=lambda value: value)
        self.begins, self.stop, self.acts, self.said, self.lines = begins, stop, [], [], []
        self.lead = SimpleNamespace(
            writer=SimpleNamespace(write=lambda step, metrics: self.lines.append((step, metrics)))
        )
        self.say = self.said.append
        self.phase = lambda name: contextlib.nullcontext()

    def start_async_evaluation(self, names):
        self.acts.append("begin")
        return self.begins

    def wait_for_async_evaluations(self):
        self.acts.append("settle")
        return self.stop

    def evaluate(self, names):
        self.acts.append("evaluate")
        return {name: FOUND[name] for name in names}


def measured(step):
    return EvaluationResult(step, FOUND, seconds=2.0, num_servers=1, num_begun=1)


def step_of(session, is_last=False):
    report = SimpleNamespace(evaluations={}, late=[])
    measure_step(cast(Any, session), cast(Any, report), is_last)
    return report


def test_a_due_set_is_begun_and_what_has_ended_is_in_the_line_of_now():
    session = Session(Beside(ended=[measured(1)]))
    report = step_of(session)
    assert session.acts == ["begin"] and report.evaluations == {}
    (late,) = report.late
    assert late["eval/accuracy"] == late["eval/set/a/accuracy"] == 0.5 and late["eval/set/b/accuracy"] == 0.25
    assert (late["eval/measured_step"], late["eval/beside/num_steps"], late["eval/beside/seconds"]) == (1, 2, 2.0)
    assert session.said[1].startswith(
        "held-out accuracy on b of step 1: 0.250 +- 0.100 (measured in 2.0 s while training went on"
    )


def test_without_a_server_to_spare_training_waits_and_the_last_step_has_all_servers():
    session = Session(Beside(), begins=False)
    assert step_of(session).evaluations == FOUND and session.acts == ["begin", "evaluate"]
    session = Session(Beside())
    assert step_of(session, is_last=True).evaluations == FOUND and session.acts == ["settle", "evaluate"]
    session = Session(Beside(), step=4)
    assert step_of(session).evaluations == {} and session.acts == []


def test_the_start_is_measured_beside_training_once():
    session = Session(Beside(), step=0)
    measure_start(cast(Any, session))
    assert session.acts == ["begin"] and session.async_evaluations.num_polls == 1
    session = Session(Beside(due=[0]), step=0)
    measure_start(cast(Any, session))
    assert session.acts == [] and session.said == [
        "the weights of step 0 are measured now, because the run ended before it could do so"
    ]
    session = Session(Beside(ended=[measured(0)]), step=2)
    (late,) = step_of(session).late
    assert (late["eval/measured_step"], late["eval/accuracy"]) == (0, 0.5)
    assert session.state.summary == {"accuracy_before": [0.5, 0.1]}


def test_blocking_again_says_what_is_not_measured():
    session = Session(summary={DUE: [{"step": 2, "weight_version": 2, "sets": ["a"]}]})
    measure_start(cast(Any, session))
    assert session.said == ["notice   the weights of step 2 are not measured: eval.blocking was set to true since then"]
    assert DUE not in session.state.summary


@pytest.mark.parametrize("stop", [None, "asked for"])
def test_the_end_waits_for_what_is_due_or_leaves_it_to_the_next_start(stop):
    session = Session(Beside(ended=[measured(2)]), stop=stop)
    assert measure_end(cast(Any, session)) == stop
    assert session.acts == ["settle"] + ["evaluate"] * (stop is None)
    assert [(step, one.get("eval/measured_step")) for step, one in session.lines] == [(3, 2), (3, None)][
        : len(session.acts)
    ]
    assert session.state.summary["evaluated_step"] == (2 if stop else 3)
