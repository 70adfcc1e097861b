"""Every metric: its name, unit, reduction to a step's one value, and meaning. This is the only place that has them.

`find_metric` looks up a name. A name with `<placeholder>` is a pattern, in which the placeholder stands for one or more
of letters, digits, `.`, `_` and `-`. The tables by area come first, and `_entries` at the end puts them together. The
values are computed where their inputs are known. `writer.py` writes them. Needs no torch.
"""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass
from typing import Literal

import numpy as np

Reduction = Literal["mean", "sum", "min", "max", "sd", "quantile", "ratio", "value"]


@dataclass(frozen=True)
class Metric:
    """An entry of the catalogue. `reduction`: how the numbers of trajectories, tokens, mini-batches or ranks become the
    step's one value (`ratio`: the sums are divided once; `value`: there is only one number).
    """

    name: str
    unit: str
    reduction: Reduction
    description: str


# The bins of response lengths by which metrics are split: the fewest tokens of each, by the bin's part of a metric's
# name. They are fixed, so that runs and models can be compared. Each bin is four times as wide as the one before.
LENGTH_BINS: dict[str, int] = {
    "1-63": 1,
    "64-255": 64,
    "256-1023": 256,
    "1024-4095": 1024,
    "4096-16383": 4096,
    "16384-up": 16384,
}


def rows_by_length(lengths: np.ndarray) -> dict[str, np.ndarray]:
    """For each bin that has any of `lengths` [N], numbers of tokens, which of them it has: [N] bool by the bin's name.
    0 tokens are in no bin.
    """
    place = np.searchsorted(np.array(list(LENGTH_BINS.values())), lengths, side="right") - 1
    return {name: place == index for index, name in enumerate(LENGTH_BINS) if (place == index).any()}


