"""The section about PPO's critic: its model, optimizer and loss, and how advantages are made of its values."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gspo_mega.config.schema.learning_sections import Optimizer
from gspo_mega.config.schema.run_sections import Recompute
from gspo_mega.config.schema.section import Section


class Critic(Section):
    """With `algorithm: ppo`: a second model in the policy's layout, whose head says what reward is still to come
    (docs/ppo.md)."""

    path: str | None = Field(
        default=None,
        min_length=1,
        description="Hugging Face folder of its backbone, of the policy's shape; model.path when absent.",
    )
    optimizer: Optimizer | None = Field(
        default=None, description="Its own optimizer and schedule; with the policy's numbers when absent."
    )
    precision: Literal["fp32", "bf16", "fp8"] | None = Field(
        default=None, description="Its parameters and matmuls; the policy's when absent."
    )
    recompute: Recompute | None = Field(default=None, description="Its own; the policy's when absent.")
    aggregation: Literal["token_mean", "sequence_mean_token_mean"] = Field(
        default="token_mean", description="How its loss is averaged over the tokens of a mini-batch."
    )
    clip_range: float | None = Field(
        default=0.2,
        gt=0,
        description=(
            "A value that moves further than this from the one that the advantages were made with has no gradient, in"
            " the unit of rewards. null: none is clipped."
        ),
    )
    warmup_steps: int = Field(
        default=0, ge=0, description="Rollout batches at the start on which the critic alone is trained."
    )
    gamma: float = Field(default=1.0, ge=0, le=1, description="Weight of the next token's value and reward.")
    gae_lambda: float = Field(
        default=0.95,
        ge=0,
        le=1,
        description="1: advantages are of the rewards alone; 0: of the next value; between: of both.",
    )
    whiten: bool = Field(
        default=True, description="Give the advantages of a mini-batch's tokens mean 0 and standard deviation 1."
    )
    bootstrap_truncated: bool = Field(
        default=False,
        description=(
            "A sequence that a limit cut off goes on with the value behind its last token. False: its reward is all"
            " that it gets, as of any other."
        ),
    )
    kl_coefficient: float = Field(
        default=0.0,
        ge=0,
        description="Weight of log policy - log reference, which every token's reward is less; 0: no reference.",
    )
