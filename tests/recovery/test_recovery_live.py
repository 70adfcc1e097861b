"""Ranks killed between a real SGLang server and their own disk: no prompt is lost or trained on twice, no weights are
mixed up.
"""

from __future__ import annotations

from collections import Counter

import pytest
from live_support import BATCH, GROUP_SIZE, NUM_STEPS
from recovery_support import KILLED, outcome
from router_ties import differ_by_rounding

from gspo_mega.data.journal.journal import Journal
from gspo_mega.data.stream import epoch_order
from gspo_mega.metrics.writer import read_metrics

# Of one run, one after the other: (point, hit). Each kill finds the server in another state.
KILLS = (
    ("rollout.trajectory", 3),  # in its first rollout
    ("rollout.batch", 2),  # step 2 is sampled
    (
        "publish.sent",
        2,
    ),  # the server holds what is not committed; the first sending only brings it to the start's weights
    ("publish.sent", 3),  # the second sending of a start overwrites the random weights of the proof
    ("publish.commit.rename.before", 1),
    ("step.published", 1),  # step 2's weights are with the server, its checkpoint is not on disk
    ("rollout.trajectory", 2),  # in the rollout of step 3
)


def trained_on(folder):
    """Trajectories of every step, as the journal has them."""
    journal = Journal(folder.journal_dir)
    return {step: journal.read(step).batch.trajectories for step in journal.steps()}


def due(live, num_prompts):
    """The run's first prompts, by row."""
    order = epoch_order(64, seed=1, source="train", epoch=0)
    return {f"train:{order[place]}" for place in range(num_prompts)}


def check_steps(live, name, num_steps=NUM_STEPS):
    steps = trained_on(live.ranks.folder(name))
    assert sorted(steps) == list(range(num_steps))
    ids = Counter(trajectory.prompt.prompt_id for trajectories in steps.values() for trajectory in trajectories)
    assert set(ids.values()) == {GROUP_SIZE} and len(ids) * GROUP_SIZE == num_steps * BATCH, (
        "every prompt once, in whole groups"
    )
    return steps


def test_killed_again_and_again_it_ends_where_a_replay_of_its_journal_does(live):
    """The replay is never interrupted and has no server: what it trains on is what the journal says was sampled."""
    for point, hit in KILLS:
        assert live.train("live", f"point={point},hit={hit}") == [KILLED], f"{point}: {live.ranks.log('live')}"
    assert live.train("live") == [0], live.ranks.log("live")
    folder = live.ranks.folder("live")
    steps = check_steps(live, "live")
    for step, trajectories in steps.items():
        assert {version for t in trajectories for version in t.weight_versions} == {step}, (
            "sampled from the weights that the step began with"
        )
    lines = read_metrics(folder.metrics_file)
    assert [(line["step"], line["publish/weight_version"]) for line in lines] == [(1, 1), (2, 2), (3, 3)]
    # Server and trainer held the same weights in every rollout; those of two steps differ by a thousand times as much.
    assert all(differ_by_rounding(folder, line) for line in lines)

    recorded = str(folder.path)
    assert live.train("replay", "", f"train.from_rollouts={recorded}") == [0], live.ranks.log("replay")
    want, got = outcome(live.ranks.folder("replay")), outcome(folder)
    for name in want.keys() | got.keys():
        if name.startswith(("checkpoint/megatron", "hf/", "journal")):
            assert want.get(name) == got.get(name), name


def test_the_first_rollout_after_a_restart_is_of_the_restored_weights(live):
    assert live.train("restored", "point=rollout.trajectory,hit=7") == [KILLED], live.ranks.log("restored")
    version_1 = live.checksums()
    assert live.train("restored", "point=step.published") == [KILLED]
    version_2 = live.checksums()
    assert version_1.keys() == version_2.keys() and all(version_1[name] != version_2[name] for name in version_1), (
        "a step changes every tensor"
    )
    # Without its journal step 2 is sampled again, by weights that only the checkpoint has.
    live.ranks.folder("restored").journal_dir.rename(live.root / "left")
    assert live.train("restored", "point=rollout.trajectory") == [KILLED]
    assert live.checksums() == version_1
    assert live.train("restored", "", "train.num_steps=2") == [0]
    folder = live.ranks.folder("restored")
    assert differ_by_rounding(folder, read_metrics(folder.metrics_file)[1])


@pytest.mark.parametrize("hit", [2 * BATCH])
def test_rollouts_alone_are_continued_and_trained_on_elsewhere(live, hit):
    only = ("train.rollouts_only=true", "train.num_steps=2")
    assert live.train("recording", f"point=rollout.trajectory,hit={hit}", *only) == [KILLED]
    before = live.scores.all()
    assert live.train("recording", "", *only) == [0], live.ranks.log("recording")
    steps = check_steps(live, "recording", 2)
    assert {version for trajectories in steps.values() for t in trajectories for version in t.weight_versions} == {0}, (
        "nothing was trained"
    )
    assert len(live.scores.all()) - len(before) <= GROUP_SIZE, "what the journal has is not sampled again"
    assert "its 6 trajectories are in the journal" in live.ranks.console("recording")
    assert not live.ranks.folder("recording").latest_checkpoint_file.exists()

    recorded = str(live.ranks.folder("recording").path)
    assert live.train("trained", "", "train.num_steps=2", f"train.from_rollouts={recorded}") == [0], live.ranks.log(
        "trained"
    )
    assert [line["step"] for line in read_metrics(live.ranks.folder("trained").metrics_file)] == [1, 2]

    def as_tokens(steps):
        return {step: [t.response_token_ids for t in trajectories] for step, trajectories in steps.items()}

    assert as_tokens(trained_on(live.ranks.folder("trained"))) == as_tokens(steps)


def test_a_reward_that_was_repaired_meanwhile_scores_the_step_anew(live):
    """Its name and options are the same, and so is everything that the checkpoint and the configuration say."""
    source = live.ranks.config_file.parent / "repaired_reward.py"
    reward = ("train.num_steps=1", "reward.functions=[{function: 'repaired_reward:score'}]")
    source.write_text("def score(**_):\n    return 0.25\n")
    assert live.train("repaired", "point=rollout.batch", *reward) == [KILLED], live.ranks.log("repaired")
    assert {t.reward for t in trained_on(live.ranks.folder("repaired"))[0]} == {0.25}
    recorded = Journal(live.ranks.folder("repaired").journal_dir).file(0).read_bytes()

    source.write_text("def score(**_):\n    right = 0.75\n    return right\n")
    assert live.train("repaired", "", *reward) == [0], live.ranks.log("repaired")
    folder = live.ranks.folder("repaired")
    assert {t.reward for t in trained_on(folder)[0]} == {0.75}, "the rewards that the mended function gives"
    assert f"the journal's {BATCH} trajectories are not used: another reward scored them" in live.ranks.console(
        "repaired"
    )
    assert (folder.journal_dir / "step_00000000.old-0001").read_bytes() == recorded