# The counts and waits of a rollout batch, `rollout/<name>`: unit and meaning. All are summed.
ROLLOUT_COUNTS = {
    "num_trajectories": ("trajectories", "episodes that ended, including failed ones; without branches each is a row"),
    "num_turns": ("turns", "turns sampled"),
    "num_branches": ("rows", "rows of episodes beyond their first: branches of their trees"),
    "num_branches_<cause>": (
        "branches",
        "branches begun, by cause: the agent edited its history (edited), the template rewrote it (template), the agent"
        " asked again for a turn that it had (resampled), or the history has answers of other models (not_ours)",
    ),
    "num_tool_calls": ("calls", "calls of tools"),
    "num_tool_errors": ("calls", "calls of tools that were answered with an error"),
    "num_broken_calls": ("calls", "calls in sampled text that could not be read; they stay content"),
    "num_stop_strings": ("turns", "turns that a text ended which the agent named (`stop`)"),
    "num_replayed_turns": ("turns", "turns answered from the record, for agents that began again"),
    "num_episode_failures": ("episodes", "episodes whose own code failed, of all kinds; they are not trained on"),
    "num_episode_failures_<kind>": ("episodes", "episodes that failed, by kind"),
    "num_episodes_redrawn": (
        "episodes",
        "samples that the infrastructure lost before their first turn and that were replaced by another; all kinds",
    ),
    "num_episodes_redrawn_<kind>": ("episodes", "samples that were replaced, by what lost them"),
    "num_endpoint_retries": (
        "requests",
        "requests of agents that joined the turn of an earlier one: nothing sampled twice",
    ),
    "num_endpoint_unheard": ("turns", "turns whose agent had gone before they ended"),
    "num_endpoint_errors": ("requests", "requests of agents that were refused"),
    "num_ignored_sampling": ("requests", "requests of agents that asked for other sampling settings and got the run's"),
    "num_workers_recycled": (
        "processes",
        "processes of episodes that were replaced since the last batch, for any reason",
    ),
    "num_processes_ended": (
        "processes",
        "processes that episodes had started and left running, and that were ended with them, since the last batch",
    ),
    "num_episodes_restarted": ("episodes", "episodes that began again in another process, from their record"),
    "num_prompt_tokens_read": (
        "tokens",
        "tokens of the contexts of first turns, the prompts, if servers say what their prefix caches had of them",
    ),
    "num_prompt_tokens_cached": ("tokens", "those of them that a server's prefix cache had"),
    "num_history_tokens_read": ("tokens", "the same of the contexts of later turns, each the whole history"),
    "num_history_tokens_cached": ("tokens", "those of them that a server's prefix cache had"),
    "num_sessions_moved": ("turns", "turns sampled on another server than the one that holds their context"),
    "num_prompts_sampled": ("prompts", "prompts asked for, refills included"),
    "num_groups_filtered": (
        "groups",
        "groups dropped by the filter: constant ones, or those that rollout.group_filter refused",
    ),
    "num_groups_unscored": (
        "groups",
        "groups left out because fewer than two of their responses could be scored (with a critic or a batch baseline:"
        " none)",
    ),
    "num_groups_missing": (
        "groups",
        "groups that are missing from prompts_per_step: filtered or unscored, and not replaced",
    ),
    "num_truncated": ("trajectories", "episodes with a turn cut at max_new_tokens at their end, or ended by a limit"),
    "num_generated_tokens": ("tokens", "tokens in completed responses"),
    "num_retries": ("requests", "requests that were retried"),
    "num_request_failures": ("requests", "requests that failed, of all kinds"),
    "num_request_failures_<kind>": ("requests", "requests that failed, by kind"),
    "num_aborted_requests": (
        "requests",
        "requests that their server cut short and that were continued from their tokens",
    ),
    "num_moved_responses": (
        "responses",
        "times that a response left a slow server and continued, from its tokens, on another",
    ),
    "num_drained_responses": ("responses", "times that a response left a server that was asked to stop for another"),
    "num_paused_responses": ("responses", "times that a response was ended for a publish and continued after it"),
    "num_partial_episodes": ("episodes", "episodes of the batch whose tokens have several weight versions"),
    "num_groups_in_flight": ("groups", "groups admitted for later steps when the batch was complete"),
    "trainer_wait_seconds": ("seconds", "time from asking for the batch until it was complete"),
    "straggler_wait_seconds": ("seconds", "the part of trainer_wait_seconds in which only one group was missing"),
    "servers_idle_seconds": ("seconds", "time without any request since the last batch, mean over servers"),
    "num_continued_requests": ("requests", "requests that continued a response from its tokens, for any reason"),
    "num_discarded_tokens": (
        "tokens",
        (
            "tokens of responses that could not be continued exactly, because other weights sampled them or because"
            " they lack their experts"
        ),
    ),
    "num_teacher_retries": ("requests", "requests to a teacher's server (teacher.url) that failed and were sent again"),
    "num_registration_errors": ("readings", "reads of a server's registration that failed in the file system"),
    "num_reward_failures": (
        "trajectories",
        "trajectories whose scoring failed (exception, NaN, deadline, crash); they are not trained on",
    ),
    "num_response_faults": (
        "scorings",
        "scorings that a built-in reward function could not do because of the response, whose reward is then 0; all"
        " causes",
    ),
    "num_response_faults_<cause>": (
        "scorings",
        "the same by cause: it took longer than its deadline (time), needed more memory than its bound (memory),"
        " crashed the process (crash), or could not read the response (exception)",
    ),
    "num_servers_given_up": (
        "servers",
        "servers that failed more often than server.max_restarts allows and are not started again",
    ),
}


