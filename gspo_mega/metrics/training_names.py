"""Names of metrics about what a step trains on: its episodes, its log-ratios in parts, the correction of the gap.

Parts of the catalogue, by name: unit, reduction, meaning.
"""

from __future__ import annotations

from typing import Literal

Reduction = Literal["mean", "sum", "min", "max", "sd", "quantile", "ratio", "value"]

EPISODE: dict[str, tuple[str, Reduction, str]] = {
    "turns_mean": ("turns", "mean", "turns of an episode: answers of the policy"),
    "turns_max": ("turns", "max", "turns of an episode: answers of the policy"),
    "rows_mean": ("rows", "mean", "rows that an episode is trained as: branches, or turns with objective.scope turn"),
    "context_tokens_mean": ("tokens", "mean", "an episode's longest row, prompt included"),
    "context_tokens_max": ("tokens", "max", "an episode's longest row, prompt included"),
    "masked_fraction": ("fraction", "ratio", "tokens behind a row's prompt that are not sampled, or not trained in it"),
}
# Means over a sequence, nats. The first two add up to all of it; with diagnostics.exact_staleness the last two to gap.
LOG_RATIO_PARTS = {
    "update": "mean(current - old): log s, what this step's updates moved",
    "gap": "mean(old - server): what is between the trainer at the step's start and who sampled",
    "staleness": "mean(old - the token's own version), both by the trainer: what the policy moved since it was sampled",
    "mismatch": "mean(the token's own version, by the trainer - server): the engines' part of the gap",
}
CORRECTION: dict[str, tuple[str, Reduction, str]] = {
    "acted_fraction": ("fraction", "ratio", "sequences that mismatch.correction dropped or whose weight it cut"),
    "weight_mean": ("1", "mean", "correction weight of kept sequences"),
    "centre": (
        "nats",
        "value",
        "m, mean d per token of the responses inside their band: what the correction is centred on",
    ),
    "deviation_abs_max": ("nats", "max", "largest sqrt(L) |mean d - m| of a sequence; mismatch.bound_nats bounds it"),
    "num_token_vetoes": ("tokens", "sum", "tokens with |d| above mismatch.token_veto_nats"),
    "num_vetoed_sequences": ("sequences", "sum", "sequences dropped for such a token"),
    "num_segments": ("segments", "sum", "version segments of at least mismatch.segment_tokens, judged on their own"),
    "num_segment_decisions": ("sequences", "sum", "sequences dropped or cut for a segment alone, sound as a whole"),
}

CRITIC: dict[str, tuple[str, Reduction, str]] = {
    "value_loss": ("reward^2", "mean", "the critic's loss over mini-batches"),
    "explained_variance": (
        "1",
        "ratio",
        "1 - Var(R - V) / Var(R) over tokens, V as the advantages were made with: 1 is perfect, 0 says the mean",
    ),
    "value_mean": ("reward", "mean", "value of the state before a token, as the advantages were made with"),
    "return_mean": ("reward", "mean", "return R = A + V of a token: what the critic is trained on"),
    "clip_fraction": ("fraction", "ratio", "tokens whose value moved beyond critic.clip_range: no gradient"),
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

# Of the first held-out set, and with `set/<set>/` of each.
HELD_OUT: dict[str, tuple[str, Reduction, str]] = {
    "accuracy": ("fraction", "mean", "held-out samples that are correct, of those that could be scored (avg@k)"),
    "accuracy_standard_error": ("fraction", "value", "standard error of eval/accuracy, from the spread of prompts"),
    "reward_mean": ("reward", "mean", "reward over held-out samples that could be scored"),
    "response_length_mean": ("tokens", "mean", "held-out response length"),
    "turns_mean": ("turns", "mean", "turns of a held-out episode"),
    "truncated_fraction": ("fraction", "ratio", "held-out episodes cut at max_new_tokens or by a limit"),
    "num_samples": ("samples", "sum", "held-out samples"),
    "num_reward_failures": ("samples", "sum", "held-out samples whose scoring failed: in no mean"),
}

# Of an evaluation beside training, in the line of the step in which its results arrived.
BESIDE: dict[str, tuple[str, Reduction, str]] = {
    "measured_step": (
        "step",
        "value",
        "the step whose weights the eval/ numbers of this line are of, where not its own",
    ),
    "beside/seconds": ("seconds", "value", "how long that evaluation took, beside training"),
    "beside/num_servers": ("servers", "value", "servers that it took from training"),
    "beside/num_begun": ("evaluations", "value", "how often it was begun: more than once where it lost its servers"),
    "beside/num_steps": ("steps", "value", "steps that were trained meanwhile"),
}

# Of sets with several samples per prompt.
HELD_OUT_OF_SEVERAL: dict[str, tuple[str, Reduction, str]] = {
    "pass_at/<k>": ("fraction", "mean", "at least one of k samples is correct: unbiased, over prompts with k scored"),
    "pass_at_standard_error/<k>": ("fraction", "value", "its standard error, from the spread of prompts"),
    "majority": ("fraction", "mean", "the answer of most of a prompt's samples is correct (maj@k)"),
    "majority_standard_error": ("fraction", "value", "its standard error, from the spread of prompts"),
}
