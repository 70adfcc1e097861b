"""Every metric: name, unit, reduction to a step's one value, meaning. One place.

Owns the names; computing values belongs to the parts that know them, writing to `writer.py`. A name with
`<placeholder>` is a pattern: the placeholder stands for one or more of letters, digits, `.`, `_`, `-`.
"""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass

from gspo_mega.metrics.length_bins import LENGTH_BINS
from gspo_mega.metrics.rollout_counts import ROLLOUT_COUNTS
from gspo_mega.metrics.training_names import (
    BESIDE,
    CORRECTION,
    CRITIC,
    EPISODE,
    HELD_OUT,
    HELD_OUT_OF_SEVERAL,
    LOG_RATIO_PARTS,
    Reduction,
)


@dataclass(frozen=True)
class Metric:
    """`reduction`: how the numbers of trajectories, tokens, mini-batches or ranks become the step's one value
    (`ratio`: sums divided once; `value`: there is only one)."""

    name: str
    unit: str
    reduction: Reduction
    description: str


PHASES = {
    "rollout": "waiting for the rollout batch: generation and scoring",
    "assemble": "advantages, packing, moving shards to their ranks",
    "old_log_probs": "the trainer's log-probs at the start of the rollout batch",
    "reference_log_probs": "log-probs under the reference policy, where there is a KL term",
    "critic": "values of the rollout batch, and the critic's optimizer steps (algorithm: ppo)",
    "train": "forward, backward and optimizer steps of all mini-batches",
    "report": "adding up metrics over ranks and writing them",
    "share": "moving GPU memory between ranks and servers (cluster.colocated)",
    "publish": "sending weights to the servers and verifying them",
    "eval": "held-out evaluation",
    "checkpoint": "saving after the previous step",
    "other": "the step's time outside every phase",
}

_SUMMARIES: dict[str, Reduction] = {
    "mean": "mean",
    "sd": "sd",
    "min": "min",
    "max": "max",
    "p1": "quantile",
    "p99": "quantile",
}

_SAMPLED = "of all that was sampled for the step and could be scored"
_COUNTED = "with a token ratio, a sequence counts by its share of tokens that are"

_POLICY: dict[str, tuple[str, Reduction, str]] = {
    "objective": ("reward", "sum", "J of the mini-batch; the loss is -J"),
    "num_sequences": ("sequences", "sum", "sequences with an active token: the denominator"),
    "num_tokens": ("tokens", "sum", "active response tokens trained on"),
    "kept_fraction": ("fraction", "ratio", "sequences not rejected by the mismatch correction"),
    "clip_fraction": ("fraction", "ratio", f"sequences whose gradient was clipped away; {_COUNTED}"),
    "clip_fraction_high": ("fraction", "ratio", f"sequences with A > 0 above the band; {_COUNTED}"),
    "clip_fraction_low": ("fraction", "ratio", f"sequences with A < 0 below the band; {_COUNTED}"),
    "dual_clip_fraction": ("fraction", "ratio", f"sequences bounded by the dual clip; {_COUNTED}"),
    "clip_fraction_positive": (
        "fraction",
        "ratio",
        f"sequences that were clipped, of those with A > 0; {_COUNTED}",
    ),
    "clip_fraction_negative": (
        "fraction",
        "ratio",
        f"sequences that were clipped, of those with A < 0; {_COUNTED}",
    ),
    "token_clip_fraction": ("fraction", "ratio", "clip_fraction weighed by length"),
    "token_clip_fraction_high": ("fraction", "ratio", "clip_fraction_high weighed by length"),
    "token_clip_fraction_low": ("fraction", "ratio", "clip_fraction_low weighed by length"),
    "k1": ("nats", "mean", "KL(old || current) per token, mean(-d)"),
    "k2": ("nats", "mean", "KL(old || current) per token, mean(d^2) / 2"),
    "k3": ("nats", "mean", "KL(old || current) per token, mean(e^d - 1 - d)"),
    "chi2_token": ("1", "mean", "mean(e^2d) - 1 of old to current, per token"),
    "positive_mass_left": ("fraction", "ratio", "share of A > 0 of the kept sequences that still has a gradient"),
    "negative_mass_left": ("fraction", "ratio", "share of A < 0 of the kept sequences that still has a gradient"),
}

