"""The sections of `gspo-mega certify`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from gspo_mega.config.schema.section import Section


class CertifyCase(Section):
    """One layout, precision or packing whose numbers must be the reference's."""

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
        default=(), description="Numbers that must be the reference's to the last bit, instead of to the tolerance."
    )
    other_scales: tuple[Literal["delayed", "tensorwise", "blockwise", "mxfp8"], ...] = Field(
        default=(),
        description=(
            "With `sharp_fp8`: recipes that give this layout other scales than the reference, so that its numbers round"
            " otherwise and have the tolerance of that."
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
        default=64, ge=1, description="Layouts that one pool of ranks runs before it is restarted."
    )
    sharp_fp8: bool = Field(
        default=False,
        description=(
            "With `precision: fp8`, without a GPU: parameters and activations between FP8 products in fp32, and with"
            " recipe tensorwise scales that are powers of two. Layouts then round nearly every number alike, and are"
            " held to that."
        ),
    )
    edges: bool = Field(
        default=False, description="Also cross clip edges and router ties on purpose, and count what flips."
    )
