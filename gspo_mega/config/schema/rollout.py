"""The sections of sampling: episodes and the processes that agents run in, requests, SGLang servers, and how weights
are published to them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from gspo_mega.config.schema.section import HUB_MODEL, MAY_CHANGE, Hook, Section


class EpisodeFunction(Section):
    function: str = Field(
        default="one_turn",
        min_length=1,
        description=(
            "one_turn, tool_loop, foreign, gym_text, openenv, or package.module:function: what acts between a prompt"
            " and its reward."
        ),
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Passed to the episode as keyword arguments.")


class Endpoint(Section):
    """The address that `rollout.episode: foreign` gives to an agent, in OpenAI's and Anthropic's protocols. It is bound
    only then."""

    host: str = Field(
        default="127.0.0.1",
        description="Address to bind: this machine's own, IPv4 or IPv6; every form of the wildcard is refused.",
    )
    port: int = Field(default=0, ge=0, le=65535, description="Port; 0: a free one.")
    max_body_bytes: int = Field(
        default=8 * 1024**2,
        ge=1024,
        description="Maximum size of one request, and of one message between the run and a process of episodes.",
    )
    body_seconds: float = Field(default=30.0, gt=0, description="Maximum time in which a request's body may arrive.")
    ignore_sampling: bool = Field(
        default=False,
        description=(
            "true: sample with the run's temperature, top_p and top_k if a request asks for others, and count it."
            " false:"
            " such a request is an error, because training needs one distribution."
        ),
    )


class Episodes(Section):
    """The limits of an episode and the processes that users' episode functions and tools run in. Only `max_tokens` has
    an effect with `rollout.episode: one_turn`."""

    max_turns: int = Field(default=8, ge=1, description="Maximum turns: answers of the policy in one episode.")
    max_tokens: int | None = Field(
        default=None,
        ge=2,
        description=(
            "Maximum tokens of an episode, from its first prompt to its last turn, answers of tools included. When"
            " absent, max_prompt_tokens + max_new_tokens with one_turn; every other episode requires the key."
        ),
    )
    tool_format: Literal["auto", "hermes", "brackets", "none"] = Field(
        default="auto",
        description=(
            "How the policy writes tool calls. hermes: JSON in <tool_call> tags. brackets: [text], for one tool with"
            " one text argument. auto: what the chat template shows."
        ),
    )
    turn_deadline_seconds: float = Field(
        default=60.0,
        gt=0,
        json_schema_extra=MAY_CHANGE,
        description=(
            "Maximum time that the agent itself takes between two turns; waiting for the policy is not counted."
        ),
    )
    deadline_seconds: float = Field(
        default=600.0,
        gt=0,
        json_schema_extra=MAY_CHANGE,
        description="Maximum time that the agent itself takes in one episode; waiting for the policy is not counted.",
    )
    num_workers: int = Field(default=2, ge=1, json_schema_extra=MAY_CHANGE, description="Processes of episodes.")
    episodes_per_worker: int = Field(
        default=256, ge=1, json_schema_extra=MAY_CHANGE, description="Maximum episodes in one process at a time."
    )
    blocked_seconds: float = Field(
        default=5.0,
        gt=0,
        json_schema_extra=MAY_CHANGE,
        description=(
            "Time without a sign from a process's event loop after which the episode that blocks it fails. The other"
            " episodes of the process continue in another one."
        ),
    )
    recycle_after: int = Field(
        default=2000, ge=1, json_schema_extra=MAY_CHANGE, description="Episodes after which a process is replaced."
    )
    memory_bytes: int = Field(
        default=2 * 1024**3,
        ge=64 * 1024**2,
        json_schema_extra=MAY_CHANGE,
        description="Maximum address space that a process of episodes may add after its start.",
    )
    file_bytes: int = Field(
        default=1024**3, ge=0, description="Maximum size of a file that a process of episodes writes."
    )
    environment: tuple[str, ...] = Field(
        default=(),
        description="Environment variables that episodes receive besides the short list of docs/rewards.md.",
    )
    network: bool = Field(
        default=True,
        description=(
            "False: episodes run in a network namespace without any network; refused where the kernel does not allow"
            " that to this user."
        ),
    )
    max_failed_fraction: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description=(
            "Maximum share of a step's episodes that may fail; above it the run stops. One of several may always fail,"
            " except with 0. Failed episodes are not trained on."
        ),
    )
    endpoint: Endpoint = Field(default=Endpoint(), json_schema_extra=MAY_CHANGE)


class Rollout(Section):
    episode: EpisodeFunction = Field(
        default=EpisodeFunction(),
        description="What acts between a prompt and its reward. NAME is short for {function: NAME}.",
    )
    tools: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(),
        description=("Tools that the policy may call, package.module:function each: typed functions with a docstring."),
    )
    max_new_tokens: int = Field(ge=1, description="Maximum tokens per turn, so of a response that has one turn.")
    temperature: float = Field(default=1.0, gt=0, description="Sampling temperature.")
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Probability mass that tokens are sampled from; 1: all tokens. Below 1 with a finite `top_k`.",
    )
    top_k: int = Field(
        default=-1,
        ge=-1,
        description=(
            "Number of most probable tokens that are sampled from; -1: all tokens. Otherwise from 2 on: servers return"
            " which tokens they kept, and every log-prob is normalised over these (docs/sampling_masks.md)."
        ),
    )
    min_p: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description=(
            "Tokens are sampled from only if they have at least this share of the most probable one's probability; 0:"
            " all. Above 0 with a finite `top_k`."
        ),
    )
    max_concurrent_requests: int = Field(
        default=256, ge=1, json_schema_extra=MAY_CHANGE, description="Maximum open requests per server."
    )
    progress_deadline_seconds: float = Field(
        default=120.0,
        gt=0,
        json_schema_extra=MAY_CHANGE,
        description=(
            "Maximum time without a new token, after which a request continues from its tokens on another server. A"
            " request that makes progress is never ended."
        ),
    )
    request_deadline_seconds: float | None = Field(
        default=None,
        gt=0,
        json_schema_extra=MAY_CHANGE,
        description=(
            "Maximum time of one whole response, from when a server first takes it. The run then stops with an error,"
            " because leaving the response out would favour short ones. No bound when absent."
        ),
    )
    max_attempts: int = Field(
        default=8,
        ge=1,
        json_schema_extra=MAY_CHANGE,
        description=(
            "The run stops after this many attempts of one request in a row without a new token. After this many"
            " samples"
            " in a row that the infrastructure loses before their first turn, the last one is a failed episode."
        ),
    )
    no_server_deadline_seconds: float = Field(
        default=1500.0,
        gt=0,
        json_schema_extra=MAY_CHANGE,
        description=(
            "Maximum wait for any healthy server, after which the run stops; above server.start_deadline_seconds."
        ),
    )
    max_staleness: int = Field(
        default=0,
        ge=0,
        description=(
            "Maximum number of weight versions by which a trajectory's oldest token may lag behind the weights that it"
            " trains. 0: each step is sampled from the newest weights, while the trainer waits. Above: sampling goes on"
            " while the trainer trains; no more is started than can be trained in time."
        ),
    )
    order: Literal["admission", "completion"] = Field(
        default="admission",
        description=(
            "Which groups form the next batch. admission: the next ones in the order of the prompts, however long they"
            " take. completion: those that completed first, within max_staleness; short responses are then trained"
            " earlier, and a run that is continued after a kill forms other batches."
        ),
    )
    on_publish: Literal["wait", "continue", "continue_with_cache"] | None = Field(
        default=None,
        description=(
            "What happens to responses that are open when new weights are published. wait: the publish waits for them."
            " continue: they go on under the new weights, which read their tokens so far anew, so each token's log-prob"
            " is exact under its own version. continue_with_cache: they go on with the old weights' cache, so later"
            " tokens belong to neither version. When absent: wait with max_staleness 0, continue above."
        ),
    )
    filter_constant_groups: bool = Field(
        default=False, description="Drop groups whose rewards are all equal and sample others in their place."
    )
    group_filter: Hook | None = Field(
        default=None,
        description=(
            "Your own filter instead of `filter_constant_groups` (docs/hooks.md): package.module:function, or"
            " {function, options}. Groups that it does not keep are replaced."
        ),
    )
    max_oversampling: float = Field(
        default=3.0,
        ge=1,
        description="With a filter: maximum prompts sampled per step, as a multiple of prompts_per_step.",
    )
    return_routed_experts: bool = Field(
        default=False, description="Let the servers return the experts that each token went to (MoE)."
    )


class Speculative(Section):
    """Drafts that the policy verifies, which gives several tokens per decode step. Samples and log-probs stay those of
    the policy.
    """

    algorithm: Literal["nextn", "eagle", "eagle3", "standalone", "ngram"] = Field(
        description=(
            "Who drafts. nextn: the layers for multi-token prediction in model.path. eagle, eagle3: a draft head."
            " standalone: a smaller model. ngram: tokens of earlier responses, without a model."
        )
    )
    draft_path: str | None = Field(
        default=None,
        min_length=1,
        json_schema_extra=HUB_MODEL,
        description="Hugging Face folder of the draft: eagle, eagle3, standalone.",
    )
    num_steps: int | None = Field(
        default=None,
        ge=1,
        description="Steps that are drafted. Give this and the next two keys, or none of the three (SGLang's choice).",
    )
    eagle_topk: int | None = Field(default=None, ge=1, description="Tokens that are drafted per step; 1: a chain.")
    num_draft_tokens: int | None = Field(default=None, ge=1, description="Tokens that are verified at once.")


class Server(Section):
    num_servers: int = Field(
        default=1, ge=1, description="SGLang servers that `gspo-mega train` starts on this machine."
    )
    tensor: int = Field(default=1, ge=1, description="Tensor-parallel size of one server, over all its nodes.")
    num_nodes: int = Field(
        default=1,
        ge=1,
        description=(
            "Nodes that one server is divided over, with tensor / num_nodes GPUs on each. Above 1 with a Slurm job, or"
            " with one `gspo-mega serve --part` per node."
        ),
    )
    expert: int = Field(
        default=1,
        ge=1,
        description=(
            "Expert-parallel size of one server: its experts are divided over that many groups of its ranks, and each"
            " expert over the tensor / expert ranks of a group."
        ),
    )
    expert_dispatcher: Literal["none", "deepep"] = Field(
        default="none",
        description=(
            "How tokens reach the experts of other ranks. none: every rank has all tokens, and results are summed."
            " deepep: DeepEP's all-to-all, which the servers' Python must have; with `expert` equal to `tensor`."
        ),
    )
    attention_data: int = Field(
        default=1,
        ge=1,
        description=(
            "Data-parallel attention: the number of groups of tensor / attention_data ranks. Each group computes the"
            " attention of its own requests and keeps their cache."
        ),
    )
    speculative: Speculative | None = Field(
        default=None, description="Speculative decoding; none when absent. GPUs only."
    )
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
            "Python that servers run in, with SGLang (launch/env/gpu-server.txt); when absent, that of the variable"
            " GSPO_SERVER_PYTHON, else the ranks' own. Under Slurm it is one in the servers' container."
        ),
    )
    start_deadline_seconds: float = Field(
        default=300.0,
        gt=0,
        description=(
            "Maximum time from a server's start until it is healthy, and maximum time without progress while the copy"
            " that it starts from is written."
        ),
    )
    max_restarts: int = Field(
        default=5,
        ge=0,
        description=(
            "Maximum restarts of one server, forgiven ones not counted. After that, or after two starts that lack the"
            " same Python package, the run continues without the server, and ends when none is left."
        ),
    )
    restart_forgiven_after_seconds: float = Field(
        default=3600.0, gt=0, description="A server that stays healthy for this time has one restart forgiven."
    )
    drain_seconds: float = Field(
        default=10.0,
        ge=0,
        json_schema_extra=MAY_CHANGE,
        description=(
            "Maximum time in which the open requests of a server that is asked to stop (SIGTERM to `gspo-mega serve`)"
            " leave it with their tokens. 0: the server ends at once, and tokens that it has not reported are sampled"
            " again."
        ),
    )
    max_total_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Tokens in the KV cache of each group of attention_data; SGLang's choice when absent.",
    )
    memory_fraction: float = Field(default=0.85, gt=0, lt=1, description="SGLang's mem_fraction_static.")
    dtype: Literal["auto", "fp32", "bf16"] = Field(
        default="auto",
        description=(
            "Precision of the servers' activations and of their weights that are not quantized. auto: the trainer's,"
            " bf16 where `precision` is fp8."
        ),
    )
    quantization: Literal["none", "fp8", "fp8_block", "int8"] = Field(
        default="none",
        description=(
            "How the servers hold the weights of linear layers and experts, and round what enters them; embedding, LM"
            " head, norms and router keep `dtype`. fp8: e4m3, quantized by the server while it loads. fp8_block: e4m3"
            " in 128 x 128 blocks with `weight_scale_inv`, as published checkpoints have it; activations 1 x 128. int8:"
            " a scale for each output channel and each token."
        ),
    )
    kv_cache: Literal["auto", "fp8"] = Field(
        default="auto",
        description="Format in which keys and values are stored. auto: `dtype`. fp8: e4m3, without a scale.",
    )
    context_tokens: int | None = Field(
        default=None,
        ge=1,
        description=(
            "Maximum tokens of a request and its answer; when absent episodes.max_tokens, or else max_prompt_tokens +"
            " max_new_tokens."
        ),
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
        default="disk",
        description="disk: through files in the run folder. distributed: through a broadcast group with the servers.",
    )
    deadline_seconds: float = Field(default=300.0, gt=0, description="Maximum time of one publish.")
    bucket_bytes: int = Field(
        default=256 * 1024**2, ge=1024, description="Size of one broadcast with `method: distributed`."
    )
    servers_per_group: int | None = Field(
        default=None,
        ge=1,
        description=(
            "With `method: distributed`, how many servers share a broadcast group; null for all of them. A rank"
            " sends what it owns of the model once per group. A server that fails in a broadcast holds up those of its"
            " group only."
        ),
    )
    max_senders: int = Field(
        default=8,
        ge=1,
        description=(
            "With `method: distributed`, how many ranks send. Each has its own groups with the servers, whose NCCL"
            " buffers take memory on the servers' GPUs. Other ranks that own tensors bring theirs to a sender."
        ),
    )
    verify: Literal["auto", "tensors", "replicas"] = Field(
        default="auto",
        description=(
            "tensors: every server tensor's checksum equals what was sent (servers with tensor 1 without GPUs)."
            " replicas: all servers agree, exactly what changed in the trainer changed, and a publish is proved to"
            " reach every tensor once per server start. auto: tensors where it is possible, else replicas."
        ),
    )
    verify_all_every: int = Field(
        default=1,
        ge=1,
        description=(
            "Every tensor of every server is verified at least once in this many publishes. 1: all of them in each."
            " Above 1, a publish hashes and reads back a share of the model's bytes, and publishes take the shares in"
            " turns: one part in this many with `verify: tensors`, two with `replicas`. Always all of them: the first"
            " publish after a start of the run or of a server, and a server that failed or comes back. A tensor that"
            " goes wrong later may be served for this many steps."
        ),
    )
    full_every: int = Field(
        default=1,
        ge=1,
        description=(
            "One publish in this many sends all weights, and the others only the values that changed in the servers'"
            " dtype (delta publish). 1: every publish sends all. All are sent, too, if some server does not hold the"
            " version before. Above 1, senders and servers keep a copy of the weights in their hosts' memory."
        ),
    )
    keep_last: int = Field(default=2, ge=1, description="Published versions kept on disk.")
    lora: Literal["merged", "adapter"] = Field(
        default="merged",
        description=(
            "What servers get of a policy with `lora`. merged: whole weights, with the adapters summed into them."
            " adapter:"
            " only the adapters, which servers add to the weights of model.path (SGLang's LoRA serving)."
        ),
    )
