"""What the numbers of a run say, in sentences, and what to look at.

Pure functions of series. A verdict names the figures that it rests on, and how it was judged is in docs/report.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from gspo_mega.config.mismatch_range import Band, make_band, no_range_sentence, share_sentence
from gspo_mega.config.recipes import RECIPES
from gspo_mega.report.health_verdicts import health_verdicts
from gspo_mega.report.judged_series import Verdict, recent, said_of, total
from gspo_mega.report.learning_verdicts import collapse_of, learning_verdicts
from gspo_mega.report.run_record import RunRecord

# arXiv:2507.18071, section 5.2: the fraction of clipped tokens of GSPO, and of GRPO in the same experiment.
PAPER_CLIP_FRACTION, PAPER_TOKEN_CLIP_FRACTION = 0.15, 0.0013
# k3, nats per token: what no pair of precisions is known to make.
LARGE_MISMATCH = 0.02
# Clipped by the engines' difference, without an update: what a run can bear.
BEARABLE_CLIPS = 0.05
# Below this explained variance a critic is no more than a baseline.
SAYS_THE_MEAN = 0.02


def verdicts_of(record: RunRecord) -> list[Verdict]:
    """The lines of the summary, what to look at last."""
    found = [*learning_verdicts(record), *_mismatch(record), *_clipping(record), *_critic(record), *_responses(record)]
    found += [*health_verdicts(record), *_run(record), *_time(record)]
    look = [verdict.metric for verdict in found if verdict.level == "warning" and verdict.metric]
    text = "look at " + ", ".join(dict.fromkeys(look)) if look else "nothing stands out"
    return [*found, Verdict("warning" if look else "good", "What to look at", text)]


def _mismatch(record: RunRecord) -> Iterable[Verdict]:
    topic, band = "Mismatch of trainer and servers", _band(record)
    share, k3 = recent(record, "mismatch/budget_share"), recent(record, "mismatch/k3")
    if k3 is not None and k3.mean > LARGE_MISMATCH:
        text = f"k3 is {k3.mean:.2g} nats per token ({said_of(k3.first, k3.last)}); FP8 servers differ by about 4.5e-3"
        text += " from a bf16 trainer: `gspo-mega budget` says by what these do"
        yield Verdict("warning", "Size of the mismatch", text, "mismatch/k3")
    if band is None:
        if k3 is not None:
            text = f"{no_range_sentence(str(record.settings['algorithm']))}: {k3.mean:.2g} nats per token"
            yield Verdict("note", topic, f"{text} ({said_of(k3.first, k3.last)})", "mismatch/k3")
        return
    if share is None:
        return
    budget = record.settings.get("mismatch.budget") or 0.5
    clipped = recent(record, "mismatch/clip_fraction")
    within = share.mean <= budget
    text = f"{'within' if within else 'above'} budget: {share_sentence(band, f'{share.mean:.3g}', budget)}"
    over = said_of(share.first, share.last)
    if clipped is None or clipped.mean < BEARABLE_CLIPS:
        yield Verdict("good" if within else "warning", topic, f"{text} ({over})", "mismatch/budget_share")
        return
    verb = "bounds the weight of" if band.bounds_weight else "clips"
    direct = record.settings.get("old_log_probs") == "rollout"
    does = f"it {verb} {clipped.mean:.0%} of {band.units} with no update at all"
    if not direct:
        does += ", were the servers' log-probs the old ones"
    level = "warning" if direct or not within else "note"
    yield Verdict(level, topic, f"{text}; {does} ({over})", "mismatch/budget_share")


def _band(record: RunRecord) -> Band | None:
    """The clip range of the run; the paper's, where its configuration cannot be read."""
    settings = record.settings
    algorithm = settings.get("algorithm")
    recipe = RECIPES[algorithm if algorithm in RECIPES else "gspo"]
    low, high = settings.get("objective.clip_low"), settings.get("objective.clip_high")
    dual = settings.get("objective.dual_clip")
    return make_band(
        recipe.name,
        settings.get("objective.ratio"),
        low if isinstance(low, (int, float)) else recipe.clip_low,
        high if isinstance(high, (int, float)) else recipe.clip_high,
        dual if isinstance(dual, (int, float)) else None,
    )


def _clipping(record: RunRecord) -> Iterable[Verdict]:
    clip = recent(record, "policy/clip_fraction")
    if clip is None:
        return
    tokens = recent(record, "policy/token_clip_fraction")
    texts = f"{clip.mean:.1%} of sequences" + (f", {tokens.mean:.1%} of tokens" if tokens is not None else "")
    texts += f" ({said_of(clip.first, clip.last)})"
    band = _band(record)
    by_token = band is not None and band.per_token
    paper = f"the paper's GSPO clips {PAPER_CLIP_FRACTION:.0%} of tokens"
    if by_token:
        paper = f"the GRPO of the same paper clips {PAPER_TOKEN_CLIP_FRACTION:.2%} of tokens"
    constant = recent(record, "groups/trained_constant_fraction") or recent(record, "groups/constant_fraction")
    if band is None:
        text = f"{record.settings['algorithm']} clips nothing; policy/k3 says how large its updates are"
        yield Verdict("note", "Clipping", text, "policy/k3")
        return
    if constant is not None and constant.mean > 0.95:
        text = f"nothing to clip: {constant.mean:.0%} of groups have one reward, and no gradient"
        text += f" ({said_of(constant.first, constant.last)}){_still_moving(record)}"
        yield Verdict("note", "Clipping", text, "policy/clip_fraction")
    elif clip.mean > 0.5:
        yield Verdict(
            "warning", "Clipping", f"{texts}; {paper}: the range is narrow for these updates", "policy/clip_fraction"
        )
    elif clip.mean < (1e-5 if by_token else 1e-3):
        yield Verdict("note", "Clipping", f"{texts}; {paper}: the range hardly acts", "policy/clip_fraction")
    else:
        yield Verdict("good", "Clipping", f"{texts}; {paper}", "policy/clip_fraction")


