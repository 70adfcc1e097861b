"""The typed shape of a run's YAML file: every key, its unit, range, default and meaning.

Owns the schema alone. Reading YAML and positions is `loader.py`; rules between keys are `rules.py`; what a
layout needs from a model is `plan/`. Sections are frozen and refuse unknown keys.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gspo_mega.config.recipes import RECIPES, Aggregation, AlgorithmName, Ratio

_PAPER = RECIPES["gspo"]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Run(Section):
    name: str = Field(
        min_length=1, pattern=r"^[A-Za-z0-9._-]+$", description="Name of the run; its folder is <dir>/<name>."
    )
    dir: str = Field(default="runs", min_length=1, description="Folder that holds run folders. Shared by all nodes.")
    seed: int = Field(default=1, ge=0, lt=2**31, description="Seeds prompt order, sampling and every rank's RNG.")


class Model(Section):
    path: str = Field(
        min_length=1, description="Hugging Face folder (config.json, safetensors, tokenizer) to start from."
    )
    weights: str | None = Field(
        default=None,
        min_length=1,
        description=(
            "Folder of tools/hf_to_megatron.py whose weights `train` and `sft` start with, in place of the safetensors"
            " in path."
        ),
    )


class Cluster(Section):
    num_nodes: int = Field(default=1, ge=1, description="Trainer nodes.")
    ranks_per_node: int = Field(default=1, ge=1, description="Trainer ranks a node; one GPU each where there are GPUs.")
    gpus_per_node: int | None = Field(
        default=None, ge=1, description="GPUs of one machine; ranks_per_node of them when absent."
    )
    gpu: Literal["A100", "H100", "H200", "B200"] | None = Field(
        default=None, description="What `gspo-mega plan` measures memory and time against."
    )
    gpu_memory_gib: float | None = Field(
        default=None, gt=0, description="Memory of one GPU in GiB, instead of that of `gpu`."
    )
    num_rollout_nodes: int = Field(
        default=0,
        ge=0,
        description="Nodes of a Slurm job that hold servers alone; 0: the servers share the trainer nodes.",
    )


class Parallel(Section):
    """Megatron's sizes. Data parallelism is what is left: world / (tensor x pipeline x context)."""

    tensor: int = Field(default=1, ge=1, description="Tensor-parallel size.")
    pipeline: int = Field(default=1, ge=1, description="Pipeline-parallel size.")
    virtual_pipeline: int | None = Field(
        default=None, ge=2, description="Model chunks a pipeline rank; none by default."
    )
    context: int = Field(default=1, ge=1, description="Context-parallel size.")
    expert: int = Field(default=1, ge=1, description="Expert-parallel size.")
    expert_tensor: int = Field(default=1, ge=1, description="Tensor-parallel size inside experts.")
    sequence: bool = Field(default=True, description="Sequence parallelism; has an effect with tensor > 1 only.")
    expert_dispatcher: Literal["alltoall", "allgather"] = Field(
        default="alltoall", description="Megatron's token dispatcher."
    )


class Recompute(Section):
    granularity: Literal["none", "full"] = Field(
        default="none", description="`full` recomputes whole layers in the backward pass."
    )
    num_layers: int = Field(default=1, ge=1, description="Layers a recomputed block.")