EPISODE: dict[str, tuple[str, Reduction, str]] = {
    "turns_mean": ("turns", "mean", "turns of an episode: answers of the policy"),
    "turns_max": ("turns", "max", "turns of an episode: answers of the policy"),
    "rows_mean": ("rows", "mean", "rows that an episode is trained as: branches, or turns with objective.scope turn"),
    "context_tokens_mean": ("tokens", "mean", "an episode's longest row, prompt included"),
    "context_tokens_max": ("tokens", "max", "an episode's longest row, prompt included"),
    "masked_fraction": ("fraction", "ratio", "tokens after a row's prompt that are not sampled, or not trained in it"),
}
# Means over a sequence, in nats. `update` and `gap` add up to the whole log-ratio. With diagnostics.exact_staleness,
# `staleness` and `mismatch` add up to `gap`.
LOG_RATIO_PARTS = {
    "update": "mean(current - old): log s, how far this step's updates moved the policy",
    "gap": "mean(old - server): the difference between the trainer at the step's start and the server that sampled",
    "staleness": "mean(old - the token's own version), both by the trainer: how far the policy moved since sampling",
    "mismatch": "mean(the token's own version, by the trainer - server): the engines' part of the gap",
}
CORRECTION: dict[str, tuple[str, Reduction, str]] = {
    "acted_fraction": ("fraction", "ratio", "sequences that mismatch.correction dropped or whose weight it cut"),
    "weight_mean": ("1", "mean", "correction weight of kept sequences"),
    "token_dropped_fraction": ("fraction", "ratio", "tokens that a correction of tokens drops"),
    "token_cut_fraction": ("fraction", "ratio", "tokens whose weight token_tis cuts at mismatch.upper"),
    "token_weight_mean": ("1", "mean", "weight of a token under a correction of tokens, dropped ones included"),
    "centre": (
        "nats",
        "value",
        "m, mean d per token of the responses inside their band: what the correction is centred on",
    ),
    "deviation_abs_max": ("nats", "max", "largest sqrt(L) |mean d - m| of a sequence; mismatch.bound_nats bounds it"),
    "num_token_vetoes": ("tokens", "sum", "tokens with |d| above mismatch.token_veto_nats"),
    "num_vetoed_sequences": ("sequences", "sum", "sequences dropped because of such a token"),
    "num_segments": ("segments", "sum", "version segments of at least mismatch.segment_tokens, judged on their own"),
    "num_segment_decisions": (
        "sequences",
        "sum",
        "sequences dropped or cut only because of a segment, within the bound as a whole",
    ),
}

CRITIC: dict[str, tuple[str, Reduction, str]] = {
    "value_loss": ("reward^2", "mean", "the critic's loss over mini-batches"),
    "explained_variance": (
        "1",
        "ratio",
        "1 - Var(R - V) / Var(R) over tokens, with the V that the advantages were computed with: 1 is perfect, 0 is no"
        " better than the mean",
    ),
    "value_mean": ("reward", "mean", "value of the state before a token that the advantages were computed with"),
    "return_mean": ("reward", "mean", "return R = A + V of a token, which the critic is trained on"),
    "clip_fraction": (
        "fraction",
        "ratio",
        "tokens whose value moved beyond critic.clip_range and that have no gradient",
    ),
    "kl_reference": (
        "nats",
        "mean",
        "log policy - log reference per token; critic.kl_coefficient is its weight",
    ),
    "grad_norm": ("1", "mean", "the critic's global gradient norm before clipping, over its optimizer steps"),
    "grad_norm_max": ("1", "max", "the critic's global gradient norm before clipping, over its optimizer steps"),
    "lr": ("1", "value", "learning rate of the critic's last optimizer step"),
    "num_optimizer_steps": ("steps", "value", "the critic's optimizer steps since the run's start"),
    "num_skipped": ("steps", "sum", "the critic's optimizer steps skipped for a non-finite gradient"),
}

_TEACHER: dict[str, tuple[str, Reduction, str]] = {
    "divergence": ("nats", "mean", "KL(policy || teacher) per position over what teacher.divergence compares"),
    "reverse_kl": ("nats", "mean", "log policy - log teacher per sampled token: KL(policy || teacher) of that token"),
    "advantage_size": (
        "1",
        "mean",
        "|A| of a token that is the teacher's: teacher.coefficient x |log policy - log teacher|",
    ),
    "token_fraction": (
        "fraction",
        "ratio",
        "tokens that have a teacher (teacher.by_source); the others enter no other",
    ),
    "advantage_share": ("fraction", "ratio", "the teacher's part of |A|, over all tokens; the rest is the rewards'"),
    "clip_fraction": (
        "fraction",
        "ratio",
        "tokens that the teacher's own term clipped, if GSPO has no advantages of tokens",
    ),
}

