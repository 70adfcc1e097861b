"""A step's metrics from the parts of two ranks and two mini-batches, and what is kept of them for the final table."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from run_configs import make_config

from gspo_mega.algorithm.correction import MAXIMUM_NAMES, SUM_NAMES
from gspo_mega.algorithm.diagnostics import POLICY_SUMS
from gspo_mega.algorithm.losses import KL_SUMS
from gspo_mega.base.episodes import Group, RolloutBatch, one_turn_row
from gspo_mega.base.records import Prompt
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.checkpoint.load import TrainState
from gspo_mega.engine.optimizer import StepResult
from gspo_mega.engine.policy import PassReport
from gspo_mega.metrics.catalogue import find_metric
from gspo_mega.train.final_table import run_table
from gspo_mega.train.held_out import Evaluation
from gspo_mega.train.reports import StepReport, add_to_summary, cached_contexts, due_sets
from gspo_mega.train.scatter import Sharing

# Of four responses: tokens, sum of d = trainer - server, of d^2, of the policy's entropy, and log s in the training pass.
LENGTHS, D, SQUARES = [1, 2, 3, 4], [0.1, 0.0, -0.3, 0.4], [0.01, 0.02, 0.03, 0.04]
ENTROPIES, LOG_S = [0.5, 1.5, 2.0, 4.0], [0.0, 0.1, -0.1, 0.2]
# The third response was dropped: a token of it was vetoed.
DEVIATIONS = [0.1, -0.2, -7.5, 0.3]


def batch_of() -> RolloutBatch:
    groups = []
    for number in range(2):
        prompt, rows = Prompt(f"p:{number}", "p", (1, 2, 3), "text"), []
        for sample in range(2):
            row = 2 * number + sample
            length = LENGTHS[row]
            rows.append(
                one_turn_row(
                    f"r{row}", number, prompt, [5] * length, [1] * length, [-1.0] * length, [3] * length,
                    "length" if row == 3 else "stop", reward=float(row), reward_parts={"f": row / 2},
                )
            )  # fmt: skip
            rows[-1].advantage = (-1.0, 1.0)[sample]
        groups.append(Group.from_rows(number, prompt, rows))
    return RolloutBatch(4, groups, {"num_generated_tokens": 40.0}, {"generate": 8.0, "score": 1.0})


def named(names, **values) -> np.ndarray:
    return np.array([float(values.get(name, 0.0)) for name in names])


def passes(row: int, objective: float) -> tuple[PassReport, PassReport]:
    """A rank's two reports on a mini-batch: it holds one response."""
    index, length = np.array([row]), LENGTHS[row]
    sums = named(SUM_NAMES, tokens=length, log_ratio=D[row], log_ratio_squared=SQUARES[row], icepop_kept=length)
    columns = {"mismatch_sums": sums[None], "mismatch_maxima": np.full((1, len(MAXIMUM_NAMES)), 0.1 * row)}
    old = PassReport(index, columns | {"entropy_sum": np.array([ENTROPIES[row]])})
    clipped = float(row == 3)
    totals = {
        "policy_sums": named(
            POLICY_SUMS,
            objective=objective,
            num_tokens=length,
            num_sequences=1,
            num_kept_sequences=1,
            clipped_high_sequences=clipped,
            clipped_high_tokens=clipped * length,
            positive_sequences=row % 2,
            negative_sequences=1 - row % 2,
            positive_clipped_sequences=clipped,
        ),
        "kl_sums": named(KL_SUMS, k=0.2 * length + 0.1, num_tokens=length),
    }
    train = {
        "log_s": LOG_S[row],
        "correction_weight": float(row != 2),
        "correction_deviation": DEVIATIONS[row],
        "correction_vetoes": 2.0 * (row == 2),
        "correction_centre": 0.02,
    }
    return old, PassReport(index, {name: np.array([value]) for name, value in train.items()}, totals)