class Objective(Section):
    clip_low: float = Field(
        default=_PAPER.clip_low, ge=0, description="Lower clip width of the ratio. The paper's: 3e-4."
    )
    clip_high: float = Field(
        default=_PAPER.clip_high, ge=0, description="Upper clip width of the ratio. The paper's: 4e-4."
    )
    dual_clip: float | None = Field(
        default=None, gt=1, description="For A < 0 also bound the term from below by this times A. Off by default."
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


class Advantage(Section):
    std_ddof: Literal[0, 1] = Field(default=0, description="0: population standard deviation; 1: sample.")
    divide_by_std: bool = Field(default=True, description="False leaves A = r - mean.")


class Kl(Section):
    """A KL term to a frozen reference policy, with `algorithm: grpo` or `custom`. No reference is loaded at 0."""

    coefficient: float = Field(
        default=0.0, ge=0, description="Weight of a KL term to a reference policy. GSPO has none."
    )
    estimator: Literal["k1", "k2", "k3"] = Field(
        default="k3",
        description=(
            "Of KL(policy || reference) a token: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d, with d = log reference -"
            " log policy."
        ),
    )
    reference_path: str | None = Field(
        default=None, min_length=1, description="Hugging Face folder of the reference; model.path when absent."
    )


class Mismatch(Section):
    """Correction of the gap between the two engines, pi_old(trainer) / mu(server), apart from the policy ratio."""

    correction: Literal["none", "truncate", "mask"] = Field(
        default="truncate",
        description=(
            "truncate: weigh a sequence by min(exp(mean log ratio), cap), detached. mask: drop sequences whose weight"
            " leaves [1/cap, cap]."
        ),
    )
    cap: float = Field(default=2.0, gt=1, description="Bound of the sequence-level importance weight.")
    budget: float = Field(
        default=0.5,
        gt=0,
        description="Warn when the mean |sequence log mismatch| exceeds this share of clip_low + clip_high.",
    )


class Batch(Section):
    prompts_per_step: int = Field(ge=1, description="Prompts of one rollout batch.")
    group_size: int = Field(ge=2, description="Trajectories a prompt (G).")
    num_mini_batches: int = Field(default=4, ge=1, description="Optimizer steps a rollout batch. The paper's: 4.")
    micro_batch_tokens: int = Field(ge=1, description="Most tokens of one packed forward of one data-parallel rank.")
    log_prob_chunk_tokens: int = Field(
        default=512,
        ge=1,
        description=(
            "Response tokens whose logits are held at once, whatever the number of tokens: about this x vocabulary /"
            " tensor x 4 bytes, 6 for a bf16 head."
        ),
    )


class Fp8(Section):
    """With `precision: fp8`: how Transformer Engine's linear layers compute. Router, embeddings, LM head, norms and
    attention stay in bf16.
    """

    recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = Field(
        default="blockwise",
        description=(
            "Scaling of FP8 products. delayed and tensorwise: Ada, Hopper and later; blockwise: Hopper with CUDA 12.9;"
            " mxfp8: Blackwell."
        ),
    )
    parameters: bool = Field(
        default=False, description="Keep the linear layers' parameters in FP8 too, beside the optimizer's fp32 ones."
    )


class Moe(Section):
    """Mixture of experts; what the model itself fixes (experts, top-k, score function) is in its config.json."""

    load_balancing: Literal["none", "aux_loss"] = Field(
        default="none",
        description=(
            "aux_loss: Megatron's load-balancing loss of each layer, over the positions of a micro-batch, in training"
            " passes."
        ),
    )
    load_balancing_coefficient: float = Field(default=0.0, ge=0, description="Weight of that loss.")
    z_loss_coefficient: float = Field(default=0.0, ge=0, description="Weight of the router's z-loss; 0 turns it off.")
    expert_bias_update_rate: float = Field(
        default=0.0,
        ge=0,
        description=(
            "Step of the expert bias towards balance, an optimizer step; 0 freezes it. For models that have the bias"
            " (deepseek_v3), refused with others."
        ),
    )
    routing_replay: Literal["none", "R2", "R3"] = Field(
        default="none",
        description=(
            "R2: the training passes go through the experts of the old pass. R3: all passes go through the experts that"
            " SGLang chose."
        ),
    )


class Optimizer(Section):
    lr: float = Field(gt=0, description="Peak learning rate of AdamW.")
    min_lr: float = Field(default=0.0, ge=0, description="Learning rate at the end of a decaying schedule.")
    schedule: Literal["constant", "linear", "cosine"] = Field(default="constant", description="After the warm-up.")
    warmup_steps: int = Field(default=0, ge=0, description="Optimizer steps of linear warm-up.")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's decoupled weight decay.")
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    clip_grad: float = Field(default=1.0, ge=0, description="Largest global gradient norm; 0 turns clipping off.")
    decay_norms_and_biases: bool = Field(
        default=False, description="Weight decay on norms and biases too; by default on matrices alone."
    )
    distributed: bool = Field(default=True, description="Shard the optimizer state over data-parallel ranks.")
    overlap: bool = Field(
        default=False,
        description=(
            "Reduce gradients during the backward pass and, with `distributed`, gather parameters during the forward"
            " pass."
        ),
    )
    moments_dtype: Literal["fp32", "bf16", "fp8"] = Field(
        default="fp32",
        description=(
            "Adam's moments; below fp32 Transformer Engine's precision-aware Adam keeps them, with `distributed`."
        ),
    )
    cpu_offload_fraction: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of the optimizer state and step that live on the host; needs a GPU to offload from.",
    )
    max_skipped_in_a_row: int = Field(default=3, ge=1, description="Non-finite gradients in a row that stop the run.")