_MISMATCH: dict[str, tuple[str, Reduction, str]] = {
    "k1": ("nats", "mean", "KL(server || trainer) per token, mean(-d)"),
    "k2": ("nats", "mean", "KL(server || trainer) per token, mean(d^2) / 2"),
    "k3": ("nats", "mean", "KL(server || trainer) per token, mean(e^d - 1 - d)"),
    "abs_log_ratio_mean": ("nats", "mean", "mean |d| per token"),
    "abs_log_ratio_max": ("nats", "max", "largest |d| of a token"),
    "abs_prob_difference_max": ("1", "max", "largest difference of a token's probability"),
    "log_ppl_difference_mean": ("nats", "mean", "log perplexity, trainer - server, by sequence"),
    "ppl_ratio_mean": ("1", "mean", "perplexity, trainer / server, by sequence"),
    "chi2_token": ("1", "mean", "mean(e^2d) - 1 per token"),
    "chi2_sequence": ("1", "mean", "mean(w^2) - 1 of w = exp(sum d)"),
    "chi2_sequence_log1p": ("nats", "mean", "log(1 + chi2_sequence), finite where that overflows"),
    "chi2_sequence_length_normalised": ("1", "mean", "mean(w^2) - 1 of w = exp(mean d)"),
    "token_truncated_ratio_mean": ("1", "mean", "mean min(e^d, 2) per token"),
    "token_truncated_fraction": ("fraction", "ratio", "tokens with e^d above 2"),
    "ess_token": ("fraction", "ratio", "effective share of tokens under weights e^d"),
    "ess_sequence": ("fraction", "ratio", "effective share of sequences under weights exp(sum d)"),
    "icepop_kept_fraction": ("fraction", "ratio", "tokens with e^d in [0.5, 5]"),
}

# Against the clip range as the algorithm means it (config/mismatch_range.py); absent where nothing is clipped.
_OF_RANGE: dict[str, tuple[str, Reduction, str]] = {
    "budget_share": (
        "fraction",
        "ratio",
        "mean size in widths of the clip range: |log s| of responses where these are clipped, |d| of tokens where"
        " tokens are, or the difference of their probabilities (dppo)",
    ),
    "clip_fraction": (
        "fraction",
        "ratio",
        "responses, or tokens, clipped with no update if the server's log-probs were the old ones",
    ),
}

# The same numbers of the responses of each length and of each sign of A, before any update.
_PARTS = {
    **{f"length/{name}": f"responses of {name} tokens" for name in LENGTH_BINS},
    "advantage/positive": "responses with A > 0",
    "advantage/negative": "responses with A < 0",
}
_SPLIT: dict[str, tuple[str, Reduction, str]] = {
    "num_sequences": ("sequences", "sum", "their number"),
    "log_s_mean": ("nats", "mean", "mean of log s = mean d, trainer - server"),
    "log_s_sd": ("nats", "sd", "sd of log s = mean d, trainer - server"),
    "k3": ("nats", "mean", "KL(server || trainer) per token, mean(e^d - 1 - d)"),
    **_OF_RANGE,
    "kept_fraction": ("fraction", "ratio", "not dropped by mismatch.correction"),
}


