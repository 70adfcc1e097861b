"""Tokens that were sampled from sets of kept ones, in whole replayed runs: killed, continued and replayed to the bit,
with a KL term whose reference is over the same sets.
"""

from __future__ import annotations

import numpy as np
import pytest
from recovery_support import KILLED, NUM_STEPS, leftovers, outcome
from test_recovery_correction import rewrite

from gspo_mega.base.episodes import Node
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.base.sampling_masks import SamplingMasks
from gspo_mega.data.journal.journal import Journal
from gspo_mega.metrics.writer import read_metrics

KEPT = ("rollout.top_k=20", "rollout.top_p=0.8", "algorithm=grpo", "kl.coefficient=0.05", "mismatch.correction=none")
# In the middle of the second step, and while its checkpoint is written.
KILLS = ("point=step.optimizer,hit=3,rank=1", "point=save.tensors.after")


@pytest.fixture(scope="module")
def recorded(ranks, tmp_path_factory):
    """Folder of the recording with a set of 1 to 20 tokens for each token."""
    folder = tmp_path_factory.mktemp("kept") / "recorded"
    rng = np.random.default_rng(2)

    def change(step: int, row: int, turn: Node) -> None:
        turn.sampling_masks = SamplingMasks.of(
            [sorted({token, *rng.integers(0, 500, rng.integers(0, 20)).tolist()}) for token in turn.token_ids]
        )

    rewrite(RunFolder(ranks.config_file.parent / "recorded"), RunFolder(folder), change)
    return folder


def test_killed_and_replayed_it_ends_to_the_bit_where_an_uninterrupted_run_does(ranks, recorded):
    overrides = (*KEPT, f"train.from_rollouts={recorded}", "journal.keep_last=10")
    assert ranks.train("masks", "", *overrides, num_ranks=2) == [0, 0], ranks.log("masks")
    want = outcome(ranks.folder("masks"))
    for fault in KILLS:
        codes = ranks.train("masks-killed", fault, *overrides, num_ranks=2)
        assert KILLED in codes, f"{fault}: {ranks.log('masks-killed')}"
    assert ranks.train("masks-killed", "", *overrides, num_ranks=2) == [0, 0], ranks.log("masks-killed")
    got = outcome(ranks.folder("masks-killed"))
    assert {key for key in got.keys() | want.keys() if got.get(key) != want.get(key)} == set()
    assert leftovers(ranks.folder("masks-killed")) == []

    # The run's own journal has the sets as well.
    own = f"train.from_rollouts={ranks.folder('masks').path}"
    assert ranks.train("masks-replayed", "", *KEPT, own, "journal.keep_last=10", num_ranks=2) == [0, 0]
    again = outcome(ranks.folder("masks-replayed"))
    same = {key for key in want if key.startswith(("checkpoint/", "hf"))} | {"journal", "metrics"}
    assert {key for key in same if again.get(key) != want[key]} == set()

    lines = read_metrics(ranks.folder("masks").metrics_file)
    assert len(lines) == NUM_STEPS
    for line in lines:
        # An untrained model of 512 tokens: a set of n has about n / 512 of the mass, 1 to 20 of them ten on average.
        assert 5 / 512 < line["policy/kept_mass"] < 20 / 512
        assert line["policy/kl_reference"] > 0  # the second mini-batch of a step has moved from the reference

    # They matter: without them the same tokens train other weights.
    journal = Journal(RunFolder(recorded).journal_dir)
    assert all(t.sampling_masks is not None for step in journal.steps() for t in journal.read(step).batch.trajectories)
    assert ranks.train("masks-none", "", *KEPT[2:], num_ranks=2) == [0, 0], ranks.log("masks-none")
    without = outcome(ranks.folder("masks-none"))
    weights = {key for key in want if key.startswith("hf/") and key.endswith(".safetensors")}
    assert weights and all(without[key] != want[key] for key in weights)


def test_a_recording_without_sets_is_refused_by_name(ranks):
    assert ranks.train("masks-missing", "", *KEPT) == [3], ranks.log("masks-missing")
    said = ranks.error("masks-missing")
    assert "has no sampling masks, which `rollout.top_k` asks the servers for" in str(said), said