class Train(Section):
    num_steps: int = Field(ge=1, description="Rollout batches to train on.")
    from_rollouts: str | None = Field(
        default=None,
        min_length=1,
        description="Run folder whose recorded rollouts are trained on: no server, no publish, no held-out evaluation.",
    )
    rollouts_only: bool = Field(
        default=False, description="Sample every step's batch from model.path into the journal, and train nothing."
    )
    max_restarts: int = Field(
        default=3,
        ge=0,
        description=(
            "Times within 24 hours that `train` starts a failed run again by itself from its last checkpoint; never"
            " when it came no further than the start before, nor after what only a person can mend."
        ),
    )


class Source(Section):
    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9._-]+$", description="Shown in metrics and prompt ids.")
    path: str = Field(min_length=1, description="JSONL file.")
    weight: float = Field(default=1.0, gt=0, description="Relative share of prompts drawn from this source.")
    reward: str | None = Field(
        default=None,
        description=(
            "Reward for this source's prompts instead of `reward`: a built-in's name or package.module:function."
        ),
    )


class Data(Section):
    path: str | None = Field(
        default=None, description="JSONL file of prompts and answers; short for one entry in `sources`."
    )
    sources: tuple[Source, ...] = Field(default=(), description="Several files with weights, instead of `path`.")
    prompt_key: str = Field(
        default="prompt", description="Key of the prompt text (or list of chat messages) in a line."
    )
    answer_key: str = Field(default="answer", description="Key of what the verifier compares with.")
    response_key: str = Field(default="response", description="Key of the demonstration, for `gspo-mega sft`.")
    chat_template: bool = Field(
        default=True, description="Apply the tokenizer's chat template; False feeds the text as it is."
    )
    system_prompt: str | None = Field(
        default=None, description="System message put before every prompt; needs chat_template."
    )
    max_prompt_tokens: int = Field(ge=1, description="Longer prompts are left out and counted.")
    shuffle: bool = Field(default=True, description="A new order every epoch, from the run's seed.")
    accept_changed: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{12,64}$")], ...] = Field(
        default=(),
        description=(
            "SHA-256 (its first 12 digits or more) of data files that may take the place of those the run was saved"
            " with, e.g. with a repaired row; as many rows as before."
        ),
    )


class RewardFunction(Section):
    function: str = Field(min_length=1, description="A built-in verifier's name, or package.module:function.")
    weight: float = Field(default=1.0, description="Weight in the sum.")
    options: dict[str, Any] = Field(default_factory=dict, description="Passed to the function as keyword arguments.")


class Reward(Section):
    functions: tuple[RewardFunction, ...] = Field(min_length=1, description="Reward = sum of weight x function.")
    deadline_seconds: float = Field(
        default=10.0, gt=0, description="Longest one scoring may take; then its process is killed."
    )
    num_workers: int = Field(default=2, ge=1, description="Scoring processes.")
    recycle_after: int = Field(default=10_000, ge=1, description="Scorings after which a process is replaced.")
    permute_in_batch: bool = Field(
        default=False,
        description=(
            "Control of an experiment: deal rewards out anew inside the batch, so that nothing can be learnt from them."
        ),
    )
    memory_bytes: int = Field(
        default=2 * 1024**3,
        ge=64 * 1024**2,
        description="Address space beyond its start that a scoring process may take.",
    )
    file_bytes: int = Field(default=1024**3, ge=0, description="Largest file that a scoring process may write.")
    environment: tuple[str, ...] = Field(
        default=(),
        description="Environment variables that functions get besides a short list of harmless ones (docs/rewards.md).",
    )
    network: bool = Field(
        default=True,
        description=(
            "False: functions run in a network name space without any network, where the kernel allows that to this"
            " user; refused where it does not."
        ),
    )
    max_failed_fraction: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description=(
            "Share of a step's scorings that may fail (their responses are not trained on); more of them stop the run."
        ),
    )