# `eval/<name>` is of the first held-out set, and `eval/set/<set>/<name>` of each set.
HELD_OUT: dict[str, tuple[str, Reduction, str]] = {
    "accuracy": ("fraction", "mean", "held-out samples that are correct, of those that could be scored (avg@k)"),
    "accuracy_standard_error": ("fraction", "value", "standard error of eval/accuracy, from the spread of prompts"),
    "reward_mean": ("reward", "mean", "reward over held-out samples that could be scored"),
    "response_length_mean": ("tokens", "mean", "held-out response length"),
    "turns_mean": ("turns", "mean", "turns of a held-out episode"),
    "truncated_fraction": ("fraction", "ratio", "held-out episodes cut at max_new_tokens or by a limit"),
    "num_samples": ("samples", "sum", "held-out samples"),
    "num_reward_failures": ("samples", "sum", "held-out samples whose scoring failed; they are in no mean"),
}

# About an asynchronous evaluation (`eval.blocking: false`), in the line of the step in which its results arrived.
ASYNC_EVALUATION: dict[str, tuple[str, Reduction, str]] = {
    "measured_step": (
        "step",
        "value",
        "the step whose weights the eval/ numbers of this line measure, if it is not the line's own step",
    ),
    "beside/seconds": ("seconds", "value", "how long that evaluation took while training went on"),
    "beside/num_servers": ("servers", "value", "servers that it took from training"),
    "beside/num_begun": ("evaluations", "value", "how often it was begun: more than once if it lost its servers"),
    "beside/num_steps": ("steps", "value", "steps that were trained while it ran"),
}

# Only of sets with several samples per prompt.
HELD_OUT_SEVERAL_SAMPLES: dict[str, tuple[str, Reduction, str]] = {
    "pass_at/<k>": (
        "fraction",
        "mean",
        "probability that at least one of k samples is correct: unbiased, over prompts with k scored samples",
    ),
    "pass_at_standard_error/<k>": ("fraction", "value", "its standard error, from the spread of prompts"),
    "majority": ("fraction", "mean", "prompts for which the most frequent answer is correct (maj@k)"),
    "majority_standard_error": ("fraction", "value", "its standard error, from the spread of prompts"),
}


PHASES = {
    "rollout": "waiting for the rollout batch: generation and scoring",
    "assemble": "advantages, packing, moving shards to their ranks",
    "old_log_probs": "the trainer's log-probs at the start of the rollout batch",
    "reference_log_probs": "log-probs under the reference policy, if there is a KL term",
    "teacher": "log-probs under the teacher, if there is one",
    "critic": "values of the rollout batch, and the critic's optimizer steps (algorithm: ppo)",
    "train": "forward, backward and optimizer steps of all mini-batches",
    "report": "adding up metrics over ranks and writing them",
    "share": "moving GPU memory between ranks and servers (cluster.colocated)",
    "publish": "sending weights to the servers and verifying them",
    "eval": "held-out evaluation",
    "checkpoint": "saving after the previous step",
    "other": "the step's time outside all phases",
}

_SUMMARIES: dict[str, Reduction] = {
    "mean": "mean",
    "sd": "sd",
    "min": "min",
    "max": "max",
    "p1": "quantile",
    "p99": "quantile",
}

_SAMPLED = "over all that was sampled for the step and could be scored"
_WEIGHED = "with a token ratio, a sequence counts by its share of tokens that are"

