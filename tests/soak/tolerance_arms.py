"""The arms of `tolerance.py`: what differs between its runs, and in which order they are made.

An arm is a change of configs/quickstart_fp8.yaml, and for the dose a number of mantissa bits. Owns no measurement.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Trainer = Literal["fp32", "fp8"]
Server = Literal["same", "fp8_block", "fp8_block+kv"]
Algorithm = Literal["gspo", "grpo"]
Old = Literal["trainer", "rollout"]

SEEDS = (1, 2, 3)
# Explicit mantissa bits that are left of a weight of the servers. FP8's e4m3 has 3 (and activations of its own).
DOSES = (3, 2, 1, 0)
# The clip ranges: ten times the paper's for GSPO, as in every quickstart, and the paper's for GRPO.
CLIP = {"gspo": ("3e-3", "4e-3"), "grpo": ("0.2", "0.27")}
_SERVER = {
    "same": ("none", "auto"),
    "fp8_block": ("fp8_block", "auto"),
    "fp8_block+kv": ("fp8_block", "fp8"),
}


@dataclass(frozen=True)
class Arm:
    """What one run of the study does differently; its `name` says all of it. `bits`: the dose, None for none.
    `corrected`: with the correction of `mismatch.*` that `tolerance.py` names, else with none.
    """

    block: str
    trainer: Trainer = "fp32"
    server: Server = "same"
    algorithm: Algorithm = "gspo"
    old: Old = "trainer"
    bits: int | None = None
    corrected: bool = False

    @property
    def name(self) -> str:
        dose = "" if self.bits is None else f"-{self.bits}bits"
        correction = "-corrected" if self.corrected else ""
        return f"{self.algorithm}-{self.trainer}-{self.server}{dose}-old_{self.old}{correction}"

    @property
    def has_gap(self) -> bool:
        """Do the engines compute differently with the same weights? If not, the arm is an anchor."""
        return (self.trainer, self.server, self.bits) != ("fp32", "same", None)

    def overrides(self, correction: tuple[str, ...]) -> list[str]:
        """The arm as overrides of configs/quickstart_fp8.yaml. `correction`: those of a corrected arm."""
        quantization, kv_cache = _SERVER[self.server]
        low, high = CLIP[self.algorithm]
        return [
            f"precision={self.trainer}",
            f"server.quantization={quantization}",
            f"server.kv_cache={kv_cache}",
            f"algorithm={self.algorithm}",
            f"objective.clip_low={low}",
            f"objective.clip_high={high}",
            f"old_log_probs={self.old}",
            *(correction if self.corrected else ("mismatch.correction=none",)),
        ]


def _arms() -> Iterator[Arm]:
    yield Arm("anchors")
    yield Arm("anchors", trainer="fp8", server="fp8_block")
    yield Arm("anchors", algorithm="grpo")
    # Both ends of the dose first: whether it breaks anything decides what is worth running between them.
    for bits in (DOSES[-1], DOSES[0], *DOSES[1:-1]):
        for algorithm in ("gspo", "grpo"):
            yield Arm("dose", algorithm=algorithm, old="rollout", bits=bits)
    for server in ("fp8_block", "fp8_block+kv"):
        for algorithm in ("gspo", "grpo"):
            yield Arm("direct", server=server, algorithm=algorithm, old="rollout")
    yield Arm("grid", server="fp8_block")
    yield Arm("grid", server="fp8_block+kv")
    yield Arm("grid", trainer="fp8")
    yield Arm("grid", trainer="fp8", server="fp8_block+kv")


ARMS = tuple(_arms())
BLOCKS = tuple(dict.fromkeys(arm.block for arm in ARMS))


def breaking_arms(bits: int) -> tuple[Arm, ...]:
    """What follows at the dose that breaks training: the trainer's own log-probs as old ones, without and with the
    correction.
    """
    return tuple(
        Arm("breaking", algorithm=algorithm, old="trainer", bits=bits, corrected=corrected)
        for corrected in (False, True)
        for algorithm in ("gspo", "grpo")
    )


def in_order(arms: tuple[Arm, ...], seeds: tuple[int, ...]) -> list[tuple[Arm, int]]:
    """(arm, seed) of all runs: block after block, and in a block seed after seed, so that an interrupted block has
    compared all of its arms on the seeds that it has.
    """
    blocks = dict.fromkeys(arm.block for arm in arms)
    return [(arm, seed) for block in blocks for seed in seeds for arm in arms if arm.block == block]