class Rollout(Section):
    max_new_tokens: int = Field(ge=1, description="Longest response.")
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1, description="-1: all tokens.")
    max_concurrent_requests: int = Field(default=256, ge=1, description="Open requests a server.")
    progress_deadline_seconds: float = Field(
        default=120.0,
        gt=0,
        description=(
            "Longest one request may go without a new token before it goes on, from its tokens, on another server. One"
            " that makes progress is never ended."
        ),
    )
    request_deadline_seconds: float | None = Field(
        default=None,
        gt=0,
        description=(
            "Longest one whole response may take, from when a server first takes it; the run stops with an error then,"
            " for to leave it out would favour short responses. No bound when absent."
        ),
    )
    max_attempts: int = Field(
        default=8,
        ge=1,
        description="Times in a row that one request is tried without a new token before the run stops.",
    )
    no_server_deadline_seconds: float = Field(
        default=1500.0,
        gt=0,
        description="Longest wait for any healthy server before the run stops; above server.start_deadline_seconds.",
    )
    max_staleness: Literal[0] = Field(default=0, description="Steps a trajectory's weights may lag. Only 0 so far.")
    filter_constant_groups: bool = Field(
        default=False, description="Drop groups whose rewards are all equal and sample others in their place."
    )
    max_oversampling: float = Field(
        default=3.0,
        ge=1,
        description="With the filter: most prompts sampled a step, as a multiple of prompts_per_step.",
    )
    return_routed_experts: bool = Field(
        default=False, description="Have the servers return the experts each token went to (MoE)."
    )


class Server(Section):
    num_servers: int = Field(
        default=1, ge=1, description="SGLang servers that `gspo-mega train` starts on this machine."
    )
    tensor: int = Field(default=1, ge=1, description="Tensor-parallel size of one server.")
    host: str = Field(
        default="127.0.0.1",
        description=(
            "Address to bind and to register: this machine's own, IPv4 or IPv6; every form of the wildcard is refused."
        ),
    )
    python: str | None = Field(
        default=None,
        min_length=1,
        description=(
            "Python that servers run in, with SGLang (launch/env/gpu-server.txt); the ranks' own when absent. Under"
            " Slurm in place of GSPO_SERVER_PYTHON, in the servers' container."
        ),
    )
    start_deadline_seconds: float = Field(
        default=300.0, gt=0, description="Longest a server may take from start to healthy."
    )
    max_restarts: int = Field(
        default=5,
        ge=0,
        description=(
            "Restarts of one server, those forgiven not counted, before it is given up. The run goes on with the"
            " others, and ends when none is left."
        ),
    )
    restart_forgiven_after_seconds: float = Field(
        default=3600.0, gt=0, description="Time in health after which one restart of a server is forgiven."
    )
    max_total_tokens: int | None = Field(
        default=None, ge=1, description="KV-cache size; SGLang's own choice when absent."
    )
    memory_fraction: float = Field(default=0.85, gt=0, lt=1, description="SGLang's mem_fraction_static.")
    context_tokens: int | None = Field(
        default=None, ge=1, description="Longest prompt + response; max_prompt_tokens + max_new_tokens when absent."
    )
    attention_backend: str | None = Field(
        default=None, description="SGLang's attention backend; on CPU the batched one of this package by default."
    )
    log_level: Literal["error", "warning", "info", "debug"] = "warning"
    options: dict[str, Any] = Field(
        default_factory=dict,
        description=(
            "Further SGLang ServerArgs fields, checked against the installed version. Refused: what this package sets"
            " itself, what runs foreign code, opens the server, or makes it hold other weights."
        ),
    )


