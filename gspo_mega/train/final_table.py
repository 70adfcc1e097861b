"""The end of a training run: a table of accuracy, reward and time, some responses, and what comes next."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from gspo_mega.base.episodes import RolloutBatch
from gspo_mega.base.errors import DataError
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.config.derived import corrects_engine_gap
from gspo_mega.data.held_out_responses import before_and_after
from gspo_mega.metrics.tables import PHASES
from gspo_mega.metrics.writer import final_table, read_metrics
from gspo_mega.train.session import RankSession

# The rewards at the beginning and the end of a run are means over so many steps, if it has twice as many.
_REWARD_STEPS = 5
_PROMPT_CHARACTERS, _RESPONSE_CHARACTERS = 100, 300
_MOST_HELD_OUT = 2


def responses_to_show(batch: RolloutBatch, step: int) -> list[str]:
    """Lines that show three responses of a step's batch: those of the highest, a middle and the lowest reward."""
    scored = sorted((row for row in batch.trajectories if row.is_scored), key=lambda row: -(row.reward or 0.0))
    if not scored:
        return []
    places = sorted({0, len(scored) // 2, len(scored) - 1})
    lines = [f"responses of step {step}, by reward: the highest, a middle one, the lowest"]
    for row in (scored[place] for place in places):
        lines.append(f"  {row.reward:>7.3f}  {_beginning_cut(row.prompt.text)}")
        lines.append(f"  {'':>7}  -> {_end_cut(row.response_text)}")
    return lines


def held_out_to_show(folder: RunFolder) -> list[str]:
    """Lines that show what the model answered to two held-out prompts before training and after it: those that were
    answered wrongly at first and rightly at the end, if there are such. Nothing without two evaluations.
    """
    change = next(iter(before_and_after(folder)[0]), None)
    prompts = [] if change is None else [one for one in change.prompts if one.before is not None][:_MOST_HELD_OUT]
    if change is None or not prompts:
        return []
    lines = [f"held-out answers at step {change.first_step} and at step {change.last_step}"]
    for one in prompts:
        lines.append(f"  {'':>7}  {_beginning_cut(one.prompt)}")
        for row in (one.before, one.after):
            assert row is not None
            mark = {True: "right", False: "wrong"}.get(row["correct"], "-")
            lines.append(f"  {mark:>7}  -> {_end_cut(row['response'])}")
    return lines


def _beginning_cut(text: str) -> str:
    cut = f"... {text[-_PROMPT_CHARACTERS:]}" if len(text) > _PROMPT_CHARACTERS else text
    return json.dumps(cut, ensure_ascii=False)


def _end_cut(text: str) -> str:
    cut = f"{text[:_RESPONSE_CHARACTERS]} ..." if len(text) > _RESPONSE_CHARACTERS else text
    return json.dumps(cut, ensure_ascii=False)


def _reward_rows(metrics_file: Path) -> list[list[str]]:
    """The mean reward of the first and of the last steps; nothing if they cannot be read, as the run has ended well."""
    try:
        lines = read_metrics(metrics_file)
    except (DataError, OSError):
        return []
    # A mean that is not finite is null in the file.
    rewards = [line["reward/mean"] for line in lines if isinstance(line.get("reward/mean"), int | float)]
    count = min(_REWARD_STEPS, len(rewards) // 2)
    if count == 0:
        return []
    steps = "step" if count == 1 else f"{count} steps"
    return [
        [f"reward, first {steps}", f"{math.fsum(rewards[:count]) / count:.3f}"],
        [f"reward, last {steps}", f"{math.fsum(rewards[-count:]) / count:.3f}"],
    ]


def accuracy_text(value: list[float] | None) -> str:
    """[accuracy, standard error] as text, such as `0.412 +- 0.022`."""
    return "not measured" if value is None else f"{value[0]:.3f} +- {value[1]:.3f}"


def run_table(session: RankSession, saving_seconds: float = 0.0) -> tuple[str, dict[str, Any]]:
    """The final table as text for people, and the same numbers as a JSON object, over all attempts of the run.
    `saving_seconds`: what the checkpoint and the export after the last step took. Rank 0.
    """
    summary, state = session.state.summary, session.state
    totals = summary.get("totals", {})
    before, after = summary.get("accuracy_before"), summary.get("accuracy_after")

    def mean(name: str) -> float:
        return totals.get(name, 0.0) / max(totals.get(name + "/count", 0), 1)

    seconds = totals.get("time/step_seconds", 0.0)
    tokens_per_second = totals.get("num_tokens", 0) / seconds if seconds else 0.0
    rows = [["held-out accuracy before", accuracy_text(before)], ["held-out accuracy after", accuracy_text(after)]]
    if before and after:
        error = (before[1] ** 2 + after[1] ** 2) ** 0.5
        rows.append(["change", f"{after[0] - before[0]:+.3f} +- {error:.3f}"])
    rows += _reward_rows(session.run_folder.metrics_file)
    rows += [
        ["steps (optimizer steps)", f"{state.step} ({state.num_optimizer_steps})"],
        ["weight version", str(state.weight_version)],
        ["tokens/s, prompt and response", f"{tokens_per_second:.0f}"],
        ["time in steps", f"{seconds:.1f} s"],
    ]
    for phase in PHASES:
        spent = totals.get(f"time/{phase}_seconds", 0.0)
        if spent >= 0.05:  # less reads as 0.0 s
            rows.append([f"  {phase}", f"{spent:.1f} s  {spent / seconds:4.0%}"])
    if saving_seconds:
        rows.append(["saving after the last step", f"{saving_seconds:.1f} s"])
    rows += [
        ["clip fraction, mean", f"{mean('policy/clip_fraction'):.3f}"],
        ["mismatch k3 (KL per token), mean", f"{mean('mismatch/k3'):.1e} nats"],
        ["mismatch |d| per token, mean", f"{mean('mismatch/abs_log_ratio_mean'):.1e} nats"],
        ["mismatch |d| per token, largest", f"{totals.get('mismatch/abs_log_ratio_max', 0.0):.1e} nats"],
    ]
    if corrects_engine_gap(session.config.mismatch, session.config.old_log_probs):
        rows.append(["kept by mismatch.correction, mean", f"{mean('policy/kept_fraction'):.4f}"])
    first = {sign: mean(f"policy/mini_batch/0/clip_fraction_{sign}") for sign in ("negative", "positive")}
    if session.config.old_log_probs == "rollout":
        rows += [
            ["clipped with no update, A < 0, mean", f"{first['negative']:.3f}"],
            ["clipped with no update, A > 0, mean", f"{first['positive']:.3f}"],
        ]
    has_tensorboard = any(one.sink == "tensorboard" for one in session.config.metrics.sinks)
    text = ["", final_table(rows), ""]
    if session.lead is not None and session.lead.shown_responses:
        text += [*session.lead.shown_responses, ""]
    if answers := held_out_to_show(session.run_folder):
        text += [*answers, ""]
    text += [
        f"result   {session.run_folder.huggingface_dir}  (Hugging Face format)",
        f"curves   {session.run_folder.metrics_file}"
        + (f", tensorboard --logdir {session.run_folder.tensorboard_dir}" if has_tensorboard else ""),
    ]
    again = f"gspo-mega train {session.run_folder.path} train.num_steps=N   with a larger N goes on from here"
    if session.config.eval is not None:
        text += [f"next     gspo-mega eval {session.run_folder.path}   measures it again;", f"         {again}"]
    else:  # without held-out sets there is nothing to measure
        text.append(f"next     {again}")

    result = {
        "step": state.step,
        "weight_version": state.weight_version,
        "accuracy_before": before,
        "accuracy_after": after,
        "tokens_per_second": tokens_per_second,
        "seconds": seconds,
        "saving_seconds": saving_seconds,
        "clip_fraction": mean("policy/clip_fraction"),
        "first_clip_fraction_negative": first["negative"],
        "first_clip_fraction_positive": first["positive"],
        "mismatch_k3": mean("mismatch/k3"),
        "huggingface_dir": str(session.run_folder.huggingface_dir),
    }
    return "\n".join(text), result
