"""The section of `gspo-mega budget`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gspo_mega.config.schema.section import Section


class Budget(Section):
    """`gspo-mega budget`: where the mismatch of trainer and servers comes from, before a run."""

    num_prompts: int = Field(
        default=64,
        ge=1,
        description="Prompts of the run's own data whose responses are scored; standard errors need at least 2.",
    )
    samples_per_prompt: int = Field(default=2, ge=1, description="Responses sampled for each of them.")
    together: int = Field(
        default=64,
        ge=1,
        description="Requests that a server scores at the same time, where it does not score each one alone.",
    )
    reference: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description=(
            "Precision in which both engines must agree. bf16 where the model does not fit in fp32; what fp32 would"
            " show then stays between the engines."
        ),
    )
    causes: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(),
        description="Names of the causes to change, as the table shows them; all of them by default.",
    )
