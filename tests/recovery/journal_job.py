"""A journal with routed experts and with another history in it, put right in a process that may be killed: no ranks, no
Megatron.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from gspo_mega.base import failpoints
from gspo_mega.base.episodes import Group, RolloutBatch, one_turn_row
from gspo_mega.base.records import Prompt
from gspo_mega.data.journal.journal import Journal

NUM_STEPS = 3


def batch_of(step: int) -> RolloutBatch:
    prompt = Prompt("train:0", "train", (1, 2), "text")
    routes = np.full((3, 4, 2), step, np.int32)
    one = one_turn_row(
        f"s{step}", 0, prompt, [3, 4], [1, 1], [-0.5, -0.25], [step] * 2, "stop", reward=1.0, routed_experts=routes
    )
    return RolloutBatch(step, [Group.from_rows(0, prompt, [one])])


def main(arguments: list[str]) -> None:
    """`arguments`: the journal's folder. Steps 0 to 2 and a step 9 of another history; then the routes of the first two
    go.
    """
    failpoints.arm(os.environ.get(failpoints.VARIABLE), 0)
    journal = Journal(Path(arguments[0]))
    if not list(journal.folder.glob("step_*")):
        write(journal, 9)
    for step in range(NUM_STEPS):
        record = journal.read(step)
        if record is None or record.batch is None:
            write(journal, step)
    journal.prune_routes(NUM_STEPS - 1)


def write(journal: Journal, step: int) -> None:
    batch = batch_of(step)
    with journal.begin(step, step, 1, {}, {"rewards": "r"}) as writer:
        writer.add(batch.episodes[0])
        writer.finish(batch, {"position": step})
        writer.settle()
