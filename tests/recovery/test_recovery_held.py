"""Episodes that are held between their turns while weights are published, of a run that samples ahead: each turn has the
weights of its time, killed or not, and the journal replays to the same weights.
"""

from __future__ import annotations

import json

from ahead_check import check_ahead, due
from recovery_support import KILLED
from test_recovery_turns import recorded

from gspo_mega.data.journal.journal import Journal
from gspo_mega.metrics.writer import read_metrics

STALENESS, NUM_STEPS = 1, 4
# Between its turns an episode waits until the weights that its step trains are published: its first turn is ahead of them.
AGENT = """
import asyncio
import json
from pathlib import Path

CURRENT, FROM_VERSION = Path({current!r}), {from_version!r}


def published():
    try:
        return json.loads(CURRENT.read_text())["weight_version"]
    except FileNotFoundError:  # a start of the run publishes before it trains
        return -1


async def play(task, model, tools):
    first = await model.turn(task.messages)
    while published() < FROM_VERSION.get(task.prompt_id, 0):
        await asyncio.sleep(0.05)
    second = await model.turn([*task.messages, first, {{"role": "user", "content": "1+1="}}])
    return len(second["content"]) % 3 / 2 + len(first["content"]) % 2
"""
TURNS = (
    "data.chat_template=true",
    "rollout.episode=held_turns:play",
    "episodes.max_tokens=96",
    "episodes.num_workers=1",
    "episodes.turn_deadline_seconds=1100",
    "episodes.deadline_seconds=1200",
    "rollout.max_new_tokens=8",
)
AHEAD = (f"rollout.max_staleness={STALENESS}", f"train.num_steps={NUM_STEPS}", *TURNS)
# Steps from 0 whose episodes are held. The first one is sampled by the only weights there are, the second begins with them.
HELD_STEPS = (2, 3)
# Of one run, one after the other: (point, hit).
KILLS = (
    ("rollout.turn", 8),
    ("publish.paused", 3),  # of version 2, for which the third step's episodes wait between their turns
    ("rollout.trajectory", 2),
)


def test_turns_of_a_held_episode_have_the_weights_of_their_time(live):
    folder = live.ranks.folder("held")
    from_version = {prompt: step for step in HELD_STEPS for prompt in due(step)}
    source = AGENT.format(current=str(folder.current_weights_file), from_version=from_version)
    (live.ranks.config_file.parent / "held_turns.py").write_text(source)
    journal = Journal(folder.journal_dir)
    before: dict[str, list[list[int]]] = {}
    for point, hit in KILLS:
        assert live.train("held", f"point={point},hit={hit}", *AHEAD) == [KILLED], f"{point}: {live.ranks.log('held')}"
        now = recorded(journal)
        assert before.items() <= now.items(), "what was complete was sampled again"
        before = now
    assert before, "episodes were complete before the last kill"
    assert live.train("held", "", *AHEAD) == [0], live.ranks.log("held")
    assert before.items() <= recorded(journal).items(), "what was complete was sampled again"
    lags = check_ahead(live, "held", NUM_STEPS, STALENESS, *TURNS)
    assert set(lags) == {0, STALENESS}, "some tokens were sampled ahead"

    num_held = dict.fromkeys(HELD_STEPS, 0)
    for step, line in enumerate(read_metrics(folder.metrics_file)):
        episodes = journal.read(step).batch.episodes
        for one in episodes:
            assert one.failure is None and one.num_turns == 2 and one.num_branches == 0, one.failure
            first, second = (turn.weight_versions for turn in one.turns)
            assert step - STALENESS <= min(first) and max(first) <= min(second) and max(second) <= step, one.episode_id
            (row,) = one.rows()
            of_turns = [version for version, mask in zip(row.weight_versions, row.response_mask, strict=True) if mask]
            assert 0 in row.response_mask and of_turns == [*first, *second]
            if step in HELD_STEPS:
                assert set(second) == {step}, "its second turn came after the publish that it waited for"
                num_held[step] += max(first) < step
        several = sum(len({v for turn in one.turns for v in turn.weight_versions}) > 1 for one in episodes)
        assert line["rollout/multi_version_fraction"] == several / len(episodes), json.dumps(line)
        assert line["episode/turns_mean"] == 2 and line["rollout/num_episode_failures"] == 0
    assert num_held[HELD_STEPS[-1]], f"held while weights were published, by step: {num_held}"
