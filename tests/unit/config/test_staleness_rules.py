"""Keys about rollouts that lag behind: what contradicts is refused, what means something else or nothing is named."""

import pytest
from config_refusals import refused

from gspo_mega.config import load_config


def test_exact_staleness_cannot_split_the_tokens_of_a_hybrid(write):
    keys = ["rollout.max_staleness=2", "diagnostics.exact_staleness=true"]
    load_config(write(), keys)
    said = refused(write(), *keys, "rollout.on_publish=continue_with_cache")
    assert "diagnostics.exact_staleness: true with `rollout.on_publish: continue_with_cache`" in said


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["rollout.order=completion"], "rollout.order has no effect with `rollout.max_staleness: 0`"),
        (["rollout.on_publish=continue"], "rollout.on_publish has no effect with"),
        (["diagnostics.exact_staleness=true"], "diagnostics.exact_staleness has no effect with"),
        (["rollout.max_staleness=3"], "rollout.max_staleness 3: tokens of weights up to that many versions old"),
        (
            ["rollout.max_staleness=1", "rollout.order=completion"],
            "short responses are trained earlier than long ones, and a run that is killed",
        ),
        (["rollout.max_staleness=1", "rollout.on_publish=continue_with_cache"], "a hybrid that no weights reproduce"),
        (["rollout.max_staleness=1", "old_log_probs=rollout"], "stale responses start outside it"),
    ],
)
def test_what_changes_the_meaning_or_does_nothing_is_named(write, overrides, said):
    assert any(said in notice for notice in load_config(write(), overrides).notices)


def test_a_synchronous_run_has_no_such_notice(write):
    assert not any(
        "stale" in one or "on_publish" in one for one in load_config(write(), ["rollout.on_publish=wait"]).notices
    )