class Session(SimpleNamespace):
    """What a report asks of rank 0's session. `other`: the reports of rank 1."""

    def __init__(self, tmp_path, other, **sections) -> None:
        lines: list[tuple[int, dict[str, float]]] = []
        kept: list[tuple[int, object]] = []
        source = SimpleNamespace(
            state_dict=lambda: {
                "sources": {
                    "a": {"epoch": 1, "position": 5, "num_rows": 10},
                    "b": {"epoch": 0, "position": 1, "num_rows": 4},
                }
            }
        )
        super().__init__(
            config=make_config(train=dict(num_steps=9), **sections),
            state=TrainState(step=5, weight_version=3, num_optimizer_steps=10),
            exchange=SimpleNamespace(gather=lambda own: [own, other]),
            phases=SimpleNamespace(
                timer=SimpleNamespace(finish_step=lambda: {"time/step_seconds": 4.0, "time/train_seconds": 3.0})
            ),
            saving=SimpleNamespace(take_seconds=dict),
            servers=SimpleNamespace(metrics=dict),
            layout=SimpleNamespace(world_size=2),
            lead=SimpleNamespace(
                num_standby_ranks=None,
                keeps_servers=False,
                check_newest_attempt=lambda: None,
                source=source,
                num_restarts=1,
                shown_responses=["  1.000  a question", "           -> its answer"],
                keep_samples=lambda step, batch: kept.append((step, batch)),
                writer=SimpleNamespace(write=lambda step, metrics: lines.append((step, dict(metrics)))),
            ),
            prefetch=None,
            run_folder=RunFolder(tmp_path),
            said=[],
            lines=lines,
            kept=kept,
        )
        self.engine = SimpleNamespace(config=self.config)
        self.say = self.said.append


RESULTS = [StepResult(3.0, 2e-5, False), StepResult(1.0, 1e-5, True)]


def written(tmp_path, late=(), sharing=None, **sections) -> tuple[Session, dict[str, float]]:
    """The line of a step. Rank 0 has rows 0 and 2, rank 1 has 1 and 3; the second mini-batch is rows 2 and 3."""
    own = [passes(0, 0.25), passes(2, 0.5)]
    other = [dict(old=vars(old), train=vars(train)) for old, train in (passes(1, 0.75), passes(3, -0.3))]
    session = Session(tmp_path, other, kl=dict(coefficient=0.1), **sections)
    session.config = session.config.model_copy()
    report = StepReport(session, batch_of(), num_positions=32, sharing=sharing)
    for result, (old, train) in zip(RESULTS, own, strict=True):
        report.add(result, old, train)
    report.gather()
    report.late = [dict(one) for one in late]
    report.write()
    return session, session.lines[-1][1]


def test_sums_of_all_ranks_become_the_steps_metrics(tmp_path):
    """J of a mini-batch is the sum of its ranks' parts, 1 and .2, and a step's is the mean of its mini-batches'."""
    session, found = written(tmp_path)
    assert all(find_metric(name) for name in found) and session.lines[-1][0] == 5
    wanted = {
        "policy/objective": 0.6,
        "policy/mini_batch/0/objective": 1.0,
        "policy/mini_batch/1/objective": 0.2,
        "policy/num_tokens": 10.0,
        "policy/num_sequences": 4.0,
        "policy/clip_fraction": 1 / 4,
        "policy/mini_batch/0/clip_fraction": 0.0,
        "policy/mini_batch/1/clip_fraction": 1 / 2,
        "policy/clip_fraction_positive": 1 / 2,
        "policy/token_clip_fraction": 4 / 10,
        "policy/kl_reference": (0.2 * 10 + 4 * 0.1) / 10,
        "policy/entropy": 8.0 / 10,
        "policy/ess": sum(math.exp(s) for s in LOG_S) ** 2 / (4 * sum(math.exp(2 * s) for s in LOG_S)),
        "policy/log_ratio/update/mean": 0.05,
        "policy/log_ratio/gap/mean": (0.1 + 0.0 - 0.1 + 0.1) / 4,
        "policy/log_ratio/mean": 0.05 + 0.025,
        "mismatch/k1": -0.2 / 10,
        "mismatch/k2": 0.1 / 10 / 2,
        "mismatch/abs_log_ratio_max": 0.3,
        "mismatch/acted_fraction": 1 / 4,
        "mismatch/weight_mean": 1.0,
        "mismatch/centre": 0.02,
        "mismatch/deviation_abs_max": 7.5,
        "mismatch/num_token_vetoes": 2,
        "mismatch/num_vetoed_sequences": 1,
        "optimizer/grad_norm": 2.0,
        "optimizer/grad_norm_max": 3.0,
        "optimizer/lr": 1e-5,
        "optimizer/num_optimizer_steps": 10,
        "optimizer/num_skipped": 1,
        "reward/sd": math.sqrt(5 / 4),
        "reward/function/f": 0.75,
        "response/length_mean": 2.5,
        "response/length_max": 4,
        "response/truncated_fraction": 1 / 4,
        "response/length_positive_mean": 3.0,
        "response/length_negative_mean": 2.0,
        "groups/num_groups": 2,
        "groups/constant_fraction": 0.0,
        "speed/generated_tokens_per_second": 5.0,
        "speed/tokens_per_second": 22 / 4,
        "speed/tokens_per_second_per_rank": 22 / 4 / 2,
        "speed/packing_efficiency": 22 / 32,
        "rollout/staleness_max": 0,
        "run/num_restarts": 1,
        "data/epoch": (1.5 + 0.25) / 2,
        "time/rollout/generate_seconds": 8.0,
    }
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-12, abs=1e-15)


