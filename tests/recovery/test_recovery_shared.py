"""A group's prompt computed once, in whole replayed runs: killed, continued and replayed to the bit."""

from __future__ import annotations

import pytest
from recovery_support import GROUP_SIZE, KILLED, NUM_GROUPS, NUM_STEPS, leftovers, outcome

from gspo_mega.data.journal.journal import Journal
from gspo_mega.metrics.writer import read_metrics

SHARED = ("batch.share_prefixes=prompts", "journal.keep_last=10")
# In the middle of the second step, and while its checkpoint is written.
KILLS = ("point=step.optimizer,hit=3,rank=1", "point=save.tensors.after")


def test_killed_and_replayed_it_ends_to_the_bit_where_an_uninterrupted_run_does(ranks):
    assert ranks.train("shared", "", *SHARED, num_ranks=2) == [0, 0], ranks.log("shared")
    want = outcome(ranks.folder("shared"))
    for fault in KILLS:
        codes = ranks.train("shared-killed", fault, *SHARED, num_ranks=2)
        assert KILLED in codes, f"{fault}: {ranks.log('shared-killed')}"
    assert ranks.train("shared-killed", "", *SHARED, num_ranks=2) == [0, 0], ranks.log("shared-killed")
    got = outcome(ranks.folder("shared-killed"))
    assert {key for key in got.keys() | want.keys() if got.get(key) != want.get(key)} == set()
    assert leftovers(ranks.folder("shared-killed")) == []

    own = f"train.from_rollouts={ranks.folder('shared').path}"
    assert ranks.train("shared-replayed", "", *SHARED, own, num_ranks=2) == [0, 0], ranks.log("shared-replayed")
    again = outcome(ranks.folder("shared-replayed"))
    same = {key for key in want if key.startswith(("checkpoint/", "hf"))} | {"journal", "metrics"}
    assert {key for key in same if again.get(key) != want[key]} == set()


def test_on_one_rank_the_metric_is_the_prompts_that_were_not_computed_again(ranks):
    assert ranks.train("shared-one", "", *SHARED, num_ranks=1) == [0], ranks.log("shared-one")
    lines = read_metrics(ranks.folder("shared-one").metrics_file)
    assert len(lines) == NUM_STEPS
    journal = Journal(ranks.folder("shared-one").journal_dir)
    for step, line in enumerate(lines):
        rows = journal.read(step).batch.trajectories
        saved = NUM_GROUPS * (GROUP_SIZE - 1) * 5  # every prompt has 5 tokens
        assert line["speed/num_repeated_prefixes"] == 0
        fraction = line["speed/shared_prefix_fraction"]
        assert fraction == pytest.approx(saved / sum(row.num_tokens for row in rows))
        assert line["speed/packing_efficiency"] == 1.0
