"""The sections of what a run keeps, watches and measures: checkpoints, the journal, watchdog and alerts, profile and
diagnostics, metrics, held-out evaluation, `gspo-mega certify` and `gspo-mega mismatch`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from gspo_mega.config.schema.data import OwnReward
from gspo_mega.config.schema.section import HUB_DATASET, MAY_CHANGE, Section


class Checkpoint(Section):
    every_steps: int = Field(
        default=0, ge=0, description="Save every this many steps; 0: only at the end and on a stop."
    )
    keep_last: int = Field(default=2, ge=1, description="Checkpoints kept.")
    keep_every: int = Field(
        default=0, ge=0, description="Keep checkpoints of steps that are a multiple of this for good; 0: none."
    )
    asynchronous: bool = Field(
        default=False,
        description=(
            "Continue training while a checkpoint is written; needs host memory for a copy of weights and optimizer"
            " state."
        ),
    )
    export_every_steps: int = Field(
        default=0,
        ge=0,
        description=(
            "Also write the weights as a Hugging Face folder, hf_steps/step_N, every this many steps; 0: only at the"
            " end, as hf."
        ),
    )
    peer_copies: int = Field(
        default=0,
        ge=0,
        le=1,
        description=(
            "1: after each step every rank's state is also copied to the host memory of its own machine and to a"
            " neighbour's, and a restart goes on from there instead of from the last checkpoint; four times a rank's"
            " state in host memory per rank."
        ),
    )


class Journal(Section):
    keep_last: int | None = Field(
        default=None, ge=1, description="Steps whose trajectories stay in the run folder's journal; all when absent."
    )
    prune_routes: bool = Field(
        default=False,
        description=(
            "Remove the routed experts and sampling masks, the largest part of a step's record, once a checkpoint with"
            " that step is on disk. A thread rewrites the step's file while the run goes on. R3, or training with"
            " `rollout.top_k`, cannot be repeated from such a record."
        ),
    )


class Watchdog(Section):
    """When ranks count as stuck; the run then ends as failed (see train.max_restarts). A bound limits the time without
    progress: no micro-batch, no trajectory, no message. Absent bounds follow from the phase's deadlines and the plan.
    """

    enabled: bool = Field(
        default=True, description="False: only the timeout of collectives (30 minutes) notices a stuck rank."
    )
    silence_seconds: float = Field(
        default=300.0,
        gt=0,
        description="Maximum time without a sign of life from a rank's process (stopped, or its interpreter blocked).",
    )
    start_seconds: float | None = Field(
        default=None, gt=0, description="Maximum time without progress until the servers are ready; 3600 when absent."
    )
    rollout_seconds: float | None = Field(
        default=None,
        gt=0,
        description=(
            "Maximum time without a new token or a scored trajectory in a rollout; when absent, the time of all"
            " attempts"
            " of one request."
        ),
    )
    train_seconds: float | None = Field(
        default=None,
        gt=0,
        description=(
            "Maximum time without a micro-batch in a forward or training pass; 900, or the plan's time of a step, when"
            " absent."
        ),
    )
    publish_seconds: float | None = Field(
        default=None,
        gt=0,
        description="Maximum time of a publish; a little over twice publish.deadline_seconds when absent.",
    )
    eval_seconds: float | None = Field(
        default=None,
        gt=0,
        description="Maximum time without progress in an evaluation; rollout_seconds when absent.",
    )
    checkpoint_seconds: float | None = Field(
        default=None,
        gt=0,
        description="Maximum time of a save or export; 1800, or ten times the plan's time of a save, when absent.",
    )
    other_seconds: float | None = Field(
        default=None, gt=0, description="Maximum time without progress in anything else; 900 when absent."
    )


class Alerts(Section):
    """Who is notified when something happens to a run; nobody without `command` and `url` (docs/watching.md)."""

    command: tuple[Annotated[str, Field(min_length=1)], ...] | None = Field(
        default=None,
        min_length=1,
        description="Program and arguments, without a shell. It gets a JSON object on its standard input.",
    )
    url: str | None = Field(
        default=None,
        min_length=1,
        description=(
            "http:// or https:// address that the same object is posted to. $NAME: the supervisor's environment"
            " variable of that name, for an address that holds a token."
        ),
    )
    on: tuple[Literal["failure", "collapse", "stall", "budget"], ...] = Field(
        default=("failure", "collapse", "stall", "budget"),
        min_length=1,
        description=(
            "Events that are reported, each at most once per attempt. failure: the attempt failed. stall: the"
            " watchdog found no"
            " progress, or stall_seconds passed. collapse: the reward fell (docs/report.md). budget: mismatch.budget"
            " was passed, with old_log_probs: trainer only if the mismatch is larger than precisions explain."
        ),
    )
    stall_seconds: float | None = Field(
        default=None,
        gt=0,
        description=(
            "No line of metrics for this long also counts as a stall. When absent, only the watchdog's verdict counts."
        ),
    )
    deadline_seconds: float = Field(
        default=30.0, gt=0, description="Maximum time of one call; a command is killed after that."
    )


class Profile(Section):
    """PyTorch profiler traces, with the phases of a step as named ranges (docs/watching.md)."""

    steps: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        default=None,
        min_length=2,
        max_length=2,
        description="[a, b]: profile the steps a to b, counted from 1, in one trace. None when absent.",
    )
    ranks: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(0,), min_length=1, description="Ranks that write a trace each, and on a GPU a memory snapshot."
    )


class Diagnostics(Section):
    """Measurements that cost passes or memory and do not change what is learned."""

    exact_staleness: bool = Field(
        default=False,
        description=(
            "Keep the weights of the last rollout.max_staleness + 1 versions on the host, and use them to compute which"
            " part of the gap to the servers is the policy's own movement since a token was sampled. A step makes one"
            " more forward pass for each older version in its batch (docs/studies/asynchronous_ratio.md)."
        ),
    )
    token_mismatch: bool = Field(
        default=False,
        description=(
            "Record with each step's rollouts how far the trainer's log-prob of every token was from the server's"
            " before"
            " any update. The report colours tokens by it. It costs 2 bytes per token on disk, 10 from the ranks to"
            " rank 0, and no pass (docs/mismatch.md)."
        ),
    )


class MetricsSink(Section):
    sink: str = Field(min_length=1, description="jsonl, tensorboard, wandb, or package.module:Class.")
    options: dict[str, Any] = Field(default_factory=dict, description="Passed to the class as keyword arguments.")


class Prometheus(Section):
    port: int = Field(ge=1, le=65535, description="Port of rank 0's machine.")
    host: str = Field(
        default="127.0.0.1",
        description=(
            "Address to bind: that machine's own, IPv4 or IPv6; every form of the wildcard is refused. Anyone who"
            " reaches it can read the numbers."
        ),
    )


class Metrics(Section):
    """Where a run's numbers go besides metrics.jsonl, which every run has (docs/watching.md)."""

    sinks: tuple[MetricsSink, ...] = Field(
        default=(MetricsSink(sink="jsonl"), MetricsSink(sink="tensorboard")),
        description=(
            "Where every line of metrics goes. NAME is short for {sink: NAME}. jsonl is metrics.jsonl, which is always"
            " written, named or not. A sink that fails never stops a run. The older key `tensorboard: true` or `false`"
            " puts tensorboard into this list or takes it out."
        ),
    )
    samples_every_steps: int | None = Field(
        default=None,
        ge=1,
        description=(
            "Every so many steps, give the sinks tensorboard and wandb a table of eight sampled responses: prompt,"
            " response, reward, advantage. These texts leave the machine where the sink does. Off when absent."
        ),
    )
    prometheus: Prometheus | None = Field(
        default=None,
        description=(
            "Serve the last step's metrics in Prometheus' text format at http://host:port/metrics; off when absent."
        ),
    )