def test_positions_that_shared_prefixes_saved_are_counted(tmp_path):
    """The batch's rows have 22 tokens; of 37 positions, 5 were not computed."""
    _, found = written(tmp_path, sharing=Sharing(5, 2), batch=dict(share_prefixes="prompts"))
    assert found["speed/shared_prefix_fraction"] == pytest.approx(5 / 37)
    assert found["speed/packing_efficiency"] == pytest.approx(17 / 32)
    assert found["speed/num_repeated_prefixes"] == 2
    _, found = written(tmp_path)
    assert "speed/shared_prefix_fraction" not in found and "speed/num_repeated_prefixes" not in found


def test_what_servers_read_from_their_caches_is_a_share_of_each_kind_of_context():
    counts = {"num_prompt_tokens_read": 40.0, "num_prompt_tokens_cached": 30.0, "num_history_tokens_read": 50.0}
    assert cached_contexts(counts) == {
        "rollout/num_prompt_tokens_cached": [30.0],
        "rollout/cached_prompt_fraction": [0.75],
        "rollout/num_history_tokens_cached": [0],
        "rollout/cached_history_fraction": [0.0],
    }
    assert cached_contexts({"num_turns": 3.0}) == {}, "a recording of an earlier release"


def test_the_servers_log_probs_as_the_old_ones_cannot_be_told_apart(tmp_path):
    _, found = written(tmp_path, old_log_probs="rollout")
    assert found["policy/log_ratio/mean"] == pytest.approx(0.05)
    assert not any(name.startswith(("policy/log_ratio/update", "policy/log_ratio/gap")) for name in found)
    # Without a pass of its own the gap is measured in the first mini-batch alone: rows 0 and 1.
    assert found["mismatch/k1"] == pytest.approx(-0.1 / 3)


def evaluation(step: int, accuracy: float) -> dict[str, float]:
    return {"eval/measured_step": step, "eval/accuracy": accuracy, "eval/accuracy_standard_error": 0.01}


def test_evaluations_that_ended_late_have_lines_of_their_own_but_one(tmp_path):
    """Of three, the newest is in the step's line, and the others are lines before it; the summary has the newest."""
    session, found = written(tmp_path, late=[evaluation(1, 0.1), evaluation(2, 0.2), evaluation(3, 0.3)])
    assert found["eval/accuracy"] == 0.3
    assert [(step, line["eval/accuracy"]) for step, line in session.lines] == [(4, 0.1), (4, 0.2), (5, 0.3)]
    summary = session.state.summary
    assert summary["evaluated_step"] == 3 and summary["accuracy_after"] == [0.3, 0.01]