class Publish(Section):
    method: Literal["disk", "distributed"] = Field(
        default="disk", description="disk: through the run folder. distributed: a broadcast group with the servers."
    )
    deadline_seconds: float = Field(default=300.0, gt=0, description="Longest one publish may take.")
    bucket_bytes: int = Field(default=256 * 1024**2, ge=1024, description="Size of one broadcast, method distributed.")
    verify: Literal["auto", "tensors", "replicas"] = Field(
        default="auto",
        description=(
            "tensors: every server tensor's checksum equals what was sent (servers with tensor 1 without GPUs)."
            " replicas: all servers agree, exactly what changed in the trainer changed, and a publish is proved to"
            " reach every tensor once per server start. auto: tensors where it is possible, else replicas."
        ),
    )
    keep_last: int = Field(default=2, ge=1, description="Published versions kept on disk.")


class Eval(Section):
    path: str = Field(min_length=1, description="JSONL file of held-out prompts; keys as in `data`.")
    num_prompts: int | None = Field(default=None, ge=1, description="First so many prompts; all when absent.")
    reward: str | None = Field(
        default=None,
        min_length=1,
        description=(
            "Reward for held-out prompts instead of `reward`, as a source's own: a built-in's name or"
            " package.module:function. When absent, the one that all data.sources have."
        ),
    )
    correct_threshold: float | None = Field(
        default=None,
        description=(
            "Reward from which a response is correct; when absent, what the reward functions declare: a built-in"
            " verifier's 1, or `correct` in a result."
        ),
    )
    samples_per_prompt: int = Field(default=1, ge=1)
    temperature: float = Field(default=1.0, ge=0, description="0 is greedy.")
    every_steps: int = Field(
        default=0, ge=0, description="Evaluate after every so many steps; 0: only before and after."
    )


class Checkpoint(Section):
    every_steps: int = Field(
        default=0, ge=0, description="Save after every so many steps; 0: only at the end and on a stop."
    )
    keep_last: int = Field(default=2, ge=1, description="Checkpoints kept.")
    keep_every: int = Field(
        default=0, ge=0, description="Keep checkpoints of steps that are a multiple of this for good; 0: none."
    )
    asynchronous: bool = Field(
        default=False,
        description=(
            "Go on training while a checkpoint is written; takes host memory for a copy of weights and optimizer state."
        ),
    )
    export_every_steps: int = Field(
        default=0,
        ge=0,
        description=(
            "Also write the weights as a Hugging Face folder, hf_steps/step_N, after every so many steps; 0: only at"
            " the end, as hf."
        ),
    )


class Journal(Section):
    keep_last: int | None = Field(
        default=None, ge=1, description="Steps whose trajectories stay in the run folder's journal; all when absent."
    )
    prune_routes: bool = Field(
        default=False,
        description=(
            "Take the routed experts out of a step's record, of which they are most, once a checkpoint that trained on"
            " it is on disk. R3 cannot be replayed from such a record."
        ),
    )


class Watchdog(Section):
    """When ranks count as stuck: the run then ends as failed (see train.max_restarts). Bounds are for the time in which
    nothing gets done, no micro-batch, trajectory or message; absent ones are derived from the deadlines of the phase
    and the plan's estimate.
    """

    enabled: bool = Field(
        default=True, description="False: only the timeout of collectives (30 minutes) notices a stuck rank."
    )
    silence_seconds: float = Field(
        default=300.0,
        gt=0,
        description="Longest without a sign of life from a rank's process (stopped, or its interpreter held).",
    )
    start_seconds: float | None = Field(
        default=None, gt=0, description="Longest without progress until the servers are ready; 3600 when absent."
    )
    rollout_seconds: float | None = Field(
        default=None,
        gt=0,
        description=(
            "Longest without a new token or a scored trajectory in a rollout; all attempts of one request when absent."
        ),
    )
    train_seconds: float | None = Field(
        default=None,
        gt=0,
        description=(
            "Longest without a micro-batch in a forward or training pass; 900, or the plan's time of a step, when"
            " absent."
        ),
    )
    publish_seconds: float | None = Field(
        default=None, gt=0, description="Longest publish; twice publish.deadline_seconds and some when absent."
    )
    eval_seconds: float | None = Field(
        default=None, gt=0, description="The same in an evaluation; as rollout_seconds when absent."
    )
    checkpoint_seconds: float | None = Field(
        default=None,
        gt=0,
        description="Longest save or export; 1800, or ten times the plan's time of a save, when absent.",
    )
    other_seconds: float | None = Field(
        default=None, gt=0, description="Longest without progress in anything else; 900 when absent."
    )


