"""Small batches whose every number a person can add up: credit of turns, weights of branches, held-out results, what is
kept of a journal, and the last guard on a batch's age.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from episode_trees import context, sampled
from test_assemble import make_batch
from test_assemble_episodes import LAYOUT, config_of, hand_made, one_turn, two_branches
from test_journalled import Source, tokens

from gspo_mega.base.episodes import Episode, Group, RolloutBatch
from gspo_mega.base.errors import RolloutError
from gspo_mega.base.records import Prompt
from gspo_mega.config.derived import least_of_group
from gspo_mega.data.journal.episode_log import FileBegin
from gspo_mega.data.journal.journal import Journal
from gspo_mega.rollout.arrival_order import Freshness
from gspo_mega.rollout.scheduler import ResumePoint
from gspo_mega.train.batches import assemble, fill_advantages, scored_batch
from gspo_mega.train.held_out import summarize
from gspo_mega.train.reusable_records import RecordRequirements, ReusableRecords
from gspo_mega.train.sources import JournalledSource, LiveSource, RecordedSource

PROMPT = Prompt("t:0", "t", (3, 1, 4), "")


def three_turns(episode_id: str = "a", group_id: int = 0, rewards=(0.5, 0.25, None), reward=1.0) -> Episode:
    """Turns of 2, 2 and 1 tokens, with 3 tokens and 1 token of an environment between them."""
    nodes = [
        context(0, -1, [3, 1, 4]),
        sampled(1, 0, [5, 6], reward=rewards[0]),
        context(2, 1, [90, 91, 92]),
        sampled(3, 2, [7, 8], reward=rewards[1]),
        context(4, 3, [93]),
        sampled(5, 4, [9], reward=rewards[2]),
    ]
    return Episode(episode_id, group_id, PROMPT, nodes, reward=reward)


def test_each_of_three_turns_has_its_reward_on_its_own_last_token():
    """Tokens that nobody sampled count in no position: .5 at token 2, .25 at token 7, and what is left at the last."""
    config = config_of(algorithm="ppo")
    episode = three_turns()
    fill_advantages(RolloutBatch(0, [Group(0, PROMPT, [episode])]), config, 0)
    assert episode.rows()[0].token_rewards == [0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.25, 0.0, 0.25]


def test_each_of_three_turns_has_its_own_return():
    """Returns 1, .5 and .25 of 2, 2 and 1 of 5 tokens, against 0 of the other episode; not divided by their spread."""
    config = config_of(algorithm="gspo_token", advantage=dict(turns="return_to_go", divide_by_std=False))
    one, other = three_turns(), one_turn("b", 0, 0.0)
    fill_advantages(RolloutBatch(0, [Group(0, PROMPT, [one, other])]), config, 0)
    # mu = ((2/5) 1 + (2/5) .5 + (1/5) .25 + 0) / 2 = .325
    wanted = [0.675, 0.675, 0, 0, 0, 0.175, 0.175, 0, -0.075]
    assert one.rows()[0].token_advantages == pytest.approx(wanted, abs=1e-12)
    assert other.rows()[0].token_advantages == pytest.approx([-0.325] * 2, abs=1e-12)


@pytest.mark.parametrize(
    ("rewards", "has_signal"), [((0.5, 0.25, None), True), ((None, None, None), False), ((0.0, 0.0, 0.0), False)]
)
def test_equal_sums_are_a_signal_where_turns_have_rewards(rewards, has_signal):
    group = Group(0, PROMPT, [three_turns("a", rewards=rewards), three_turns("b", rewards=(None, None, None))])
    assert group.is_constant and group.is_constant_by_turn != has_signal
    unlike = Group(0, PROMPT, [three_turns("a", rewards=rewards), three_turns("b", reward=0.0)])
    assert not unlike.is_constant and not unlike.is_constant_by_turn


def test_the_turns_of_an_episode_without_a_reward_are_no_signal():
    failed = three_turns("c")
    failed.reward, failed.reward_error = None, "judge: it hung"
    plain = [three_turns(name, rewards=(None, None, None)) for name in "ab"]
    assert Group(0, PROMPT, [*plain, failed]).is_constant_by_turn


def test_groups_count_episodes_and_not_their_branches():
    """Episode a has two branches of 4 and 2 tokens, b has one: a group of 2, and each row weighs its share."""
    config = config_of(
        algorithm="custom",
        objective=dict(ratio="sequence", aggregation="group_mean_token_mean"),
        batch=dict(prompts_per_step=1, group_size=2, num_mini_batches=1),
    )
    batch = hand_made()
    fill_advantages(batch, config, 0)
    found = {}
    for shard in assemble(batch, config, LAYOUT, 0):
        (mini_batch,) = shard
        assert mini_batch.denominator == 1.0
        for pack in mini_batch.micro_batches:
            for s, row in enumerate(pack.trajectory_index.tolist()):
                if row >= 0:
                    found[row] = pack.sequence["group_size"][s], pack.sequence["weight"][s]
    assert found == {0: (2, 4 / 6), 1: (2, 2 / 6), 2: (2, 1.0)}


def test_a_batch_of_two_episodes_has_two_mini_batches_whatever_the_number_of_rows():
    config = config_of(batch=dict(prompts_per_step=4, group_size=4, num_mini_batches=4))
    batch = hand_made()
    fill_advantages(batch, config, 0)
    for shard in assemble(batch, config, LAYOUT, 0):
        assert [one.denominator for one in shard] == [1.0, 1.0]


@pytest.mark.parametrize(("stages", "chunks", "multiple"), [(1, None, 1), (4, None, 1), (3, 2, 3), (4, 2, 4)])
def test_interleaved_stages_get_whole_turns_of_packs(stages, chunks, multiple):
    config = config_of(batch=dict(prompts_per_step=4, group_size=4, num_mini_batches=1, micro_batch_tokens=64))
    layout = dataclasses.replace(LAYOUT, pipeline=stages, virtual_pipeline=chunks)
    batch = scored_batch(make_batch([4, 4], np.random.default_rng(2)), least_of_group(config), config.objective.scope)
    fill_advantages(batch, config, 0)
    plain = [len(shard[0].micro_batches) for shard in assemble(batch, config, LAYOUT, 0)]
    counts = [len(shard[0].micro_batches) for shard in assemble(batch, config, layout, 0)]
    assert len(set(counts)) == 1 and counts[0] == -(-plain[0] // multiple) * multiple
    assert plain[0] % 4 and plain[0] % 3, "else filler has nothing to do"


def test_equal_packs_are_as_long_as_the_longest_of_their_turn():
    config = config_of(batch=dict(prompts_per_step=4, group_size=4, num_mini_batches=1, micro_batch_tokens=64))
    batch = scored_batch(make_batch([4, 3], np.random.default_rng(4)), least_of_group(config), config.objective.scope)
    fill_advantages(batch, config, 0)
    lengths = {}
    for equal in (False, True):
        shards = assemble(batch, config, dataclasses.replace(LAYOUT, equal_packs=equal), 0)
        lengths[equal] = [[pack.num_tokens for pack in shard[0].micro_batches] for shard in shards]
    assert lengths[False][0] != lengths[False][1]
    longest = [max(turn) for turn in zip(*lengths[False], strict=True)]
    assert lengths[True] == [longest, longest]


def test_a_held_out_sample_without_a_score_counts_in_length_turns_and_truncation():
    """Scored: 2 tokens in 1 turn. Not scored: 5 tokens in 3 turns, cut off; and 6 tokens in 3 turns. So 13/3, 7/3, 1/3."""
    right = one_turn("a", 0, 1.0)
    right.correct = True
    cut, branched = three_turns("b"), two_branches("c", 0, 0.0)
    cut.nodes[5].finish_reason = "length"
    for one in (cut, branched):
        one.reward, one.reward_error = None, "judge: it hung"
    found = summarize([Group(0, PROMPT, [right, cut, branched])])
    assert (found.accuracy, found.num_samples, found.num_reward_failures) == (1.0, 3, 2)
    assert found.response_tokens_mean == pytest.approx(13 / 3) and found.turns_mean == pytest.approx(7 / 3)
    assert found.truncated_fraction == pytest.approx(1 / 3)


# --- the journal ---------------------------------------------------------------------------------------------


def around(folder, source, **options) -> JournalledSource:
    batches = JournalledSource(Journal(folder), source, 2, say=lambda line: None, **options)
    batches.restore(SimpleNamespace(prompts={}, history=""))
    return batches


def test_files_that_a_stale_batch_may_need_are_kept_beyond_the_last(tmp_path):
    """With a bound of 2 the batch of the next step may have groups of the two files before the last one."""
    batches = around(tmp_path, Source(), freshness=Freshness(2), keep_last=1)
    for step in range(6):
        batches.take(step, step, lambda: None)
    batches.close()
    assert [step for step in Journal(tmp_path).steps() if step < 6] == [3, 4, 5]


def test_routes_that_a_stale_batch_may_need_stay_behind_a_checkpoint(tmp_path):
    source = Source()
    source.routes = True
    batches = around(tmp_path, source, freshness=Freshness(2), prune_routes=True)
    for step in range(5):
        batches.take(step, step, lambda: None)
    batches.on_checkpoint_saved(tmp_path / "step_00000004")
    batches.close()
    journal = Journal(tmp_path)
    assert [journal.has_pruned_routes(step) for step in range(5)] == [True, True, False, False, False]


def test_a_batch_that_failed_goes_on_from_its_records_when_it_is_asked_for_again(tmp_path):
    source = Source(fail_after=4)
    batches = around(tmp_path, source, freshness=Freshness())
    with pytest.raises(InterruptedError):
        batches.take(0, 0, lambda: None)
    source.fail_after = None
    batch = batches.take(0, 0, lambda: None)
    batches.close()
    assert tokens(batch) == [[1], [2], [3], [4], [5], [6]], "nothing is sampled twice"
    again = Journal(tmp_path).read(0)
    assert again is not None and again.batch is not None and tokens(again.batch) == tokens(batch)


def test_of_a_recorded_batch_only_what_is_not_known_is_handed_on(tmp_path):
    batches = around(tmp_path, Source(), freshness=Freshness())
    recorded = batches.take(0, 0, lambda: None)
    batches.close()
    names = [episode.episode_id for episode in recorded.episodes]
    for number, known in ((0, names[:1]), (1, names[2:4]), (5, [])):
        group = Group(number, PROMPT, [episode for episode in recorded.episodes if episode.episode_id in known])
        kept: list[str] = []
        RecordedSource(tmp_path).take(0, 0, lambda: None, {number: group}, lambda one: kept.append(one.episode_id))
        assert kept == [name for name in names if name not in known]


# --- the live source -----------------------------------------------------------------------------------------


class FakeCollector:
    """Hands out one batch, or breaks down behind five prompts."""

    def __init__(self, prompts, batch: RolloutBatch | None) -> None:
        self.prompts, self.batch, self.position, self.went_on = prompts, batch, ResumePoint({"drawn": 5}), []

    def start(self, step, known, keep, admit) -> None: ...

    def take(self, step, on_wait) -> RolloutBatch:
        self.prompts.drawn += 5
        if self.batch is None:
            raise RolloutError("the servers are gone")
        return self.batch

    def close(self) -> None: ...

    def continue_from(self, position: ResumePoint) -> None:
        self.went_on.append(position)


class FakePrompts:
    drawn = 2

    def state_dict(self):
        return {"drawn": self.drawn}

    def load_state_dict(self, state) -> None:
        self.drawn = state["drawn"]


def live(bound: int, versions: list[int] | None, committed: int = 7):
    """A live source whose only batch has an episode with a token of each version; None: sampling fails."""
    batch = None
    if versions is not None:
        nodes = [context(0, -1, [3]), sampled(1, 0, list(range(len(versions)))), context(2, 1, [4])]
        nodes[1].weight_versions = versions
        nodes.append(sampled(3, 2, [9], version=committed))
        batch = RolloutBatch(0, [Group(0, PROMPT, [Episode("the-episode", 0, PROMPT, nodes, reward=1.0)])])
    prompts = FakePrompts()
    loop = SimpleNamespace(run=lambda call: call.close() if versions is not None else _finish(call))
    pool = SimpleNamespace(committed_version=committed, freshness=Freshness(bound), loop=loop)
    collector = FakeCollector(prompts, batch)
    rollouts = SimpleNamespace(prompts=prompts, pool=pool, collector=collector)
    return LiveSource(rollouts, {}), prompts, collector


def _finish(call) -> None:
    with pytest.raises(StopIteration):
        call.send(None)


@pytest.mark.parametrize(("bound", "versions"), [(0, [7, 7]), (1, [6, 7]), (3, [4, 7]), (3, [5, 5])])
def test_a_batch_within_the_bound_is_handed_on(bound, versions):
    source, *_ = live(bound, versions)
    assert source.take(0, 7, lambda: None).episodes[0].episode_id == "the-episode"
    assert source.state_dict() == {"drawn": 5}


@pytest.mark.parametrize(("bound", "versions"), [(0, [6, 7]), (1, [5, 7]), (3, [7, 3, 7]), (0, [8]), (3, [7, 8])])
def test_a_batch_with_one_token_outside_the_bound_is_not_trained(bound, versions):
    source, *_ = live(bound, versions)
    named = f"the-episode: tokens of weight versions .{', '.join(map(str, sorted({*versions, 7})))}.; 7 is committed"
    with pytest.raises(RolloutError, match=named):
        source.take(0, 7, lambda: None)


def test_a_batch_that_failed_gives_its_prompts_back():
    source, prompts, collector = live(0, None)
    with pytest.raises(RolloutError, match="the servers are gone"):
        source.take(0, 7, lambda: None)
    assert prompts.drawn == 2 and source.state_dict() == {"drawn": 2}
    assert collector.went_on == [ResumePoint({"drawn": 2}, None)]


@pytest.mark.parametrize(("version", "is_taken"), [(5, True), (4, False)])
def test_of_an_earlier_file_nothing_is_taken_over_that_its_own_tokens_make_too_old(tmp_path, version, is_taken):
    """The file begins with version 5, which a bound of 2 admits in step 7; an episode in it was taken over, and older."""
    journal, said, made = Journal(tmp_path), [], {"rewards": "r", "weights": ""}
    nodes = [context(0, -1, [3, 1, 4]), sampled(1, 0, [21, 22], version=version)]
    group = Group(0, PROMPT, [Episode("step000005-g00000-s000", 0, PROMPT, nodes, reward=1.0)])
    journal.begin(5, 5, 2, {0: group}, made).close()
    records = ReusableRecords(journal, RecordRequirements(2, Freshness(2), needs_routes=False), said.append)
    tickets = {"first": 0, "done": [], "since": 5, "weights": {}}
    known, _ = records.open_groups(FileBegin(7, 7, made), None, tickets, lambda step, numbers: {0: PROMPT})
    assert list(known) == [0] * is_taken
    assert any("their weights too old" in line for line in said) != is_taken


TWO_FUNCTIONS = dict(functions=(dict(function="gsm8k"), dict(function="format", weight=0.5)))


def two_groups() -> RolloutBatch:
    """Rewards of two functions, 1 and 1/2 of them; sums 1, .5, 0 and 1.5, 1.5."""
    parts = [[(1, 0), (0, 1), (0, 0)], [(1, 1), (1, 1)]]
    groups = []
    for number, rows in enumerate(parts):
        episodes = [one_turn(f"{number}{k}", number, a + 0.5 * b) for k, (a, b) in enumerate(rows)]
        for episode, (a, b) in zip(episodes, rows, strict=True):
            episode.reward_parts = {"gsm8k": float(a), "format": float(b), "format/note": 7.0}
        groups.append(Group(number, PROMPT, episodes))
    return RolloutBatch(0, groups)


def advantages_of(batch: RolloutBatch) -> list[float]:
    return [row.advantage for episode in batch.episodes for row in episode.rows()]


def test_separate_rewards_weigh_each_function_by_itself():
    """(2, -1, -1) / sqrt 2 and half of (-1, 2, -1) / sqrt 2, over the deviation of all five."""
    batch = two_groups()
    fill_advantages(batch, config_of(advantage=dict(rewards="separate"), reward=TWO_FUNCTIONS), 0)
    sums = np.array([2 - 0.5, -1 + 1, -1 - 0.5, 0, 0]) / np.sqrt(2)
    assert advantages_of(batch) == pytest.approx((sums / np.sqrt((sums**2).mean())).tolist(), rel=1e-12)


def test_a_function_of_the_users_sees_the_whole_batch_and_the_control_permutes_all_of_it(tmp_path, monkeypatch):
    (tmp_path / "seen_by_hook.py").write_text(
        "def f(inputs):\n"
        "    assert inputs.step == 4 and inputs.weights == {'gsm8k': 1.0, 'format': 0.5}\n"
        "    assert inputs.group_ids.tolist() == [0, 0, 0, 1, 1] and (inputs.lengths > 0).all()\n"
        "    assert (inputs.rewards == inputs.parts['gsm8k'] + 0.5 * inputs.parts['format']).all()\n"
        "    return 10 * inputs.parts['gsm8k'] + inputs.parts['format']\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    own = dict(advantage=dict(function=dict(function="seen_by_hook:f")))
    batch = two_groups()
    fill_advantages(batch, config_of(**own, reward=TWO_FUNCTIONS), 4)
    assert advantages_of(batch) == [10, 1, 0, 11, 11]
    fill_advantages(batch, config_of(**own, reward=TWO_FUNCTIONS | dict(permute_in_batch=True)), 4)
    assert advantages_of(batch) != [10, 1, 0, 11, 11] and sorted(advantages_of(batch)) == [0, 1, 10, 11, 11]