def test_a_late_evaluation_counts_where_the_steps_own_is_of_another_set(tmp_path):
    """The first set was measured after step 3, beside training; after step 5 the second one is."""
    other = [dict(old=vars(old), train=vars(train)) for old, train in (passes(1, 0.0), passes(3, 0.0))]
    session = Session(tmp_path, other, kl=dict(coefficient=0.1))
    session.eval_sets = [SimpleNamespace(name="a"), SimpleNamespace(name="b")]
    report = StepReport(session, batch_of(), num_positions=0)
    report.late = [evaluation(3, 0.3)]
    report.evaluations = {"b": Evaluation(0.9, 0.02, 0.5, 4, 4, 0.0, 3.0, 0)}
    report.write()
    (_, late), (_, own) = session.lines
    assert late["eval/accuracy"] == 0.3 and "eval/accuracy" not in own and own["eval/set/b/accuracy"] == 0.9
    assert session.state.summary["evaluated_step"] == 3 and session.state.summary["accuracy_after"] == [0.3, 0.01]


def test_sets_are_due_by_their_own_cadence_and_all_after_the_last_step():
    sets = [SimpleNamespace(name="a", is_due=lambda step: step % 2 == 0), SimpleNamespace(name="b", is_due=lambda _: 0)]
    session = SimpleNamespace(eval_sets=sets)
    assert [due_sets(session, step, is_last=False) for step in (3, 4)] == [[], ["a"]]
    assert due_sets(session, 3, is_last=True) == ["a", "b"]


def test_the_summary_adds_up_over_steps():
    summary: dict = {}
    first = {
        "time/step_seconds": 2.0, "time/train_seconds": 1.0, "time/train/forward_seconds": 9.0,
        "policy/clip_fraction": 0.2, "mismatch/k3": 1e-4, "mismatch/abs_log_ratio_max": 0.5,
    }  # fmt: skip
    add_to_summary(summary, first, 100, 1)
    second = {"time/step_seconds": 3.0, "policy/clip_fraction": 0.4, "mismatch/abs_log_ratio_max": 0.25}
    add_to_summary(summary, second, 50, 2)
    add_to_summary(summary, {"time/step_seconds": 5.0}, 25, 3)
    assert summary["totals"] == pytest.approx(
        {
            "time/step_seconds": 10.0,
            "time/train_seconds": 1.0,
            "num_tokens": 175,
            "policy/clip_fraction": 0.6,
            "policy/clip_fraction/count": 2,
            "mismatch/k3": 1e-4,
            "mismatch/k3/count": 1,
            "mismatch/abs_log_ratio_max": 0.5,
        }
    )
    add_to_summary(summary, {"eval/accuracy": 0.5, "eval/accuracy_standard_error": 0.1}, 0, 7)
    assert summary["evaluated_step"] == 7 and summary["accuracy_after"] == [0.5, 0.1]


def test_the_final_table_has_means_over_the_steps_that_have_them(tmp_path):
    """.4 +- .03 before and .5 +- .04 after differ by .1 +- .05; 10 s of steps, 3 of them training."""
    session = Session(tmp_path, [])
    session.state.summary = {
        "accuracy_before": [0.4, 0.03],
        "accuracy_after": [0.5, 0.04],
        "totals": {
            "time/step_seconds": 10.0,
            "time/train_seconds": 3.0,
            "time/checkpoint_seconds": 0.04,
            "num_tokens": 175,
            "policy/clip_fraction": 0.6,
            "policy/clip_fraction/count": 2,
            "mismatch/abs_log_ratio_max": 0.5,
        },
    }
    text, result = run_table(session, saving_seconds=2.25)
    assert "\n  1.000  a question\n           -> its answer\n" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["change", "+0.100", "+-", "0.050"] in lines
    assert ["train", "3.0", "s", "30%"] in lines and ["time", "in", "steps", "10.0", "s"] in lines
    assert ["saving", "after", "the", "last", "step", "2.2", "s"] in lines and result["saving_seconds"] == 2.25
    assert not any(line[:1] == ["checkpoint"] for line in lines), "0.04 s is not shown as 0.0 s"
    assert result["clip_fraction"] == pytest.approx(0.3) and result["tokens_per_second"] == 17.5
    assert (result["mismatch_k3"], result["step"], result["weight_version"]) == (0.0, 5, 3)