class Metrics(Section):
    tensorboard: bool = Field(default=True, description="Write TensorBoard events beside metrics.jsonl.")


class Sft(Section):
    """Supervised cold start (`gspo-mega sft`): cross-entropy on `data.response_key`."""

    max_steps: int = Field(ge=1, description="Optimizer steps at most.")
    sequences_per_step: int = Field(ge=1, description="Demonstrations an optimizer step.")
    eval_every_steps: int = Field(ge=1, description="Measure sampled accuracy after every so many optimizer steps.")
    eval_from_step: int = Field(
        default=0, ge=0, description="No measurement before this step; an untrained model's are slow and zero."
    )
    stop_accuracy_low: float = Field(ge=0, le=1, description="Stop once sampled held-out accuracy is at least this ...")
    stop_accuracy_high: float = Field(
        ge=0, le=1, description="... and at most this; beyond it the run ends with an error."
    )


class CertifyCase(Section):
    """One layout, precision or packing whose numbers must be the reference's."""

    name: str = Field(min_length=1, description="Its row in the table.")
    ranks: int = Field(default=1, ge=1, description="How many ranks it runs on.")
    set: dict[str, Any] = Field(
        default_factory=dict,
        description="Dotted keys of this file and their values in this case, e.g. {parallel.tensor: 2}.",
    )
    packing: Literal["planned", "shuffled", "one_pack", "one_each", "uneven"] = Field(
        default="planned",
        description=(
            "planned: as in training. shuffled: the packs' sequences in another order. one_pack: all in one. one_each:"
            " a pack a sequence. uneven: data-parallel shards of different sizes."
        ),
    )
    refused: bool = Field(default=False, description="This case must be refused with a reason before it runs.")


class Certify(Section):
    """`gspo-mega certify`: one recorded batch, one checkpoint, many layouts, the same numbers."""

    reference: CertifyCase = Field(
        default=CertifyCase(name="reference"), description="What all cases are compared with; a single rank by default."
    )
    cases: tuple[CertifyCase, ...] = Field(default=(), description="Empty: this file's own layout, on all its ranks.")
    num_steps: int = Field(default=3, ge=1, description="Optimizer steps after which weights are compared.")
    cases_a_start: int = Field(
        default=64, ge=1, description="Layouts one pool of ranks is led through before it is started anew."
    )
    edges: bool = Field(
        default=False, description="Also cross clip edges and router ties on purpose, and count what flips."
    )


class Config(Section):
    """One run. See `configs/` for commented examples."""

    run: Run
    model: Model
    algorithm: AlgorithmName = "gspo"
    objective: Objective = Objective()
    advantage: Advantage = Advantage()
    kl: Kl = Kl()
    old_log_probs: Literal["trainer", "rollout"] = Field(
        default="trainer",
        description="trainer: recomputed by the trainer. rollout: SGLang's are used as they are (warned about).",
    )
    mismatch: Mismatch = Mismatch()
    batch: Batch
    cluster: Cluster = Cluster()
    parallel: Parallel = Parallel()
    precision: Literal["fp32", "bf16", "fp8"] = Field(
        default="bf16",
        description=(
            "Parameters and matmuls; log-softmax and reductions are fp32 always. fp8: linear layers by Transformer"
            " Engine, the rest bf16."
        ),
    )
    fp8: Fp8 = Fp8()
    moe: Moe = Moe()
    recompute: Recompute = Recompute()
    optimizer: Optimizer
    train: Train | None = Field(default=None, description="Needed by `gspo-mega train`.")
    data: Data
    reward: Reward
    rollout: Rollout
    server: Server = Server()
    publish: Publish = Publish()
    eval: Eval | None = None
    checkpoint: Checkpoint = Checkpoint()
    journal: Journal = Journal()
    metrics: Metrics = Metrics()
    watchdog: Watchdog = Watchdog()
    sft: Sft | None = None
    certify: Certify = Certify()