_POLICY: dict[str, tuple[str, Reduction, str]] = {
    "objective": ("reward", "sum", "J; the loss is -J"),
    "num_sequences": (
        "sequences",
        "sum",
        "sequences with an active token; the branches of an episode count once together",
    ),
    "num_tokens": ("tokens", "sum", "active response tokens trained on"),
    "kept_fraction": ("fraction", "ratio", "sequences not rejected by the mismatch correction"),
    "clip_fraction": (
        "fraction",
        "ratio",
        f"sequences whose ratio was clipped (docs/objectives.md says what each algorithm clips); {_WEIGHED}",
    ),
    "clip_fraction_high": (
        "fraction",
        "ratio",
        f"sequences clipped above the range, with A > 0 (cispo: of either sign); {_WEIGHED}",
    ),
    "clip_fraction_low": (
        "fraction",
        "ratio",
        f"sequences clipped below the range, with A < 0 (cispo: of either sign); {_WEIGHED}",
    ),
    "dual_clip_fraction": ("fraction", "ratio", f"sequences bounded by the dual clip; {_WEIGHED}"),
    "clip_fraction_positive": (
        "fraction",
        "ratio",
        f"sequences that were clipped, of those with A > 0; {_WEIGHED}",
    ),
    "clip_fraction_negative": (
        "fraction",
        "ratio",
        f"sequences that were clipped, of those with A < 0; {_WEIGHED}",
    ),
    "token_clip_fraction": ("fraction", "ratio", "clip_fraction weighted by length"),
    "token_clip_fraction_high": ("fraction", "ratio", "clip_fraction_high weighted by length"),
    "token_clip_fraction_low": ("fraction", "ratio", "clip_fraction_low weighted by length"),
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
    "chi2_sequence_log1p": ("nats", "mean", "log(1 + chi2_sequence), which is finite even if chi2_sequence overflows"),
    "chi2_sequence_length_normalised": ("1", "mean", "mean(w^2) - 1 of w = exp(mean d)"),
    "token_truncated_ratio_mean": ("1", "mean", "mean min(e^d, 2) per token"),
    "token_truncated_fraction": ("fraction", "ratio", "tokens with e^d above 2"),
    "ess_token": ("fraction", "ratio", "effective share of tokens under weights e^d"),
    "ess_sequence": ("fraction", "ratio", "effective share of sequences under weights exp(sum d)"),
    "icepop_kept_fraction": ("fraction", "ratio", "tokens with e^d in [0.5, 5]"),
}

# Compared with the clip range as the algorithm defines it (`make_band` in config/derived.py). Absent if the algorithm
# clips nothing.
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

