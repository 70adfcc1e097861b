"""What the numbers of a run say, in sentences, and what to look at. Pure functions of series; docs/report.md says how a
run is judged.

`verdicts_of` puts the sentences together: about learning (`learning_verdicts.py`), mismatch, clipping, critic,
responses, the health of the run, failures and time. `health_verdicts` finds what may be wrong although the reward looks
good: batches that come up short, responses that are dropped, an entropy or gradient norm that is far from where it
began. A verdict names the figures that it rests on.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from gspo_mega.config.algorithms import RECIPES
from gspo_mega.config.clip_range import (
    LARGE_MISMATCH,
    Band,
    make_band,
    must_warn,
    no_range_sentence,
    share_sentence,
)
from gspo_mega.launcher.attempt_state import summary_of
from gspo_mega.metrics.trends import FEWEST_STEPS
from gspo_mega.report.learning_verdicts import Verdict, collapse_of, learning_verdicts, recent, said_of, total
from gspo_mega.report.run_record import AttemptRecord, RunRecord

# The fraction of clipped tokens of GSPO, and of GRPO in the same experiment (arXiv:2507.18071, section 5.2).
PAPER_CLIP_FRACTION, PAPER_TOKEN_CLIP_FRACTION = 0.15, 0.0013
# The largest share that the mismatch may clip without an update before it is mentioned.
BEARABLE_CLIPS = 0.05
# Below this explained variance a critic does no more than a baseline.
SAYS_THE_MEAN = 0.02
# The largest share of a step's groups that may be missing, and of the responses that the correction may drop.
MOST_MISSING, MOST_DROPPED = 0.1, 0.1
MOST_SHARE = 0.1
# The smallest share of optimizer.lr that a learning rate should have. A schedule is below it only in its very last
# steps.
LEAST_RATE = 1e-4
# The most that a gradient norm may be, in multiples of what clipping leaves. In runs that learn it is smaller.
MOST_CLIPPED = 1000.0


def verdicts_of(record: RunRecord) -> list[Verdict]:
    """The lines of the summary. The last one says what to look at."""
    found = [*learning_verdicts(record), *_mismatch(record), *_clipping(record), *_critic(record), *_responses(record)]
    found += [*health_verdicts(record), *_run(record), *_time(record)]
    look = [verdict.metric for verdict in found if verdict.level == "warning" and verdict.metric]
    if record.attempts and has_failed(last := record.attempts[-1]):
        look.insert(0, f"why attempt {last.number} failed (attempts/{last.number:04d}/logs)")
    text = "look at " + ", ".join(dict.fromkeys(look)) if look else "nothing stands out"
    return [*found, Verdict("warning" if look else "good", "What to look at", text)]


def _mismatch(record: RunRecord) -> Iterable[Verdict]:
    topic, band = "Mismatch of trainer and servers", _band(record)
    share, k3 = recent(record, "mismatch/budget_share"), recent(record, "mismatch/k3")
    if k3 is not None and k3.mean > LARGE_MISMATCH:
        text = f"k3 is {k3.mean:.2g} nats per token ({said_of(k3.first, k3.last)}); FP8 servers differ by about 4.5e-3"
        text += " from a bf16 trainer: `gspo-mega mismatch` says why these differ by more"
        yield Verdict("warning", "Size of the mismatch", text, "mismatch/k3")
    if band is None:
        if k3 is not None:
            text = f"{no_range_sentence(str(record.settings['algorithm']))}: {k3.mean:.2g} nats per token"
            yield Verdict("note", topic, f"{text} ({said_of(k3.first, k3.last)})", "mismatch/k3")
        return
    if share is None:
        return
    budget = _budget(record)
    clipped = recent(record, "mismatch/clip_fraction")
    within = share.mean <= budget
    text = f"{'within' if within else 'above'} budget: {share_sentence(band, f'{share.mean:.3g}', budget)}"
    over = said_of(share.first, share.last)
    old_log_probs = record.settings.get("old_log_probs")
    warns = must_warn(old_log_probs, None if k3 is None else k3.mean)
    if clipped is None or clipped.mean < BEARABLE_CLIPS:
        if not within and old_log_probs == "trainer":
            text += "; with old_log_probs: trainer it is not in the ratio"
        level = "good" if within else "warning" if warns else "note"
        yield Verdict(level, topic, f"{text} ({over})", "mismatch/budget_share")
        return
    verb = "bounds the weight of" if band.bounds_weight else "clips"
    direct = old_log_probs == "rollout"
    does = f"it {verb} {clipped.mean:.0%} of {band.units} with no update at all"
    if not direct:
        does += ", were the servers' log-probs the old ones"
    level = "warning" if direct or (warns and not within) else "note"
    yield Verdict(level, topic, f"{text}; {does} ({over})", "mismatch/budget_share")


def _band(record: RunRecord) -> Band | None:
    """The clip range of the run, or that of the paper's GSPO if its configuration cannot be read. None if the algorithm
    clips nothing.
    """
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
    elif (share := recent(record, "mismatch/budget_share")) is not None and share.mean > _budget(record):
        text = f"{texts}; {paper}; the mismatch alone fills {share.mean:.3g} of the range, so this says little"
        yield Verdict("note", "Clipping", f"{text} about updates", "policy/clip_fraction")
    else:
        yield Verdict("good", "Clipping", f"{texts}; {paper}", "policy/clip_fraction")


def _budget(record: RunRecord) -> float:
    return record.settings.get("mismatch.budget") or 0.5


def _still_moving(record: RunRecord) -> str:
    """The end of a sentence for the case that the gradient is 0 and the policy still moves, else ""."""
    norm, moved = recent(record, "optimizer/grad_norm"), recent(record, "policy/k3")
    moves = norm is not None and moved is not None and norm.mean == 0 and moved.mean > 0
    return "; the optimizer's momentum still moves the policy" if moves else ""


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
            " and advantages are rewards minus a baseline",
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
            # A policy that has collapsed seldom ends its responses, so a higher limit would only cost more.
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
    failed = [attempt for attempt in record.attempts if has_failed(attempt)]
    if failed:
        error = summary_of(failed[-1].error or "its supervisor gave no sign of life")
        yield Verdict(
            "warning",
            "Attempts",
            f"{len(failed)} of {len(record.attempts)} failed; attempt {failed[-1].number}: {error}",
        )


def has_failed(attempt: AttemptRecord) -> bool:
    return bool(attempt.error) or attempt.state == "lost"


def _time(record: RunRecord) -> Iterable[Verdict]:
    phases = phase_seconds(record)
    whole = sum(phases.values())
    if whole > 0:
        largest = max(phases, key=phases.__getitem__)
        name = largest.removeprefix("time/").removesuffix("_seconds").replace("_", " ")
        yield Verdict("note", "Time", f"{name} takes {phases[largest] / whole:.0%} of a step", largest)


def phase_seconds(record: RunRecord) -> dict[str, float]:
    """The seconds of every phase over the run, by the metric `time/<phase>_seconds`. Parts of phases are left out."""
    names = (name for name in record.series if name.startswith("time/") and name.count("/") == 1)
    return {name: total(record, name) for name in names if name != "time/step_seconds"}


def as_json(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    return [verdict._asdict() for verdict in verdicts]


class _Drift(NamedTuple):
    """A metric that should stay near where it began. `up`, `down`: from these factors on, it did not stay near.
    `least`: no verdict if both of its values are below this.
    """

    metric: str
    topic: str
    up: float | None
    down: float | None
    least: float
    hint: str


_DRIFTS = (
    _Drift(
        *("policy/entropy", "Entropy", 5.0, 10.0, 0.02),
        "the policy has little left to explore, or degenerates; read its responses under Trajectories",
    ),
    _Drift(*("optimizer/grad_norm", "Gradient norm", 10.0, None, 0.0), "lower optimizer.lr, or see what is sampled"),
    _Drift(*("policy/k3", "Size of updates", 10.0, None, 1e-2), "smaller updates: lower optimizer.lr"),
    _Drift(*("policy/kl_reference", "Distance to the reference", 100.0, None, 0.5), "raise kl.coefficient"),
    _Drift(
        *("mismatch/k3", "Growth of the mismatch", 10.0, None, 1e-3),
        "`gspo-mega mismatch` on the newest weights says which cause grew",
    ),
    _Drift(*("response/length_mean", "Response length", 4.0, 4.0, 8.0), "read the responses under Trajectories"),
    _Drift(*("critic/grad_norm", "Critic's gradient norm", 10.0, None, 0.0), "lower critic.optimizer.lr"),
)


class _Bound(NamedTuple):
    """A metric whose mean over the last tenth is wrong above `most` or below `least`, wherever it began."""

    metric: str
    topic: str
    least: float | None
    most: float | None
    hint: str


_BOUNDS = (
    _Bound(*("policy/entropy", "Entropy", 1e-3, 7.0), "read its responses under Trajectories"),
    _Bound(*("policy/k3", "Size of updates", None, 0.1), "smaller updates: lower optimizer.lr"),
    _Bound(*("policy/kl_reference", "Distance to the reference", None, 5.0), "raise kl.coefficient"),
    _Bound(*("policy/ess", "Weights of sequences", 0.5, None), "few of them decide an update: lower optimizer.lr"),
    _Bound(
        *("critic/explained_variance", "Critic's error", -0.5, None),
        "its values are worse than the mean return; lower critic.optimizer.lr or raise critic.warmup_steps",
    ),
)


class _Share(NamedTuple):
    """A count `metric` that is wrong above a tenth of the count `of`."""

    metric: str
    of: str
    topic: str
    what: str


_SHARES = (
    _Share(
        *("rollout/num_request_failures", "rollout/num_turns", "Requests to servers"),
        "requests fail in a step: see the servers' logs",
    ),
    _Share(
        *("rollout/num_response_faults", "rollout/num_trajectories", "Responses that cannot be scored"),
        "scorings in a step were not possible because of the response, and count as 0",
    ),
)


def health_verdicts(record: RunRecord) -> Iterable[Verdict]:
    """What may be wrong with a run although its reward looks good."""
    yield from _groups(record)
    yield from _dropped(record)
    for drift in _DRIFTS:
        drifted = [*_drift_verdicts(record, drift)]
        yield from drifted or [
            one for bound in _BOUNDS if bound.metric == drift.metric for one in _bound_verdicts(record, bound)
        ]
    for bound in _BOUNDS:
        if all(drift.metric != bound.metric for drift in _DRIFTS):
            yield from _bound_verdicts(record, bound)
    for share in _SHARES:
        yield from _share_verdicts(record, share)
    yield from _rate(record)
    norm = recent(record, "optimizer/grad_norm")
    clip = record.settings.get("optimizer.clip_grad")
    if norm is not None and isinstance(clip, (int, float)) and 0 < clip < norm.mean / MOST_CLIPPED:
        text = f"{norm.mean:.3g}, of which clipping leaves {clip:g} ({said_of(norm.first, norm.last)})"
        yield Verdict("warning", "Clipped gradients", text, "optimizer/grad_norm")
    signal = recent(record, "groups/trained_constant_fraction") or recent(record, "groups/constant_fraction")
    if norm is not None and norm.mean == 0.0 and (signal is None or signal.mean < 1.0):
        text = f"is 0 ({said_of(norm.first, norm.last)}): nothing is learnt"
        yield Verdict("warning", "Gradient norm", text, "optimizer/grad_norm")
    if skipped := total(record, "critic/num_skipped"):
        text = f"{skipped:.0f} of the critic's optimizer steps were skipped for a non-finite gradient"
        yield Verdict("warning", "Critic's gradients", text, "critic/num_skipped")
    given_up = recent(record, "rollout/num_servers_given_up")
    if given_up is not None and given_up.mean > 0:
        text = f"{given_up.mean:.0f} are not started again (server.max_restarts)"
        yield Verdict("warning", "Servers given up", text, "rollout/num_servers_given_up")


def _groups(record: RunRecord) -> Iterable[Verdict]:
    missing, trained = recent(record, "rollout/num_groups_missing"), recent(record, "groups/num_groups")
    if missing is None or missing.mean <= 0:
        return
    wanted = record.settings.get("batch.prompts_per_step")
    if not isinstance(wanted, int):
        wanted = missing.mean + trained.mean if trained is not None else missing.mean
    if missing.mean <= MOST_MISSING * wanted:
        return
    text = f"{missing.mean:.3g} of {wanted:.3g} are missing from a step ({said_of(missing.first, missing.last)})"
    filtered = recent(record, "rollout/num_groups_filtered")
    if filtered is not None and filtered.mean > 0:
        text += f"; {filtered.mean:.3g} were left out for their equal rewards: raise rollout.max_oversampling, or take"
        text += " prompts that are nearer to what the policy can do"
    else:
        text += ": fewer than two of their responses could be scored"
    yield Verdict("warning", "Groups", text, "rollout/num_groups_missing")


def _dropped(record: RunRecord) -> Iterable[Verdict]:
    kept = recent(record, "policy/kept_fraction")
    if kept is None or 1 - kept.mean <= MOST_DROPPED:
        return
    mode = record.settings.get("mismatch.correction")
    name = f"mismatch.correction {mode}" if mode else "mismatch.correction"
    text = f"{name} drops {1 - kept.mean:.0%} of the responses ({said_of(kept.first, kept.last)}): they are sampled for"
    yield Verdict(
        "warning", "Correction", f"{text} nothing; `gspo-mega mismatch` says why they differ", "policy/kept_fraction"
    )


def _bound_verdicts(record: RunRecord, bound: _Bound) -> Iterable[Verdict]:
    found = recent(record, bound.metric)
    if found is None or found.last <= 0:  # step 0 has what was measured before the first step
        return
    low, high = bound.least is not None and found.mean < bound.least, bound.most is not None and found.mean > bound.most
    if low or high:
        limit = f"below {bound.least:g}" if low else f"above {bound.most:g}"
        text = f"{found.mean:.3g}, {limit} ({said_of(found.first, found.last)}): {bound.hint}"
        yield Verdict("warning", bound.topic, text, bound.metric)


def _share_verdicts(record: RunRecord, share: _Share) -> Iterable[Verdict]:
    number, of = recent(record, share.metric), recent(record, share.of)
    if number is not None and of is not None and number.mean > MOST_SHARE * of.mean:
        text = f"{number.mean:.3g} {share.what}, compared with {of.mean:.3g} {share.of.partition('num_')[2]}"
        yield Verdict("warning", share.topic, f"{text} ({said_of(number.first, number.last)})", share.metric)


def _rate(record: RunRecord) -> Iterable[Verdict]:
    rate, wanted = recent(record, "optimizer/lr"), record.settings.get("optimizer.lr")
    if rate is None or rate.mean > LEAST_RATE * (wanted if isinstance(wanted, (int, float)) else 0.0):
        return
    text = f"{rate.mean:.3g} ({said_of(rate.first, rate.last)}): nothing is learnt"
    yield Verdict("warning", "Learning rate", text, "optimizer/lr")


def _drift_verdicts(record: RunRecord, drift: _Drift) -> Iterable[Verdict]:
    """Compares the medians over the first and the last tenth, which a single spike does not change."""
    series = record.series.get(drift.metric, [])
    pairs = [(step, value) for step, value in zip(record.steps, series) if value is not None]
    if len(pairs) < FEWEST_STEPS:
        return
    width = max(3, len(pairs) // 10)
    before = statistics.median(value for _, value in pairs[:width])
    after = statistics.median(value for _, value in pairs[-width:])
    if max(before, after) < _least(record, drift):
        return
    grew = drift.up is not None and after > drift.up * max(before, 0.0)
    shrank = drift.down is not None and after < before / drift.down
    if grew or shrank:
        first, last = said_of(pairs[0][0], pairs[width - 1][0]), said_of(pairs[-width][0], pairs[-1][0])
        text = f"{after:.3g} ({last.replace('mean', 'median')}), {before:.3g} at the start"
        text += f" ({first.replace('mean', 'median')}): {drift.hint}"
        yield Verdict("warning", drift.topic, text, drift.metric)


def _least(record: RunRecord, drift: _Drift) -> float:
    """The value below which a drift is not mentioned. A gradient norm may grow by any factor below 5 times what
    clipping leaves, because there is hardly a gradient while rewards are rare.
    """
    if drift.metric not in ("optimizer/grad_norm", "critic/grad_norm"):
        return drift.least
    section = "critic.optimizer" if drift.metric.startswith("critic") else "optimizer"
    clip = record.settings.get(f"{section}.clip_grad", record.settings.get("optimizer.clip_grad"))
    return 5.0 * clip if isinstance(clip, (int, float)) and clip > 0 else 5.0