Votes = Literal["final_answer", "text", "none"]


class EvalSet(Section):
    """One of several held-out sets. A key that is absent has the value of `eval`, or of `data` for what is in a row."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9._-]+$", description="Shown in metrics and episode ids.")
    path: str = Field(
        min_length=1,
        json_schema_extra=HUB_DATASET,
        description="Held-out prompts: a file or folder as in `data.sources`.",
    )
    num_prompts: int | None = Field(default=None, ge=1, description="As in `eval`.")
    reward: OwnReward | None = Field(
        default=None,
        description=(
            "The set's reward, its correctness function: a name, one function as in `reward.functions`, or a list of"
            " them."
        ),
    )
    correct_threshold: float | None = Field(default=None, description="As in `eval`.")
    samples_per_prompt: int | None = Field(default=None, ge=1, description="As in `eval`.")
    temperature: float | None = Field(default=None, ge=0, description="As in `eval`.")
    max_new_tokens: int | None = Field(default=None, ge=1, description="As in `eval`.")
    every_steps: int | None = Field(default=None, ge=0, description="As in `eval`.")
    votes: Votes | None = Field(default=None, description="As in `eval`.")
    prompt_key: str | None = Field(default=None, description="Key of the prompt in a row of this set.")
    answer_key: str | None = Field(default=None, description="Key of what the reward compares with.")
    answer_keys: tuple[str, ...] | None = Field(default=None, description="As in `data`.")
    template: str | None = Field(
        default=None,
        description="Text around the prompt; `{prompt}` in it stands for the row's prompt, which must be a text.",
    )
    template_keys: tuple[str, ...] = Field(
        default=(),
        description=(
            "Further keys of a row that `template` may name as `{key}`: a text or number as it is, a list line by line."
        ),
    )
    chat_template: bool | None = Field(default=None, description="As in `data`.")
    system_prompt: str | None = Field(default=None, description="As in `data`.")


class Eval(Section):
    """One held-out set, or what the entries of `sets` have in common."""

    path: str | None = Field(
        default=None,
        min_length=1,
        json_schema_extra=HUB_DATASET,
        description=(
            "Held-out prompts, a file or folder as in `data.sources`; keys as in `data`. When absent and without"
            " `sets`, that of data.reasoning_gym."
        ),
    )
    num_prompts: int | None = Field(
        default=None, ge=1, description="Number of prompts, from the file's start; all when absent."
    )
    reward: OwnReward | None = Field(
        default=None,
        description=(
            "Reward for held-out prompts instead of `reward`, as a source's own: a name, one function as in"
            " `reward.functions`, or a list of them. When absent, the one that all data.sources have."
        ),
    )
    correct_threshold: float | None = Field(
        default=None,
        description=(
            "Minimum reward of a correct response; when absent, what the reward functions declare: a built-in"
            " verifier's 1, or `correct` in a result."
        ),
    )
    samples_per_prompt: int = Field(
        default=1, ge=1, description="Responses sampled per prompt. With several, pass@k and the majority are measured."
    )
    temperature: float = Field(default=1.0, ge=0, description="0 is greedy.")
    max_new_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Maximum tokens per turn, at most rollout.max_new_tokens; that when absent.",
    )
    every_steps: int = Field(
        default=0,
        ge=0,
        json_schema_extra=MAY_CHANGE,
        description="Evaluate every this many steps; 0: only before and after training.",
    )
    blocking: bool = Field(
        default=True,
        json_schema_extra=MAY_CHANGE,
        description=(
            "true: training stands still while a set is measured. false: as many servers as `servers` says leave"
            " training, keep the step's weights, and measure while training goes on with the others."
        ),
    )
    servers: int = Field(
        default=1,
        ge=1,
        json_schema_extra=MAY_CHANGE,
        description="With `blocking: false`, how many servers an evaluation takes from training; one stays at least.",
    )
    votes: Votes = Field(
        default="final_answer",
        description=(
            "Which responses agree, for the majority of several. final_answer: those with the same final answer in the"
            " text. text: those with the same text. none (code): there is no majority."
        ),
    )
    sets: tuple[EvalSet, ...] = Field(
        default=(),
        description="Several held-out sets, instead of `path`. The first one is measured as `eval/accuracy`.",
    )


class CertifyCase(Section):
    """One layout, precision or packing whose numbers must equal those of the reference."""

    name: str = Field(min_length=1, description="Its row in the table.")
    ranks: int = Field(default=1, ge=1, description="Number of ranks that it runs on.")
    set: dict[str, Any] = Field(
        default_factory=dict,
        description="Dotted keys of this file and their values in this case, e.g. {parallel.tensor: 2}.",
    )
    packing: Literal["planned", "shuffled", "one_pack", "one_each", "uneven"] = Field(
        default="planned",
        description=(
            "planned: as in training. shuffled: the packs' sequences in another order. one_pack: all in one. one_each:"
            " one pack per sequence. uneven: data-parallel shards of different sizes."
        ),
    )
    exact: tuple[Literal["log_prob", "loss", "gradient", "weights"], ...] = Field(
        default=(),
        description="Numbers that must equal the reference's to the last bit, instead of within the tolerance.",
    )
    other_scales: tuple[Literal["delayed", "tensorwise", "blockwise", "mxfp8"], ...] = Field(
        default=(),
        description=(
            "With `sharp_fp8`: recipes that give this layout other scales than the reference, so that its numbers are"
            " rounded differently and have a wider tolerance."
        ),
    )
    rounded: bool = Field(
        default=False,
        description=(
            "Nothing is judged: every weight is moved to a neighbouring number of its precision first, so the row shows"
            " what rounding by itself does to this model. Its other cases of this precision may differ by"
            " `rounding_factor` times as much, where that is above the usual tolerance. On one rank, in fp32 or bf16."
        ),
    )
    continued_from: str | None = Field(
        default=None,
        description=(
            "The name of another case of the same model. Its run stops after `num_steps` optimizer steps with a"
            " checkpoint, and this case continues it in its own layout for as many more. What it reads must equal what"
            " was saved to the last bit, and its numbers those of a reference that did not stop."
        ),
    )
    stops: bool = Field(
        default=False,
        description="Save a checkpoint after the steps. `certify` sets it for cases that others continue.",
    )
    refused: bool = Field(default=False, description="This case must be refused with a reason before it runs.")


class Certify(Section):
    """`gspo-mega certify`: one recorded batch, one checkpoint, many layouts, the same numbers."""

    reference: CertifyCase = Field(
        default=CertifyCase(name="reference"), description="What all cases are compared with; a single rank by default."
    )
    cases: tuple[CertifyCase, ...] = Field(default=(), description="Empty: this file's own layout, on all its ranks.")
    pairs: Literal["none", "all"] = Field(
        default="none",
        description=(
            "all: each case also continues the run of every other case of its model (`continued_from`), as a row"
            " `A -> B`. A pair that `gspo-mega train` would refuse to continue is shown as refused, with the reason."
        ),
    )
    num_steps: int = Field(default=3, ge=1, description="Optimizer steps after which weights are compared.")
    rounding_factor: float = Field(
        default=4.0,
        ge=1,
        le=64,
        description=(
            "With a case that is `rounded`: how many times as much as that case another order of sums may change."
        ),
    )
    cases_a_start: int = Field(
        default=64, ge=1, description="Layouts that one pool of ranks runs before it is restarted."
    )
    sharp_fp8: bool = Field(
        default=False,
        description=(
            "With `precision: fp8`, without a GPU: parameters and activations between FP8 products are fp32, sums"
            " fp64, and the scales of whole tensors are on a grid. Layouts then round nearly every number alike, and"
            " tolerances are as narrow."
        ),
    )
    equal_padding: bool = Field(
        default=True,
        description=(
            "In FP8 and with router losses, whose numbers depend on padding, pad every sequence to the same multiple in"
            " all cases. With false, cases pad as in training: for packs that share prefixes, whose router losses leave"
            " padding out, and a reference on one rank, which has none."
        ),
    )
    edges: bool = Field(
        default=False, description="Also cross clip edges and router ties on purpose, and count what flips."
    )


class Budget(Section):
    """`gspo-mega mismatch`: where the mismatch of trainer and servers comes from, before a run."""

    num_prompts: int = Field(
        default=64,
        ge=1,
        description="Prompts of the run's own data whose responses are scored; standard errors need at least 2.",
    )
    samples_per_prompt: int = Field(default=2, ge=1, description="Responses sampled for each of them.")
    together: int = Field(
        default=64,
        ge=1,
        description="Requests that a server scores at the same time, for causes that do not score each one on its own.",
    )
    reference: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description=(
            "Precision in which both engines must agree. Use bf16 if the model does not fit in fp32; what fp32 would"
            " attribute then stays in the difference of the engines."
        ),
    )
    causes: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(),
        description="Names of the causes to change, as the table shows them; all of them by default.",
    )