# The mismatch of parts of the responses: by length, and by the sign of A. Measured before any update.
_PARTS = {
    **{f"length/{name}": f"responses of {name} tokens" for name in LENGTH_BINS},
    "advantage/positive": "responses with A > 0",
    "advantage/negative": "responses with A < 0",
}
_OF_PART: dict[str, tuple[str, Reduction, str]] = {
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
            "reward over the episodes trained on, without the groups that rollout.filter_constant_groups dropped",
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
            "the same of the groups trained on: 0 with rollout.filter_constant_groups, unless no group has a signal",
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
        Metric(
            "response/kept_tokens_mean",
            "tokens",
            "mean",
            f"tokens that a token was sampled from, by token, with a finite rollout.top_k; {_SAMPLED}",
        ),
        Metric("response/kept_tokens_max", "tokens", "max", f"the most tokens that one was sampled from; {_SAMPLED}"),
        *(Metric(f"rollout/{name}", unit, "sum", what) for name, (unit, what) in ROLLOUT_COUNTS.items()),
        Metric(
            "rollout/cached_prompt_fraction",
            "fraction",
            "ratio",
            "share of prompts' tokens that a server's prefix cache had, because it has sampled another response to the"
            " prompt; the trainer's side is `speed/shared_prefix_fraction`",
        ),
        Metric(
            "rollout/cached_history_fraction",
            "fraction",
            "ratio",
            "share of the tokens before later turns of episodes that a server's prefix cache had",
        ),
        *(Metric(f"episode/{name}", unit, reduction, what) for name, (unit, reduction, what) in EPISODE.items()),
        Metric("rollout/staleness_mean", "steps", "mean", "weight versions between sampling and training, by token"),
        Metric("rollout/staleness_max", "steps", "max", "weight versions between sampling and training, by token"),
        Metric(
            "rollout/multi_version_fraction", "fraction", "ratio", "episodes with tokens of several weight versions"
        ),
        Metric("policy/entropy", "nats", "mean", "entropy of the next-token distribution at active tokens"),
        Metric(
            "policy/covariance_clip_fraction",
            "fraction",
            "ratio",
            "tokens that clip_cov left out, over those of all mini-batches; about objective.covariance_share",
        ),
        Metric(
            "policy/covariance_candidate_fraction",
            "fraction",
            "ratio",
            "tokens whose covariance of advantage and log-prob is in clip_cov's range",
        ),
        Metric(
            "policy/kept_mass",
            "fraction",
            "mean",
            "probability under the trainer's old policy that a token is in the set that the sampler kept, by token;"
            " with a finite rollout.top_k",
        ),
        Metric("policy/objective", "reward", "mean", "J, the mean over mini-batches; the loss of each is -J"),
        *(
            Metric(f"policy/{name}", unit, reduction, f"{what}; over all mini-batches")
            for name, (unit, reduction, what) in _POLICY.items()
            if name != "objective"
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
        Metric(
            "policy/entropy_bonus",
            "1",
            "mean",
            "objective.entropy_coefficient x the entropy as J averages it",
        ),
        *(Metric(f"teacher/{name}", unit, reduction, what) for name, (unit, reduction, what) in _TEACHER.items()),
        Metric("policy/ess", "fraction", "ratio", "effective share of sequences under weights s_i"),
        *(Metric(f"mismatch/{name}", unit, reduction, what) for name, (unit, reduction, what) in _MISMATCH.items()),
        *(Metric(f"mismatch/{name}", unit, reduction, what) for name, (unit, reduction, what) in _OF_RANGE.items()),
        *(
            Metric(f"mismatch/{part}/{name}", unit, reduction, f"{whose}: {what}")
            for part, whose in _PARTS.items()
            for name, (unit, reduction, what) in _OF_PART.items()
        ),
        *(Metric(f"mismatch/{name}", unit, reduction, what) for name, (unit, reduction, what) in CORRECTION.items()),
        Metric(
            "routing/changed_since_rollout",
            "fraction",
            "ratio",
            "(token, layer) pairs that the trainer sends to a different set of experts than the server did",
        ),
        Metric(
            "routing/changed_since_old",
            "fraction",
            "ratio",
            "(token, layer) pairs that go to a different set of experts in the last mini-batch than in the old pass",
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
        Metric(
            "routing/rank_load_max_over_mean",
            "1",
            "mean",
            "tokens that the busiest expert-parallel rank receives over the mean rank's, over layers and packs of the"
            " training passes; 1 when even",
        ),
        Metric("routing/rank_load_max", "1", "max", "the largest of these ratios in the step"),
        Metric("optimizer/grad_norm", "1", "mean", "global gradient norm before clipping, over optimizer steps"),
        Metric("optimizer/grad_norm_max", "1", "max", "global gradient norm before clipping, over optimizer steps"),
        Metric("optimizer/lr", "1", "value", "learning rate of the last optimizer step"),
        Metric("optimizer/num_optimizer_steps", "steps", "value", "optimizer steps since the run's start"),
        Metric("optimizer/num_skipped", "steps", "sum", "optimizer steps skipped for a non-finite gradient"),
        *(Metric(f"critic/{name}", *parts) for name, parts in CRITIC.items()),
        Metric("lora/num_parameters", "1", "value", "parameters of all adapters, the only ones that are trained"),
        Metric("lora/norm", "1", "value", "Frobenius norm of (alpha / rank) B A over all adapters; 0 at B = 0"),
        Metric("publish/weight_version", "versions", "value", "version the servers hold after the step"),
        Metric("publish/num_bytes", "bytes", "value", "size of what was published"),
        Metric(
            "publish/num_bytes_sent",
            "bytes",
            "value",
            "what all ranks sent to the servers' groups; 0 if weights go through the disk",
        ),
        Metric("publish/num_bytes_sent_per_rank", "bytes", "value", "the most that one rank sent"),
        Metric("publish/num_bytes_hashed", "bytes", "value", "what all ranks hashed of it for its verification"),
        Metric(
            "publish/hash_seconds",
            "s",
            "value",
            "hashing on the rank that took longest, most of it while others are sent",
        ),
        Metric(
            "publish/num_tensors_compared",
            "1",
            "value",
            "tensors of a server that were compared: all, or a share with publish.verify_all_every",
        ),
        Metric("publish/is_full", "1", "value", "1 if all values were sent, 0 if only those that changed"),
        Metric(
            "publish/changed_share",
            "1",
            "value",
            "share of the values in the servers' dtype that a delta publish changed (publish.full_every); 1 if full",
        ),
        Metric("publish/num_delta_bytes", "bytes", "value", "size of what a delta publish sent or wrote; 0 if full"),
        Metric("publish/num_fallbacks", "1", "value", "1 if no server took what changed, so that all values were sent"),
        Metric("publish/num_open_requests", "requests", "value", "requests that were open when the publish began"),
        Metric(
            "colocated/offload_seconds", "s", "value", "moving rank 0's state to the host before servers take its GPU"
        ),
        Metric("colocated/offloaded_bytes", "bytes", "value", "GPU memory that rank 0 freed by doing so"),
        Metric("colocated/release_seconds", "s", "value", "servers giving their GPU memory to the ranks"),
        Metric("colocated/onload_seconds", "s", "value", "moving rank 0's state back to its GPU"),
        Metric("colocated/resume_seconds", "s", "value", "servers taking their GPU memory back"),
        Metric("publish/pause_seconds", "s", "value", "how long the publish waited for open requests to end"),
        Metric(
            "speed/tokens_per_second",
            "tokens/s",
            "ratio",
            "prompt and response tokens of the batch over the step's time",
        ),
        Metric("speed/tokens_per_second_per_rank", "tokens/s", "ratio", "the same per trainer rank"),
        Metric("speed/generated_tokens_per_second", "tokens/s", "ratio", "response tokens over the generation's time"),
        Metric(
            "speed/packing_efficiency",
            "fraction",
            "ratio",
            "tokens of trajectories over positions computed, padding and filler included; a shared token counts once",
        ),
        Metric(
            "speed/shared_prefix_fraction",
            "fraction",
            "ratio",
            "share of the rows' positions that were not computed because a row of the same pack begins alike"
            " (`batch.share_prefixes`)",
        ),
        Metric(
            "speed/num_repeated_prefixes",
            "prefixes",
            "sum",
            "how often a prompt was computed again because its rows were in several packs of a mini-batch",
        ),
        Metric("time/step_seconds", "seconds", "value", "the whole step"),
        *(Metric(f"time/{phase}_seconds", "seconds", "value", what) for phase, what in PHASES.items()),
        Metric(
            "time/assemble/ahead_seconds",
            "seconds",
            "value",
            "work on the step's batch and messages that was done while the step before it trained",
        ),
        Metric(
            "time/rollout/<part>_seconds", "seconds", "value", "a part of the rollout phase, measured by the collector"
        ),
        Metric(
            "time/checkpoint/pause_seconds",
            "seconds",
            "value",
            "how long training paused for the save that was committed last",
        ),
        Metric("time/checkpoint/write_seconds", "seconds", "value", "from that save's start to its commit"),
        *(Metric(f"eval/{name}", *held_out) for name, held_out in {**HELD_OUT, **ASYNC_EVALUATION}.items()),
        *(
            Metric(f"eval/set/<set>/{name}", unit, reduction, f"the same of one set: {what}")
            for name, (unit, reduction, what) in HELD_OUT.items()
        ),
        *(Metric(f"eval/set/<set>/{name}", *several) for name, several in HELD_OUT_SEVERAL_SAMPLES.items()),
        Metric("sft/loss", "nats", "mean", "negative log-prob of a demonstration's token"),
        Metric("sft/num_tokens", "tokens", "sum", "demonstration tokens that were trained on"),
        Metric("data/epoch", "epochs", "value", "passes over the prompts, counted by prompts drawn"),
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
            "failures of metrics.sinks since this start of the run; each failed write is tried again",
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
    """The catalogue's entry for a name, which may match a pattern. Raises ValueError naming the nearest entries."""
    if name in CATALOGUE and "<" not in name:
        return CATALOGUE[name]
    for pattern, metric in _PATTERNS:
        if pattern.fullmatch(name):
            return metric
    near = difflib.get_close_matches(name, CATALOGUE, n=3)
    raise ValueError(
        f"metric {name!r} is not in the catalogue" + (f"; did you mean {', '.join(near)}?" if near else "")
    )