def _entries() -> list[Metric]:
    def summaries(prefix: str, unit: str, what: str) -> list[Metric]:
        return [
            Metric(f"{prefix}/{key}", unit, reduction, f"{key} over sequences of {what}")
            for key, reduction in _SUMMARIES.items()
        ]

    return [
        Metric("reward/mean", "reward", "mean", f"reward over episodes; {_SAMPLED}"),
        Metric("reward/sd", "reward", "sd", f"reward over episodes; {_SAMPLED}"),
        Metric("reward/standard_error", "reward", "value", "standard error of reward/mean, from the spread of prompts"),
        Metric(
            "reward/trained_mean",
            "reward",
            "mean",
            "reward over the episodes trained on: without the groups that rollout.filter_constant_groups left out",
        ),
        Metric("reward/source/<source>", "reward", "mean", f"reward over one source's episodes; {_SAMPLED}"),
        Metric(
            "reward/function/<function>", "reward", "mean", f"one reward function's own value, unweighted; {_SAMPLED}"
        ),
        Metric("groups/num_groups", "groups", "sum", "groups trained on"),
        Metric(
            "groups/constant_fraction",
            "fraction",
            "ratio",
            f"groups whose rewards are all equal: no signal; {_SAMPLED} (only with advantages relative to groups)",
        ),
        Metric(
            "groups/trained_constant_fraction",
            "fraction",
            "ratio",
            "the same of the groups trained on: 0 with rollout.filter_constant_groups, unless none has a signal",
        ),
        Metric(
            "response/length_mean",
            "tokens",
            "mean",
            f"sampled tokens of an episode: of the response, with one turn; {_SAMPLED}",
        ),
        Metric(
            "response/length_max",
            "tokens",
            "max",
            f"sampled tokens of an episode: of the response, with one turn; {_SAMPLED}",
        ),
        Metric("response/trained_length_mean", "tokens", "mean", "sampled tokens of an episode that is trained on"),
        Metric("response/length_positive_mean", "tokens", "mean", "sampled tokens of trained episodes with A > 0"),
        Metric("response/length_negative_mean", "tokens", "mean", "sampled tokens of trained episodes with A < 0"),
        Metric(
            "response/truncated_fraction",
            "fraction",
            "ratio",
            f"episodes whose last turn hit max_new_tokens, or that a limit ended; {_SAMPLED}",
        ),
        *(Metric(f"rollout/{name}", unit, "sum", what) for name, (unit, what) in ROLLOUT_COUNTS.items()),
        *(Metric(f"episode/{name}", unit, reduction, what) for name, (unit, reduction, what) in EPISODE.items()),
        Metric("rollout/staleness_mean", "steps", "mean", "weight versions between sampling and training, by token"),
        Metric("rollout/staleness_max", "steps", "max", "weight versions between sampling and training, by token"),
        Metric(
            "rollout/multi_version_fraction", "fraction", "ratio", "episodes with tokens of several weight versions"
        ),
        Metric("policy/entropy", "nats", "mean", "entropy of the next-token distribution at active tokens"),
        *(
            Metric(f"policy/{name}", unit, reduction, f"{what}; over all mini-batches")
            for name, (unit, reduction, what) in _POLICY.items()
        ),
        *(
            Metric(f"policy/mini_batch/<index>/{name}", unit, reduction, what)
            for name, (unit, reduction, what) in _POLICY.items()
        ),
        *summaries("policy/log_ratio", "nats", "the mean of trainer now - server: update + gap"),
        *(
            metric
            for part, what in LOG_RATIO_PARTS.items()
            for metric in summaries(f"policy/log_ratio/{part}", "nats", what)
        ),
        Metric(
            "policy/kl_reference",
            "nats",
            "mean",
            "KL(policy || reference) per token by kl.estimator, over all mini-batches",
        ),
        Metric("policy/ess", "fraction", "ratio", "effective share of sequences under weights s_i"),
        *(Metric(f"mismatch/{name}", unit, reduction, what) for name, (unit, reduction, what) in _MISMATCH.items()),
        *(Metric(f"mismatch/{name}", unit, reduction, what) for name, (unit, reduction, what) in _OF_RANGE.items()),
        *(
            Metric(f"mismatch/{part}/{name}", unit, reduction, f"{whose}: {what}")
            for part, whose in _PARTS.items()
            for name, (unit, reduction, what) in _SPLIT.items()
        ),
        *(Metric(f"mismatch/{name}", unit, reduction, what) for name, (unit, reduction, what) in CORRECTION.items()),
        Metric(
            "routing/changed_since_rollout",
            "fraction",
            "ratio",
            "(token, layer) pairs that the trainer sends to another set of experts than the server did",
        ),
        Metric(
            "routing/changed_since_old",
            "fraction",
            "ratio",
            "(token, layer) pairs that go to another set of experts in the last mini-batch than in the old pass",
        ),
        Metric(
            "routing/layer/<layer>/replaced_since_old",
            "fraction",
            "ratio",
            "choices of experts in the old pass that the last mini-batch does not make; layers count from 0",
        ),
        Metric(
            "routing/load_balancing_loss",
            "1",
            "mean",
            "E sum_i f_i P_i over layers and micro-batches, before its coefficient; 1 when even",
        ),
        Metric(
            "routing/z_loss",
            "nats^2",
            "mean",
            "squared log-sum-exp of router logits over layers and micro-batches, before its coefficient",
        ),
        Metric(
            "routing/load_max_over_mean",
            "1",
            "mean",
            "tokens of a layer's busiest expert over the mean expert's, over layers and optimizer steps, where the"
            " expert bias moves; 1 when even",
        ),
        Metric("optimizer/grad_norm", "1", "mean", "global gradient norm before clipping, over optimizer steps"),
        Metric("optimizer/grad_norm_max", "1", "max", "global gradient norm before clipping, over optimizer steps"),
        Metric("optimizer/lr", "1", "value", "learning rate of the last optimizer step"),
        Metric("optimizer/num_optimizer_steps", "steps", "value", "optimizer steps since the run's start"),
        Metric("optimizer/num_skipped", "steps", "sum", "optimizer steps skipped for a non-finite gradient"),
        *(Metric(f"critic/{name}", *parts) for name, parts in CRITIC.items()),
        Metric("lora/num_parameters", "1", "value", "numbers of all adapters, the only trained ones"),
        Metric("lora/norm", "1", "value", "Frobenius norm of (alpha / rank) B A over all adapters; 0 at B = 0"),
        Metric("publish/weight_version", "versions", "value", "version the servers hold after the step"),
        Metric("publish/num_bytes", "bytes", "value", "size of what was published"),
        Metric("publish/num_bytes_sent", "bytes", "value", "what all ranks gave to the servers' groups; 0 by disk"),
        Metric("publish/num_bytes_sent_per_rank", "bytes", "value", "of that, the most that one rank gave"),
        Metric("publish/num_open_requests", "requests", "value", "requests that were open when the publish began"),
        Metric("colocated/offload_seconds", "s", "value", "rank 0's state to the host, before servers take its GPU"),
        Metric("colocated/offloaded_bytes", "bytes", "value", "GPU memory that rank 0 freed by that"),
        Metric("colocated/release_seconds", "s", "value", "servers giving their GPU memory to the ranks"),
        Metric("colocated/onload_seconds", "s", "value", "rank 0's state back to its GPU"),
        Metric("colocated/resume_seconds", "s", "value", "servers taking their GPU memory again"),
        Metric("publish/pause_seconds", "s", "value", "how long the publish waited for open requests to end"),
        Metric(
            "speed/tokens_per_second",
            "tokens/s",
            "ratio",
            "prompt and response tokens of the batch over the step's time",
        ),
        Metric("speed/tokens_per_second_per_rank", "tokens/s", "ratio", "the same by trainer rank"),
        Metric("speed/generated_tokens_per_second", "tokens/s", "ratio", "response tokens over the generation's time"),
        Metric(
            "speed/packing_efficiency",
            "fraction",
            "ratio",
            "tokens of trajectories over positions computed, padding and filler included",
        ),
        Metric("time/step_seconds", "seconds", "value", "the whole step"),
        *(Metric(f"time/{phase}_seconds", "seconds", "value", what) for phase, what in PHASES.items()),
        Metric(
            "time/assemble/ahead_seconds",
            "seconds",
            "value",
            "work on the step's hand-out that was done while the step before it trained",
        ),
        Metric(
            "time/rollout/<part>_seconds", "seconds", "value", "a part of the rollout phase, as the collector saw it"
        ),
        Metric(
            "time/checkpoint/pause_seconds",
            "seconds",
            "value",
            "how long training paused for the save that was committed last",
        ),
        Metric("time/checkpoint/write_seconds", "seconds", "value", "from that save's start to its commit"),
        *(Metric(f"eval/{name}", *held_out) for name, held_out in {**HELD_OUT, **BESIDE}.items()),
        *(
            Metric(f"eval/set/<set>/{name}", unit, reduction, f"the same of one set: {what}")
            for name, (unit, reduction, what) in HELD_OUT.items()
        ),
        *(Metric(f"eval/set/<set>/{name}", *several) for name, several in HELD_OUT_OF_SEVERAL.items()),
        Metric("sft/loss", "nats", "mean", "negative log-prob of a demonstration's token"),
        Metric("sft/num_tokens", "tokens", "sum", "demonstration tokens learnt from"),
        Metric("data/epoch", "epochs", "value", "passes over the prompts, by prompts drawn"),
        Metric(
            "data/num_unreadable_answers",
            "rows",
            "value",
            "training rows left out because no reward can read their answers (`data.unreadable_answers: drop`)",
        ),
        Metric(
            "run/num_restarts",
            "restarts",
            "value",
            "automatic restarts of the run after a failure, so far",
        ),
        Metric(
            "metrics/num_non_finite",
            "metrics",
            "sum",
            "metrics of this line that were NaN or infinite, written as null",
        ),
        Metric(
            "metrics/num_sink_failures",
            "failures",
            "value",
            "failures of metrics.sinks since this start of the run; each is tried again",
        ),
    ]


CATALOGUE: dict[str, Metric] = {metric.name: metric for metric in _entries()}

_PATTERNS = [
    (
        re.compile(
            "".join(
                r"[A-Za-z0-9._-]+" if part.startswith("<") else re.escape(part) for part in re.split(r"(<\w+>)", name)
            )
        ),
        metric,
    )
    for name, metric in CATALOGUE.items()
    if "<" in name
]


@functools.lru_cache(maxsize=4096)
def find_metric(name: str) -> Metric:
    """The catalogue's entry for a name, patterns included. Raises ValueError naming the nearest entries."""
    if name in CATALOGUE and "<" not in name:
        return CATALOGUE[name]
    for pattern, metric in _PATTERNS:
        if pattern.fullmatch(name):
            return metric
    near = difflib.get_close_matches(name, CATALOGUE, n=3)
    raise ValueError(
        f"metric {name!r} is not in the catalogue" + (f"; did you mean {', '.join(near)}?" if near else "")
    )
