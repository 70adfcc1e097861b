"""A run of episodes of two turns beside a real SGLang server, killed between the turns: nothing complete is sampled again,
and the journal replays to the same weights.
"""

from __future__ import annotations

from live_support import GROUP_SIZE, NUM_GROUPS
from recovery_support import KILLED, outcome

from gspo_mega.data.journal.journal import Journal

AGENT = """
async def play(task, model, tools):
    first = await model.turn(task.messages)
    second = await model.turn([*task.messages, first, {"role": "user", "content": "1+1="}])
    return len(second["content"]) % 3 / 2 + len(first["content"]) % 2
"""
TURNS = (
    "train.num_steps=2",
    "data.chat_template=true",
    "rollout.episode=two_turns:play",
    "episodes.max_tokens=96",
    "episodes.num_workers=1",
    "rollout.max_new_tokens=8",
)
# Of one run, one after the other: (point, hit). Each start goes through some turns of what was not complete before.
KILLS = (("rollout.turn", 1), ("rollout.turn", 8), ("rollout.trajectory", 2), ("rollout.turn", 9))


def recorded(journal: Journal) -> dict[str, list[list[int]]]:
    """The tokens of every turn of the episodes that are complete, by episode id."""
    records = [journal.read(step) for step in journal.steps()]
    return {
        one.episode_id: [turn.token_ids for turn in one.turns]
        for record in records
        if record is not None
        for group in record.groups.values()
        for one in group.episodes
    }


def test_killed_in_the_middle_of_episodes_it_goes_on_with_those_that_are_missing(live):
    (live.ranks.config_file.parent / "two_turns.py").write_text(AGENT)
    journal = Journal(live.ranks.folder("turns").journal_dir)
    before: dict[str, list[list[int]]] = {}
    for point, hit in KILLS:
        assert live.train("turns", f"point={point},hit={hit}", *TURNS) == [KILLED], (
            f"{point}: {live.ranks.log('turns')}"
        )
        now = recorded(journal)
        assert before.items() <= now.items(), "what was complete was sampled again"
        before = now
    assert before, "episodes were complete before the last kill"
    assert live.train("turns", "", *TURNS) == [0], live.ranks.log("turns")
    now = recorded(journal)
    assert before.items() <= now.items() and len(now) == 2 * NUM_GROUPS * GROUP_SIZE
    for step in journal.steps():
        for one in journal.read(step).batch.episodes:
            assert one.failure is None and one.num_turns == 2 and one.num_branches == 0, one.failure
            assert {version for turn in one.turns for version in turn.weight_versions} == {step}
            (row,) = one.rows()
            assert 0 in row.response_mask and row.turns[0][0] == 0 and len(row.turns) == 2

    replay = f"train.from_rollouts={live.ranks.folder('turns').path}"
    assert live.train("turns-replay", "", *TURNS, replay) == [0], live.ranks.log("turns-replay")
    want, got = outcome(live.ranks.folder("turns-replay")), outcome(live.ranks.folder("turns"))
    for name in want.keys() | got.keys():
        if name.startswith(("checkpoint/megatron", "hf/", "journal")):
            assert want.get(name) == got.get(name), name