def _still_moving(record: RunRecord) -> str:
    """Where the gradient is 0 and the policy moves all the same."""
    norm, moved = recent(record, "optimizer/grad_norm"), recent(record, "policy/k3")
    moves = norm is not None and moved is not None and norm.mean == 0 and moved.mean > 0
    return "; the optimizer's momentum moves the policy all the same" if moves else ""


def _critic(record: RunRecord) -> Iterable[Verdict]:
    explained = recent(record, "critic/explained_variance")
    if explained is None:
        return
    over = said_of(explained.first, explained.last)
    if explained.mean < SAYS_THE_MEAN:
        yield Verdict(
            "note",
            "Critic",
            f"explains {explained.mean:.1%} of the variance of returns ({over}): it says little more than their mean,"
            " and advantages are rewards less a baseline",
            "critic/explained_variance",
        )
    else:
        text = f"explains {explained.mean:.1%} of the variance of returns ({over})"
        yield Verdict("good", "Critic", text, "critic/explained_variance")


def _responses(record: RunRecord) -> Iterable[Verdict]:
    truncated = recent(record, "response/truncated_fraction")
    if truncated is not None:
        high = truncated.mean > 0.05
        text = f"{truncated.mean:.1%} of responses reach the limit ({said_of(truncated.first, truncated.last)})"
        if high:
            # A policy that has come apart seldom ends its responses: a higher limit would only cost more.
            fell = collapse_of(record)
            text += "; raise rollout.max_new_tokens" if fell is None else f", after the collapse of step {fell.since}"
        yield Verdict("warning" if high else "good", "Truncation", text, "response/truncated_fraction")
    for metric, topic, what in (
        ("rollout/num_reward_failures", "Reward failures", "trajectories could not be scored; they are not trained on"),
        ("rollout/num_episode_failures", "Failed episodes", "episodes failed in their own code; not trained on"),
    ):
        if metric in record.series:
            number = total(record, metric)
            text = f"{number:.0f} {what}" if number else "none"
            yield Verdict("warning" if number else "good", topic, text, metric if number else None)
    held_out = [name for name in record.series if name.startswith("eval/") and name.endswith("num_reward_failures")]
    failing = [name for name in held_out if total(record, name)]
    if failing:
        number = math.fsum(total(record, name) for name in failing)
        text = f"{number:.0f} held-out samples could not be scored; they are in no accuracy"
        yield Verdict("warning", "Held-out reward failures", text, failing[0])
    constant = recent(record, "groups/constant_fraction")
    if constant is not None and constant.mean > 0.5:
        text = f"{constant.mean:.0%} of groups have one reward and teach nothing"
        text += f" ({said_of(constant.first, constant.last)})"
        yield Verdict("warning", "Signal", text, "groups/constant_fraction")


def _run(record: RunRecord) -> Iterable[Verdict]:
    skipped, missing = total(record, "optimizer/num_skipped"), total(record, "metrics/num_non_finite")
    if skipped:
        text = f"{skipped:.0f} optimizer steps were skipped for a non-finite gradient"
        yield Verdict("warning", "Gradients", text, "optimizer/num_skipped")
    if missing:
        yield Verdict("warning", "Metrics", f"{missing:.0f} values were NaN or infinite", "metrics/num_non_finite")
    failed = [attempt for attempt in record.attempts if attempt.error or attempt.state == "lost"]
    if failed:
        error = (failed[-1].error or "its supervisor gave no sign of life").strip().splitlines()[-1]
        yield Verdict(
            "warning",
            "Attempts",
            f"{len(failed)} of {len(record.attempts)} failed; attempt {failed[-1].number}: {error}",
        )


def _time(record: RunRecord) -> Iterable[Verdict]:
    phases = phase_seconds(record)
    whole = sum(phases.values())
    if whole > 0:
        largest = max(phases, key=phases.__getitem__)
        name = largest.removeprefix("time/").removesuffix("_seconds").replace("_", " ")
        yield Verdict("note", "Time", f"{name} takes {phases[largest] / whole:.0%} of a step", largest)


def phase_seconds(record: RunRecord) -> dict[str, float]:
    """Seconds of every phase over the run: `time/<phase>_seconds`, without parts of phases."""
    names = (name for name in record.series if name.startswith("time/") and name.count("/") == 1)
    return {name: total(record, name) for name in names if name != "time/step_seconds"}


def as_json(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    return [verdict._asdict() for verdict in verdicts]
