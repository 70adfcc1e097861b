"""A group's prompt computed once, in whole replayed runs: killed, continued and replayed to the bit."""

from __future__ import annotations

from math import ceil, floor

import pytest
from recovery_support import GROUP_SIZE, KILLED, NUM_GROUPS, NUM_STEPS, leftovers, outcome

from gspo_mega.base.run_folder import RunFolder
from gspo_mega.config import load_config
from gspo_mega.data.journal.journal import Journal
from gspo_mega.metrics.writer import read_metrics
from gspo_mega.plan import plan_run
from gspo_mega.plan.sharing import step_positions

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


def test_a_run_that_shares_reports_what_one_of_whole_rows_does(ranks):
    """One mini-batch a step, so that both train on the same rows; with a KL term, whose reference is computed alike."""
    runs = {}
    for mode in ("off", "prompts", "full"):
        name = f"shared-{mode}"
        given = (f"batch.share_prefixes={mode}", "batch.num_mini_batches=1", "algorithm=grpo", "kl.coefficient=0.05")
        assert ranks.train(name, "", *given, num_ranks=1) == [0], ranks.log(name)
        runs[mode] = read_metrics(ranks.folder(name).metrics_file)
    journal = Journal(ranks.folder("shared-off").journal_dir)
    assert len(runs["off"]) == NUM_STEPS and runs["off"][-1]["policy/kl_reference"] > 0
    for step, lines in enumerate(zip(*runs.values(), strict=True)):
        off, *sharing = lines
        saved = NUM_GROUPS * (GROUP_SIZE - 1) * 5  # every prompt has 5 tokens
        for line in sharing:
            assert line["speed/num_repeated_prefixes"] == 0 and line["speed/packing_efficiency"] == 1.0
            reported = [name for name in off if name.startswith(("policy/", "mismatch/", "optimizer/", "response/"))]
            assert len(reported) > 40
            for name in reported:
                assert line[name] == pytest.approx(off[name], rel=1e-3, abs=2e-6), name
        if step >= NUM_STEPS - 2:  # the journal keeps two steps
            rows = journal.read(step).batch.trajectories
            wanted = saved / sum(row.num_tokens for row in rows)
            assert [line["speed/shared_prefix_fraction"] for line in sharing] == pytest.approx([wanted] * 2)
            mean = sum(row.num_response_tokens for row in rows) / len(rows)
            least, most = (planned_fraction(ranks.folder("shared-prompts"), size(mean)) for size in (ceil, floor))
            assert least <= wanted <= most < least + 0.03


def planned_fraction(run: RunFolder, response: int) -> float:
    """What a plan says is shared if responses of so many tokens, and prompts of 5, are half of the longest."""
    lengths = ["data.max_prompt_tokens=10", f"rollout.max_new_tokens={2 * response}"]
    plan = plan_run(load_config(run.config_file, lengths), "cpu")
    return step_positions(plan.config, plan.layout).shared_fraction
