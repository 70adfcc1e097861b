"""The tables of the catalogue by area: what a name's last part means, with its unit and reduction.

`catalogue.py` adds the names that belong to no table. Here are those of which several areas or several
parts of a batch have the same. First come the entry itself and the bins of response lengths. Needs no torch.
"""

from __future__ import annotations

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

TEACHER: dict[str, tuple[str, Reduction, str]] = {
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

SUMMARIES: dict[str, Reduction] = {
    "mean": "mean",
    "sd": "sd",
    "min": "min",
    "max": "max",
    "p1": "quantile",
    "p99": "quantile",
}

SAMPLED = "over all that was sampled for the step and could be scored"
WEIGHED = "with a token ratio, a sequence counts by its share of tokens that are"

POLICY: dict[str, tuple[str, Reduction, str]] = {
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
        f"sequences whose ratio was clipped (docs/objectives.md says what each algorithm clips); {WEIGHED}",
    ),
    "clip_fraction_high": (
        "fraction",
        "ratio",
        f"sequences clipped above the range, with A > 0 (cispo: of either sign); {WEIGHED}",
    ),
    "clip_fraction_low": (
        "fraction",
        "ratio",
        f"sequences clipped below the range, with A < 0 (cispo: of either sign); {WEIGHED}",
    ),
    "dual_clip_fraction": ("fraction", "ratio", f"sequences bounded by the dual clip; {WEIGHED}"),
    "clip_fraction_positive": (
        "fraction",
        "ratio",
        f"sequences that were clipped, of those with A > 0; {WEIGHED}",
    ),
    "clip_fraction_negative": (
        "fraction",
        "ratio",
        f"sequences that were clipped, of those with A < 0; {WEIGHED}",
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

MISMATCH: dict[str, tuple[str, Reduction, str]] = {
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

# Compared with the clip range as the algorithm defines it (`make_band` in config/clip_range.py). Absent if the
# algorithm clips nothing.
OF_RANGE: dict[str, tuple[str, Reduction, str]] = {
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
PARTS = {
    **{f"length/{name}": f"responses of {name} tokens" for name in LENGTH_BINS},
    "advantage/positive": "responses with A > 0",
    "advantage/negative": "responses with A < 0",
}
OF_PART: dict[str, tuple[str, Reduction, str]] = {
    "num_sequences": ("sequences", "sum", "their number"),
    "log_s_mean": ("nats", "mean", "mean of log s = mean d, trainer - server"),
    "log_s_sd": ("nats", "sd", "sd of log s = mean d, trainer - server"),
    "k3": ("nats", "mean", "KL(server || trainer) per token, mean(e^d - 1 - d)"),
    **OF_RANGE,
    "kept_fraction": ("fraction", "ratio", "not dropped by mismatch.correction"),
}
