"""The sections of what is learned and how long: objective, advantages, KL term, mismatch correction, batches,
optimizer, adapters, `train`, `sft`, and PPO's critic.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gspo_mega.config.algorithms import RECIPES, Aggregation, Ratio
from gspo_mega.config.schema.run import Recompute
from gspo_mega.config.schema.section import HUB_MODEL, LOCAL_INPUT, MAY_CHANGE, Hook, Section

_PAPER = RECIPES["gspo"]


class Objective(Section):
    clip_low: float = Field(
        default=_PAPER.clip_low, ge=0, description="Lower clip width of the ratio. The paper's: 3e-4."
    )
    clip_high: float = Field(
        default=_PAPER.clip_high, ge=0, description="Upper clip width of the ratio. The paper's: 4e-4."
    )
    dual_clip: float | None = Field(
        default=None, gt=1, description="For A < 0, also bound the term from below by this times A. Off by default."
    )
    ratio: Ratio | None = Field(
        default=None,
        description=(
            "With `algorithm: custom`: importance ratio of a sequence (GSPO), its token form (GSPO-token), or of a"
            " token (GRPO)."
        ),
    )
    aggregation: Aggregation = Field(
        default=_PAPER.aggregation,
        description="How tokens and sequences are averaged. The paper's: sequence_mean_token_mean.",
    )
    norm_constant_tokens: int | None = Field(
        default=None, ge=1, description="The constant of sequence_mean_token_sum_norm."
    )
    temperature_positive: float | None = Field(
        default=None, gt=0, description="With `algorithm: sapo`: temperature of the gate for A > 0. The paper's: 1."
    )
    temperature_negative: float | None = Field(
        default=None, gt=0, description="With `algorithm: sapo`: temperature of the gate for A < 0. The paper's: 1.05."
    )
    weight_limit: float | None = Field(
        default=None,
        gt=0,
        description="With `algorithm: minirl`: upper limit of a token's ratio to the server's. The paper's: 5.",
    )
    power_positive: float | None = Field(
        default=None, ge=0, description="With `algorithm: vespo`: k of the weight W^k exp(lambda (1 - W)) for A > 0: 2."
    )
    decay_positive: float | None = Field(
        default=None, ge=0, description="With `algorithm: vespo`: lambda of the weight for A > 0: 3."
    )
    power_negative: float | None = Field(
        default=None, ge=0, description="With `algorithm: vespo`: k of the weight for A < 0: 3."
    )
    decay_negative: float | None = Field(
        default=None, ge=0, description="With `algorithm: vespo`: lambda of the weight for A < 0: 2."
    )
    covariance_low: float | None = Field(
        default=None, description="With `algorithm: clip_cov`: smallest covariance of a token that may be left out: 1."
    )
    covariance_high: float | None = Field(
        default=None, description="With `algorithm: clip_cov`: largest covariance of a token that may be left out: 5."
    )
    covariance_share: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="With `algorithm: clip_cov`: share of a mini-batch's tokens that are left out, at random: 2e-4.",
    )
    function: Hook | None = Field(
        default=None,
        description=(
            "With `algorithm: custom`: your own term of each sequence or token, as `objective.ratio` says, instead of"
            " the clipped ratio (docs/hooks.md): package.module:function, or {function, options}."
        ),
    )
    entropy_coefficient: float = Field(
        default=0.0,
        ge=0,
        description=(
            "Weight of an entropy bonus: this times the entropy of the next-token distribution, averaged as the"
            " objective averages its terms, is added to J."
        ),
    )
    scope: Literal["trajectory", "turn"] = Field(
        default="trajectory",
        description=(
            "What has an importance ratio of its own, is clipped and is averaged with a weight: all turns of a"
            " trajectory together, or each turn."
        ),
    )


class Advantage(Section):
    function: Hook | None = Field(
        default=None,
        description=(
            "Your own advantages, instead of those that the other keys describe (docs/hooks.md):"
            " package.module:function, or {function, options}. `advantage: NAME` is short for it."
        ),
    )
    std_ddof: Literal[0, 1] = Field(default=0, description="0: population standard deviation; 1: sample.")
    divide_by_std: bool = Field(default=True, description="False leaves A = r - mean.")
    baseline: Literal["group", "leave_one_out", "batch"] = Field(
        default="group",
        description=(
            "What is subtracted from a reward. group: the mean of its group. leave_one_out: the mean of the others in"
            " its group (RLOO). batch: the mean of the whole rollout batch (REINFORCE++)."
        ),
    )
    std_over: Literal["group", "batch"] = Field(
        default="group",
        description=(
            "Whose standard deviation advantages are divided by. group: that of the group's rewards. batch: that of all"
            " advantages of the rollout batch (REINFORCE++; with `baseline: group` its form with a baseline)."
        ),
    )
    rewards: Literal["sum", "separate"] = Field(
        default="sum",
        description=(
            "sum: advantages of the sum of rewards. separate: each function of `reward` is normalised in the group by"
            " itself, the results are added with the functions' weights, and the sum is divided by its deviation over"
            " the rollout batch (GDPO)."
        ),
    )
    turns: Literal["episode", "return_to_go"] = Field(
        default="episode",
        description=(
            "episode: all tokens of an episode have the advantage of its reward. return_to_go: the tokens of a turn"
            " have"
            " the advantage of the rewards from this turn on; needs a ratio per token (gspo_token, grpo)."
        ),
    )
    turn_discount: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description=(
            "With return_to_go: weight of the next turn's reward. The turn after that has its square, and so on."
        ),
    )


class Kl(Section):
    """A KL term to a frozen reference policy, with `algorithm: grpo` or `custom`. No reference is loaded when the
    coefficient is 0."""

    coefficient: float = Field(
        default=0.0, ge=0, description="Weight of a KL term to a reference policy. GSPO has none."
    )
    estimator: Literal["k1", "k2", "k3"] = Field(
        default="k3",
        description=(
            "Estimator of KL(policy || reference) per token: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d, with d = log"
            " reference - log policy."
        ),
    )
    reference_path: str | None = Field(
        default=None,
        min_length=1,
        json_schema_extra=HUB_MODEL,
        description="Hugging Face folder of the reference; model.path when absent.",
    )


class TeacherModel(Section):
    """Where a teacher is: a model that the ranks load, or an SGLang server of yours."""

    path: str | None = Field(
        default=None,
        min_length=1,
        json_schema_extra=HUB_MODEL,
        description="Hugging Face folder of the teacher, which has the policy's tokenizer; its size may be another.",
    )
    url: str | None = Field(
        default=None,
        min_length=1,
        json_schema_extra=MAY_CHANGE,
        description=(
            "Instead of `path`: an SGLang server that you run, http://host:port; or $NAME of an environment variable"
            " that holds it. It may move while a run is stopped, and must serve the same model."
        ),
    )
    policy: bool = Field(
        default=False,
        description=(
            "Instead of `path` and `url`: the policy itself, with the weights that sample, on the run's own servers. It"
            " needs `context`."
        ),
    )
    context: str | None = Field(
        default=None,
        min_length=1,
        description=(
            "With `url` or `policy`: the text that the teacher reads in place of the prompt's last message, with"
            " {prompt}, {answer} and {metadata.KEY} replaced, such as a demonstration in another column."
        ),
    )
    max_prompt_tokens: int | None = Field(
        default=None,
        ge=1,
        description="With `context`: maximum length of the teacher's prompt. Rows above it are left out.",
    )
    api_key_variable: str | None = Field(
        default=None,
        json_schema_extra=MAY_CHANGE,
        description="With `url`: environment variable with the server's key, if it has one; never written anywhere.",
    )


class SourceTeacher(TeacherModel):
    source: str = Field(min_length=1, description="The name of the source of the data whose rows it scores.")


class Teacher(TeacherModel):
    """On-policy distillation: a frozen model scores the tokens that the policy sampled, and its reverse KL per token is
    an advantage (docs/distillation.md)."""

    by_source: tuple[SourceTeacher, ...] = Field(
        default=(),
        description=("Instead of one teacher: one for each source of the data. Rows of other sources have none."),
    )
    concurrency: int = Field(
        default=16,
        ge=1,
        json_schema_extra=MAY_CHANGE,
        description="With `url`: maximum requests to a teacher's server at a time.",
    )
    coefficient: float = Field(
        default=1.0,
        gt=0,
        description=(
            "A token's advantage from the teacher is -coefficient x (log policy - log teacher), nats. With another"
            " `divergence`: weight of that loss."
        ),
    )
    reward_weight: float = Field(
        default=1.0,
        ge=0,
        description="Weight of the rewards' advantage. 0: rewards are only measured, and the teacher teaches.",
    )
    divergence: Literal["sampled_token", "top_k", "full"] = Field(
        default="sampled_token",
        description=(
            "sampled_token: the reverse KL at the sampled token only, as an advantage. full: KL(policy || teacher) over"
            " the whole vocabulary at each position, as a loss. top_k: over the most likely tokens only, as a loss."
        ),
    )
    top_k: int | None = Field(
        default=None, ge=1, description="With `divergence: top_k`: how many tokens are compared, ties included."
    )
    top_k_of: Literal["teacher", "policy"] = Field(
        default="teacher", description="With `divergence: top_k`: whose most likely tokens are compared."
    )
    top_k_rest: Literal["bucket", "renormalise"] = Field(
        default="bucket",
        description=(
            "With `divergence: top_k`: the other tokens are one more token with the rest of the mass, or both"
            " distributions are renormalised without them."
        ),
    )


class Mismatch(Section):
    """The gap between the two engines, d = log pi_old(trainer) - log mu(server) of a sampled token. It is kept apart
    from the policy ratio (docs/mismatch.md)."""

    correction: Literal["none", "truncate", "mask", "token_tis", "icepop", "kpop", "sequence_mis", "m2po"] = Field(
        default="mask",
        description=(
            "mask: drop a response of L tokens whose mean d is further than bound_nats / sqrt(L) from the batch's mean"
            " m. truncate: keep it, and weigh every response by exp(mean d - m), cut above at that bound. The others as"
            " their papers name them (docs/mismatch.md), with the limits below."
        ),
    )
    bound_nats: float = Field(
        default=0.5,
        gt=0,
        description=(
            "Bound of sqrt(L) x |mean d - m|, nats; the noise of rounding has sd sqrt(2 KL) there, .04 (BF16) to .10"
            " (FP8 KV cache), at every length."
        ),
    )
    token_veto_nats: float | None = Field(
        default=9.2,
        gt=0,
        description="A token with |d| above this drops its response: a ratio of 10,000. null: none does.",
    )
    kept_weight: Literal["one", "ratio"] = Field(
        default="one",
        description=(
            "Weight of a response that `mask` keeps: 1, or exp(mean d - m). The second only adds the noise of mean d to"
            " A; the importance weight that would remove a bias is exp(sum d)."
        ),
    )
    segment_tokens: int = Field(
        default=64,
        ge=1,
        description=(
            "If a response has tokens of several weight versions: this many tokens or more of one version are judged on"
            " their own, by the same bound (docs/studies/asynchronous_ratio.md)."
        ),
    )
    upper: float | None = Field(
        default=None,
        gt=0,
        description=(
            "Largest importance weight: token_tis cuts it there (2); icepop (5) and sequence_mis (2) drop above."
        ),
    )
    lower: float | None = Field(
        default=None, gt=0, description="With icepop: smallest importance weight of a token that is kept (0.5)."
    )
    threshold: float | None = Field(
        default=None,
        gt=0,
        description=(
            "kpop: largest divergence of a token that is kept, in either direction, nats (0.1). m2po: largest mean d^2"
            " of the tokens that are kept, nats^2 (0.04)."
        ),
    )
    budget: float = Field(
        default=0.5,
        gt=0,
        json_schema_extra=MAY_CHANGE,
        description=(
            "Warn when the mean |mean d| of responses exceeds this share of clip_low + clip_high: a response in the"
            " middle of the clip range is half of it away from an edge."
        ),
    )


class Batch(Section):
    prompts_per_step: int = Field(ge=1, description="Prompts per rollout batch.")
    group_size: int = Field(
        ge=1,
        description=(
            "Trajectories per prompt (G): at least 2, or 1 with a critic (`algorithm: ppo`) or `advantage.baseline:"
            " batch`."
        ),
    )
    num_mini_batches: int = Field(default=4, ge=1, description="Optimizer steps per rollout batch. The paper's: 4.")
    micro_batch_tokens: int = Field(
        ge=1,
        json_schema_extra=MAY_CHANGE,
        description="Maximum tokens per packed forward pass of one data-parallel rank.",
    )
    log_prob_chunk_tokens: int = Field(
        default=512,
        ge=1,
        json_schema_extra=MAY_CHANGE,
        description=(
            "Maximum response tokens whose logits are in memory at once: about this x vocabulary / tensor x 4 bytes, 6"
            " for a bf16 head."
        ),
    )
    share_prefixes: Literal["off", "prompts", "full"] = Field(
        default="off",
        description=(
            "What a packed forward pass computes once for several rows: `off`, nothing; `prompts`, the prompt of a"
            " group's rows; `full`, all first tokens that rows have in common, as branches of an episode do. `prompts`"
            " and `full` deal whole groups to mini-batches. They have not run on a GPU."
        ),
    )


class Optimizer(Section):
    lr: float = Field(gt=0, description="Peak learning rate of AdamW.")
    min_lr: float = Field(default=0.0, ge=0, description="Learning rate at the end of a decaying schedule.")
    schedule: Literal["constant", "linear", "cosine"] = Field(default="constant", description="After the warm-up.")
    warmup_steps: int = Field(
        default=0,
        ge=0,
        description="Optimizer steps of linear warm-up: step k of n has the rate lr k / n, so the first has lr / n.",
    )
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's decoupled weight decay.")
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    clip_grad: float = Field(default=1.0, ge=0, description="Maximum global gradient norm; 0 turns clipping off.")
    decay_norms_and_biases: bool = Field(
        default=False, description="Weight decay on norms and biases too; by default only on matrices."
    )
    distributed: bool = Field(default=True, description="Shard the optimizer state over data-parallel ranks.")
    overlap: bool = Field(
        default=False,
        description=(
            "Reduce gradients during the backward pass and, with `distributed`, gather parameters during the forward"
            " pass."
        ),
    )
    gradients_dtype: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description=(
            "Precision in which gradients are kept and added up, over micro-batches and over ranks. bf16, with bf16"
            " parameters, takes half the memory and half the traffic, and rounds after every addition."
        ),
    )
    moments_dtype: Literal["fp32", "bf16", "fp8"] = Field(
        default="fp32",
        description=(
            "Precision of Adam's moments. Below fp32, Transformer Engine's precision-aware Adam keeps them, with"
            " `distributed`."
        ),
    )
    cpu_offload_fraction: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of the optimizer's state and step that is kept on the host; needs a GPU.",
    )
    max_skipped_in_a_row: int = Field(
        default=3, ge=1, description="The run stops after this many non-finite gradients in a row."
    )


class Lora(Section):
    """Low-rank adapters: the model's weights stay as they are, and (alpha / rank) B A is added to each linear layer W.
    Only B and A are trained, checkpointed and in the optimizer (docs/lora.md)."""

    rank: int = Field(ge=1, description="Rows of A and columns of B.")
    alpha: float = Field(gt=0, description="The adapters' product is multiplied by alpha / rank.")
    targets: tuple[str, ...] = Field(
        default=(),
        description=(
            "Linear layers with an adapter, by the last part of their Hugging Face module's name: q_proj, o_proj,"
            " up_proj ... All linear layers when empty."
        ),
    )
    dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of an adapter's inputs that training passes leave out; passes without gradients drop none.",
    )
    path: str | None = Field(
        default=None,
        min_length=1,
        json_schema_extra=LOCAL_INPUT,
        description="PEFT folder to start from; when absent, B is zero and A is random.",
    )


class Train(Section):
    num_steps: int = Field(ge=1, json_schema_extra=MAY_CHANGE, description="Rollout batches to train on.")
    from_rollouts: str | None = Field(
        default=None,
        min_length=1,
        json_schema_extra=LOCAL_INPUT,
        description="Run folder whose recorded rollouts are trained on: no server, no publish, no held-out evaluation.",
    )
    rollouts_only: bool = Field(
        default=False, description="Sample every step's batch from model.path into the journal, and train nothing."
    )
    max_restarts: int = Field(
        default=3,
        ge=0,
        json_schema_extra=MAY_CHANGE,
        description=(
            "Maximum automatic restarts of a failed run within 24 hours, each from the last checkpoint. A run is not"
            " restarted if it made no progress since the start before, or if only a person can fix it."
        ),
    )
    standby_processes: bool = Field(
        default=False,
        json_schema_extra=MAY_CHANGE,
        description=(
            "Keep a process per rank that has imported everything and waits: an automatic restart starts its ranks in"
            " these, without the time of the imports, and prepares others after its first step."
        ),
    )
    keep_servers: bool = Field(
        default=False,
        json_schema_extra=MAY_CHANGE,
        description=(
            "On one machine: servers that are ready when a run fails stay for its automatic restart. They are emptied"
            " and get the restart's weights, but do not start anew."
        ),
    )
    on_lost_node: Literal["wait", "shrink"] = Field(
        default="wait",
        json_schema_extra=MAY_CHANGE,
        description=(
            "In a Slurm job that has lost a trainer node and is queued again. wait: until as many nodes as before are"
            " free. shrink: it goes on with those that are free, at least `min_nodes`, in another layout with the same"
            " batch, and on more when they are back. The servers' nodes are always waited for."
        ),
    )
    min_nodes: int = Field(
        default=1,
        ge=1,
        json_schema_extra=MAY_CHANGE,
        description="With `on_lost_node: shrink`: the fewest trainer nodes.",
    )


class Sft(Section):
    """Supervised cold start (`gspo-mega sft`): cross-entropy on `data.response_key`."""

    max_steps: int = Field(ge=1, json_schema_extra=MAY_CHANGE, description="Maximum optimizer steps.")
    sequences_per_step: int = Field(ge=1, description="Demonstrations per optimizer step.")
    eval_every_steps: int = Field(ge=1, description="Measure sampled accuracy every this many optimizer steps.")
    eval_from_step: int = Field(
        default=0,
        ge=0,
        description="No measurement before this step: sampling from an untrained model is slow, and its accuracy is 0.",
    )
    stop_accuracy_low: float = Field(ge=0, le=1, description="Stop once sampled held-out accuracy is at least this ...")
    stop_accuracy_high: float = Field(
        ge=0, le=1, description="... and at most this; beyond it the run ends with an error."
    )


class Critic(Section):
    """With `algorithm: ppo`: a second model in the policy's layout, whose head predicts the reward that is still to
    come (docs/ppo.md).
    """

    path: str | None = Field(
        default=None,
        min_length=1,
        json_schema_extra=HUB_MODEL,
        description=(
            "Hugging Face folder of the critic's backbone, which has the policy's shape; model.path when absent."
        ),
    )
    optimizer: Optimizer | None = Field(
        default=None, description="The critic's optimizer and schedule; a copy of the policy's when absent."
    )
    precision: Literal["fp32", "bf16", "fp8"] | None = Field(
        default=None, description="Precision of the critic's parameters and matmuls; the policy's when absent."
    )
    recompute: Recompute | None = Field(
        default=None, description="The critic's recomputation; the policy's when absent."
    )
    aggregation: Literal["token_mean", "sequence_mean_token_mean"] = Field(
        default="token_mean", description="How the critic's loss is averaged over the tokens of a mini-batch."
    )
    clip_range: float | None = Field(
        default=0.2,
        gt=0,
        description=(
            "A value that moves further than this from the value that the advantages were made with has no gradient; in"
            " the unit of rewards. null: none is clipped."
        ),
    )
    warmup_steps: int = Field(
        default=0, ge=0, description="Rollout batches at the start on which only the critic is trained."
    )
    gamma: float = Field(default=1.0, ge=0, le=1, description="Weight of the next token's value and reward.")
    gae_lambda: float = Field(
        default=0.95,
        ge=0,
        le=1,
        description="1: advantages follow from the rewards only; 0: from the next value; between: from both.",
    )
    whiten: bool = Field(
        default=True, description="Give the advantages of a mini-batch's tokens mean 0 and standard deviation 1."
    )
    bootstrap_truncated: bool = Field(
        default=False,
        description=(
            "true: a sequence that a limit cut off also gets the value after its last token. false: it gets its reward"
            " only, like any other sequence."
        ),
    )
    kl_coefficient: float = Field(
        default=0.0,
        ge=0,
        description=(
            "Weight of log policy - log reference, which is subtracted from every token's reward; 0: no reference."
        ),
    )
