"""Every metric: its name, unit, reduction to a step's one value, and meaning.

`find_metric` looks up a name. A name with `<placeholder>` is a pattern, in which the placeholder stands for one or more
of letters, digits, `.`, `_` and `-`. `_entries` lists the metrics; of a group of names with the same beginning,
`tables.py` has the table. These two files are the only place that has them. The values are computed where their inputs
are known. `writer.py` writes them. Needs no torch.
"""

from __future__ import annotations

import difflib
import functools
import re

from gspo_mega.metrics.tables import (
    ASYNC_EVALUATION,
    CORRECTION,
    CRITIC,
    EPISODE,
    HELD_OUT,
    HELD_OUT_SEVERAL_SAMPLES,
    LOG_RATIO_PARTS,
    MISMATCH,
    OF_PART,
    OF_RANGE,
    PARTS,
    PHASES,
    POLICY,
    ROLLOUT_COUNTS,
    SAMPLED,
    SUMMARIES,
    TEACHER,
    Metric,
)


def _entries() -> list[Metric]:
    def summaries(prefix: str, unit: str, what: str) -> list[Metric]:
        return [
            Metric(f"{prefix}/{key}", unit, reduction, f"{key} over sequences of {what}")
            for key, reduction in SUMMARIES.items()
        ]

    return [
        Metric("reward/mean", "reward", "mean", f"reward over episodes; {SAMPLED}"),
        Metric("reward/sd", "reward", "sd", f"reward over episodes; {SAMPLED}"),
        Metric("reward/standard_error", "reward", "value", "standard error of reward/mean, from the spread of prompts"),
        Metric(
            "reward/trained_mean",
            "reward",
            "mean",
            "reward over the episodes trained on, without the groups that rollout.filter_constant_groups dropped",
        ),
        Metric("reward/source/<source>", "reward", "mean", f"reward over one source's episodes; {SAMPLED}"),
        Metric(
            "reward/function/<function>", "reward", "mean", f"one reward function's own value, unweighted; {SAMPLED}"
        ),
        Metric("groups/num_groups", "groups", "sum", "groups trained on"),
        Metric(
            "groups/constant_fraction",
            "fraction",
            "ratio",
            f"groups whose rewards are all equal: no signal; {SAMPLED} (only with advantages relative to groups)",
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
            f"sampled tokens of an episode: of the response, with one turn; {SAMPLED}",
        ),
        Metric(
            "response/length_max",
            "tokens",
            "max",
            f"sampled tokens of an episode: of the response, with one turn; {SAMPLED}",
        ),
        Metric("response/trained_length_mean", "tokens", "mean", "sampled tokens of an episode that is trained on"),
        Metric("response/length_positive_mean", "tokens", "mean", "sampled tokens of trained episodes with A > 0"),
        Metric("response/length_negative_mean", "tokens", "mean", "sampled tokens of trained episodes with A < 0"),
        Metric(
            "response/truncated_fraction",
            "fraction",
            "ratio",
            f"episodes whose last turn hit max_new_tokens, or that a limit ended; {SAMPLED}",
        ),
        Metric(
            "response/kept_tokens_mean",
            "tokens",
            "mean",
            f"tokens that a token was sampled from, by token, with a finite rollout.top_k; {SAMPLED}",
        ),
        Metric("response/kept_tokens_max", "tokens", "max", f"the most tokens that one was sampled from; {SAMPLED}"),
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
            for name, (unit, reduction, what) in POLICY.items()
            if name != "objective"
        ),
        *(
            Metric(f"policy/mini_batch/<index>/{name}", unit, reduction, what)
            for name, (unit, reduction, what) in POLICY.items()
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
        *(Metric(f"teacher/{name}", unit, reduction, what) for name, (unit, reduction, what) in TEACHER.items()),
        Metric("policy/ess", "fraction", "ratio", "effective share of sequences under weights s_i"),
        *(Metric(f"mismatch/{name}", unit, reduction, what) for name, (unit, reduction, what) in MISMATCH.items()),
        *(Metric(f"mismatch/{name}", unit, reduction, what) for name, (unit, reduction, what) in OF_RANGE.items()),
        *(
            Metric(f"mismatch/{part}/{name}", unit, reduction, f"{whose}: {what}")
            for part, whose in PARTS.items()
            for name, (unit, reduction, what) in OF_PART.items()
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
        Metric(
            "checkpoint/peer_bytes",
            "bytes",
            "value",
            "the largest rank's copy in memory of the last step of which every rank's arrived at its neighbour"
            " (`checkpoint.peer_copies`)",
        ),
        Metric(
            "time/checkpoint/peer_pause_seconds", "seconds", "value", "how long training paused for that copy, at most"
        ),
        Metric(
            "time/checkpoint/peer_seconds",
            "seconds",
            "value",
            "from the step's end until the last rank's copy was compared by checksum at its neighbour",
        ),
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
            "run/num_standby_ranks",
            "ranks",
            "value",
            "ranks of this start that began in a process with all imports done (`train.standby_processes`)",
        ),
        Metric(
            "run/num_kept_servers",
            "servers",
            "value",
            "the policy's servers that this start took over from the one before (`train.keep_servers`)",
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
