"""The arms of `claims.py`: what differs between its runs, and in which order they are made.

An arm is a shipped configuration and overrides of it. Owns no measurement.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Algorithm = Literal["gspo", "gspo_token", "grpo", "ppo"]
Replay = Literal["none", "R2", "R3"]

SEEDS = (1, 2, 3)
NUM_STEPS = {"learning": 80, "routing": 40, "critic": 80, "mini_batches": 40}
UNTRAINED = 1e-12  # a learning rate with which the critic, whose head begins at zero, stays at zero
EVAL_EVERY = 10
# The block `mini_batches`, and in it the quickstart's range for four times its length.
LONG_RESPONSES = ("batch.prompts_per_step=16", "eval.num_prompts=128", "checkpoint.every_steps=40")
GSPO_RANGE = ("objective.clip_low=1.5e-3", "objective.clip_high=2e-3")


@dataclass(frozen=True)
class Arm:
    """What one run of the study does differently; its `name` says all of it. `replay`: whose routes the trainer's
    passes take, its own (none), those of the old pass (R2) or of the rollout (R3). `advantages`: of what a token has
    the advantage (`advantage.turns`). `responses`: of each prompt, where it is not the configuration's; a batch keeps its
    256. `frozen`: the critic learns nothing and values everything at 0. `mini_batches`: of a rollout batch, if not 4.
    """

    block: Literal["learning", "routing", "turns", "critic", "mini_batches"]
    algorithm: Algorithm
    replay: Replay = "none"
    advantages: Literal["episode", "return_to_go"] = "episode"
    responses: int | None = None
    frozen: bool = False
    mini_batches: int = 4

    @property
    def name(self) -> str:
        parts = {"routing": f"-routes_{self.replay}", "turns": f"-{self.advantages}"}
        parts["mini_batches"] = f"-{self.mini_batches}"
        responses = f"-{self.responses}_responses" if self.responses else ""
        return self.algorithm + parts.get(self.block, "") + responses + ("-frozen" if self.frozen else "")

    @property
    def config(self) -> str:
        """The shipped configuration that the arm is a change of."""
        if self.block == "turns":
            return "calculator.yaml"
        return "quickstart_ppo.yaml" if self.algorithm == "ppo" else "quickstart.yaml"

    def overrides(self) -> list[str]:
        """The arm as overrides of `config`: as many responses of the same length limit for every arm, the ranges and
        averages that each algorithm was published with, but for GSPO's range, which is the quickstart's.
        """
        if self.block == "turns":
            return [
                f"algorithm={self.algorithm}",
                f"advantage.turns={self.advantages}",
                "rollout.episode=tests.soak.claims_turns:calculator_turns",
                "mismatch.correction=none",
            ]
        common = [
            f"train.num_steps={NUM_STEPS[self.block]}",
            f"eval.every_steps={EVAL_EVERY}",
            "mismatch.correction=none",
        ]
        if self.block == "mini_batches":
            common += [*LONG_RESPONSES, f"batch.num_mini_batches={self.mini_batches}"]
            common += GSPO_RANGE if self.algorithm == "gspo" else ["algorithm=grpo", "objective={}"]
            return common
        common.append("rollout.max_new_tokens=48")
        if self.responses:
            common += [f"batch.group_size={self.responses}", f"batch.prompts_per_step={256 // self.responses}"]
        if self.frozen:
            common.append(f"critic.optimizer.lr={UNTRAINED}")
        if self.algorithm == "grpo":
            common += ["algorithm=grpo", "objective={}"]
        if self.block == "routing":
            common += [f"moe.routing_replay={self.replay}", "rollout.return_routed_experts=true"]
        return common


ARMS = (
    Arm("learning", "gspo"),
    Arm("learning", "grpo"),
    Arm("learning", "ppo"),
    *(Arm("routing", algorithm, replay) for replay in ("none", "R2", "R3") for algorithm in ("gspo", "grpo")),
    Arm("turns", "gspo"),
    Arm("turns", "gspo_token"),
    Arm("turns", "gspo_token", advantages="return_to_go"),
    Arm("critic", "gspo"),
    Arm("critic", "ppo"),
    Arm("critic", "ppo", responses=8),
    Arm("critic", "ppo", frozen=True),
    *(Arm("mini_batches", algorithm, mini_batches=number) for algorithm in ("gspo", "grpo") for number in (4, 16)),
)
BLOCKS = tuple(dict.fromkeys(arm.block for arm in ARMS))


def in_order(arms: tuple[Arm, ...], seeds: tuple[int, ...]) -> list[tuple[Arm, int]]:
    """(arm, seed) of all runs: block after block, and in a block seed after seed, so that an interrupted block has
    compared all of its arms on the seeds that it has.
    """
    blocks = dict.fromkeys(arm.block for arm in arms)
    return [(arm, seed) for block in blocks for seed in seeds for arm in arms if arm.block == block]
