"""The table at the end of a training run: the accuracy before and after, the time that it took, and what comes next."""

from __future__ import annotations

from typing import Any

from gspo_mega.config.derived import corrects_engine_gap
from gspo_mega.metrics.catalogue import PHASES
from gspo_mega.metrics.writer import final_table
from gspo_mega.train.session import RankSession


def accuracy_text(value: list[float] | None) -> str:
    """[accuracy, standard error] as text, such as `0.412 +- 0.022`."""
    return "not measured" if value is None else f"{value[0]:.3f} +- {value[1]:.3f}"


def run_table(session: RankSession) -> tuple[str, dict[str, Any]]:
    """The final table as text for people, and the same numbers as a JSON object, over all attempts of the run. Rank
    0.
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
    rows += [
        ["steps (optimizer steps)", f"{state.step} ({state.num_optimizer_steps})"],
        ["weight version", str(state.weight_version)],
        ["tokens/s, prompt and response", f"{tokens_per_second:.0f}"],
        ["time in steps", f"{seconds:.1f} s"],
    ]
    for phase in PHASES:
        spent = totals.get(f"time/{phase}_seconds", 0.0)
        if spent:
            rows.append([f"  {phase}", f"{spent:.1f} s  {spent / seconds:4.0%}"])
    rows += [
        ["clip fraction, mean", f"{mean('policy/clip_fraction'):.3f}"],
        ["mismatch k3 (KL per token), mean", f"{mean('mismatch/k3'):.1e} nats"],
        ["mismatch |d| per token, mean", f"{mean('mismatch/abs_log_ratio_mean'):.1e} nats"],
        ["mismatch |d| per token, largest", f"{totals.get('mismatch/abs_log_ratio_max', 0.0):.1e} nats"],
    ]
    if corrects_engine_gap(session.config):
        rows.append(["kept by mismatch.correction, mean", f"{mean('policy/kept_fraction'):.4f}"])
    first = {sign: mean(f"policy/mini_batch/0/clip_fraction_{sign}") for sign in ("negative", "positive")}
    if session.config.old_log_probs == "rollout":
        rows += [
            ["clipped with no update, A < 0, mean", f"{first['negative']:.3f}"],
            ["clipped with no update, A > 0, mean", f"{first['positive']:.3f}"],
        ]
    has_tensorboard = any(one.sink == "tensorboard" for one in session.config.metrics.sinks)
    text = ["", final_table(rows), ""]
    text += [f"notice   {notice}" for notice in session.context.notices]
    text += [
        f"result   {session.run_folder.huggingface_dir}  (Hugging Face format)",
        f"curves   {session.run_folder.metrics_file}"
        + (f", tensorboard --logdir {session.run_folder.tensorboard_dir}" if has_tensorboard else ""),
    ]
    again = "gspo-mega train CONFIG train.num_steps=N   with a larger N goes on from here"
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
        "clip_fraction": mean("policy/clip_fraction"),
        "first_clip_fraction_negative": first["negative"],
        "first_clip_fraction_positive": first["positive"],
        "mismatch_k3": mean("mismatch/k3"),
        "huggingface_dir": str(session.run_folder.huggingface_dir),
    }
    return "\n".join(text), result
