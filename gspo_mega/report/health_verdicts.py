"""What may be wrong with a run whose reward looks well: batches that come up short, responses that are dropped, an
entropy or a gradient norm that is another than at the start. How it is judged is in docs/report.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import NamedTuple

from gspo_mega.metrics.trends import FEWEST_STEPS
from gspo_mega.report.judged_series import Verdict, recent, said_of, total
from gspo_mega.report.run_record import RunRecord

# Of the groups that a step wants, and of the responses that a correction drops.
MOST_MISSING, MOST_DROPPED = 0.1, 0.1


class _Drift(NamedTuple):
    """A metric that should stay near where it began. `up`, `down`: the factors from which on it did not; `least`: the
    larger of its two values, below which it says nothing.
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
        "the policy has little left to explore, or comes apart; read its responses under Trajectories",
    ),
    _Drift(*("optimizer/grad_norm", "Gradient norm", 10.0, None, 0.0), "lower optimizer.lr, or see what is sampled"),
    _Drift(*("policy/k3", "Size of updates", 10.0, None, 1e-2), "smaller updates: lower optimizer.lr"),
    _Drift(*("policy/kl_reference", "Distance to the reference", 100.0, None, 0.5), "raise kl.coefficient"),
    _Drift(
        *("mismatch/k3", "Growth of the mismatch", 10.0, None, 1e-3),
        "`gspo-mega budget` on the newest weights says which cause grew",
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
    """What happens to more than a tenth of the `of` that are counted in each step."""

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
        "scorings in a step were not possible for what the response is, and count as 0",
    ),
)
MOST_SHARE = 0.1
# Of the rate that is configured, which a schedule passes only in its very last steps.
LEAST_RATE = 1e-4
# Gradients that are so many times what clipping leaves differ from those of a run that learns.
MOST_CLIPPED = 1000.0


def health_verdicts(record: RunRecord) -> Iterable[Verdict]:
    yield from _groups(record)
    yield from _dropped(record)
    for drift in _DRIFTS:
        drifted = [*_of_drift(record, drift)]
        yield from drifted or [
            one for bound in _BOUNDS if bound.metric == drift.metric for one in _beyond(record, bound)
        ]
    for bound in _BOUNDS:
        if all(drift.metric != bound.metric for drift in _DRIFTS):
            yield from _beyond(record, bound)
    for share in _SHARES:
        yield from _of_share(record, share)
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
        "warning", "Correction", f"{text} nothing; `gspo-mega budget` says why they differ", "policy/kept_fraction"
    )


def _beyond(record: RunRecord, bound: _Bound) -> Iterable[Verdict]:
    found = recent(record, bound.metric)
    if found is None or found.last <= 0:  # 0: what was measured before the first step
        return
    low, high = bound.least is not None and found.mean < bound.least, bound.most is not None and found.mean > bound.most
    if low or high:
        limit = f"below {bound.least:g}" if low else f"above {bound.most:g}"
        text = f"{found.mean:.3g}, {limit} ({said_of(found.first, found.last)}): {bound.hint}"
        yield Verdict("warning", bound.topic, text, bound.metric)


def _of_share(record: RunRecord, share: _Share) -> Iterable[Verdict]:
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


def _of_drift(record: RunRecord, drift: _Drift) -> Iterable[Verdict]:
    """Compares medians over the first and the last tenth, which a single spike does not move."""
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
    """A gradient norm may grow by any factor below what is clipped: while rewards are rare there is hardly one."""
    if drift.metric not in ("optimizer/grad_norm", "critic/grad_norm"):
        return drift.least
    section = "critic.optimizer" if drift.metric.startswith("critic") else "optimizer"
    clip = record.settings.get(f"{section}.clip_grad", record.settings.get("optimizer.clip_grad"))
    return 5.0 * clip if isinstance(clip, (int, float)) and clip > 0 else 5.0
