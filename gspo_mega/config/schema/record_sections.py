"""The sections about what a run measures, keeps and watches."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from gspo_mega.config.schema.section import Section


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


class Journal(Section):
    keep_last: int | None = Field(
        default=None, ge=1, description="Steps whose trajectories stay in the run folder's journal; all when absent."
    )
    prune_routes: bool = Field(
        default=False,
        description=(
            "Remove the routed experts, its largest part, from a step's record once a checkpoint with that step is on"
            " disk: a thread rewrites the step's file while the run goes on. R3 cannot be replayed from such a record."
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
            "Maximum time without a new token or a scored trajectory in a rollout; that of all attempts of one request"
            " when absent."
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
        description="Maximum time without progress in an evaluation; that of rollout_seconds when absent.",
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
    """Whom to tell when something happens to a run; nobody without `command` and `url` (docs/watching.md)."""

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
            "What is told, each at most once per attempt. failure: the attempt failed. stall: the watchdog found no"
            " progress, or stall_seconds passed. collapse: the reward fell (docs/report.md). budget: mismatch.budget"
            " was passed."
        ),
    )
    stall_seconds: float | None = Field(
        default=None,
        gt=0,
        description="Also a stall: no line of metrics for this long. When absent, only the watchdog's verdict is.",
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
    """Measurements that cost passes or memory, and change nothing of what is learned."""

    exact_staleness: bool = Field(
        default=False,
        description=(
            "Keep the weights of the last rollout.max_staleness + 1 versions on the host, and compute with them which"
            " part of the gap to the servers is the policy's own movement since a token was sampled: one more forward"
            " pass of a step for each older version in its batch (docs/studies/asynchronous_ratio.md)."
        ),
    )
    token_mismatch: bool = Field(
        default=False,
        description=(
            "Record beside each step's rollouts how far the trainer's log-prob of every token was from the server's"
            " before any update, for the report to colour tokens by: 2 bytes per token on disk, 10 from the ranks to"
            " rank 0, no pass (docs/mismatch.md)."
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
            "Address to bind: that machine's own, IPv4 or IPv6; every form of the wildcard is refused. Whoever reaches"
            " it reads the numbers."
        ),
    )


class Metrics(Section):
    """Where a run's numbers go besides metrics.jsonl, which every run has (docs/watching.md)."""

    sinks: tuple[MetricsSink, ...] = Field(
        default=(MetricsSink(sink="jsonl"), MetricsSink(sink="tensorboard")),
        description=(
            "Where every line of metrics goes. A name alone is short for {sink: NAME}. jsonl is metrics.jsonl, which is"
            " written whether it is named or not. A sink that fails never stops a run. The older key `tensorboard:"
            " true` or `false` is read as tensorboard in or out of this list."
        ),
    )
    prometheus: Prometheus | None = Field(
        default=None,
        description=(
            "Serve the last step's metrics in Prometheus' text format at http://host:port/metrics; off when absent."
        ),
    )
