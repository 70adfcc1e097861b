"""A whole `gspo-mega train` run whose episodes are a program behind the endpoint: it trains on what the program sampled."""

import itertools
import sys
from pathlib import Path

import pytest
from plain_agent import earned
from router_ties import differ_by_rounding
from run_support import REPOSITORY, Command, small_overrides
from safetensors.torch import load_file

from gspo_mega.base.run_folder import RunFolder
from gspo_mega.data.chat import load_tokenizer
from gspo_mega.data.journal.journal import Journal
from gspo_mega.metrics.writer import read_metrics

NUM_STEPS, NUM_PROMPTS, GROUP_SIZE = 2, 2, 4
BATCH = NUM_PROMPTS * GROUP_SIZE
AGENT = Path(__file__).with_name("plain_agent.py")
EPISODE = f"{{function: foreign, options: {{command: [{sys.executable}, {AGENT}], reward: file, processes: 4}}}}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory, quickstart_files):
    """(command, run folder, lines of metrics)"""
    folder = tmp_path_factory.mktemp("foreign")
    small = small_overrides(quickstart_files, folder / "runs", "foreign")
    overrides = [
        *(one for one in small if not one.startswith(("eval.", "batch.prompts_per_step", "batch.group_size"))),
        *(f"batch.prompts_per_step={NUM_PROMPTS}", f"batch.group_size={GROUP_SIZE}"),
        *("eval=null", f"train.num_steps={NUM_STEPS}", "publish.keep_last=10"),
        *("data.chat_template=true", "data.max_prompt_tokens=64", "episodes.max_tokens=128"),
        *(f"rollout.episode={EPISODE}", "episodes.turn_deadline_seconds=500"),
        "episodes.environment=[GSPO_TEST_MARKER]",  # by which agents that are left would be found
    ]
    command = Command(folder, "train", str(REPOSITORY / "configs/quickstart.yaml"), *overrides, forked=True)
    try:
        assert command.finish() == 0, command.out + command.err
        run = RunFolder(folder / "runs" / "foreign")
        yield command, run, read_metrics(run.metrics_file)
    finally:
        command.end()


def test_it_ends_well_and_leaves_no_agent(trained):
    command, run, lines = trained
    assert command.err == "" and command.left_running(run.path) == []
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))


def test_each_step_changes_the_weights_and_publishes_them(trained):
    _, run, lines = trained
    versions = [
        {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}
        for folder in map(run.weights_version_dir, range(NUM_STEPS + 1))
    ]
    for (before, after), line in zip(itertools.pairwise(versions), lines, strict=True):
        assert before.keys() == after.keys()
        changed = [name for name in before if not before[name].equal(after[name])]
        assert any("self_attn" in name for name in changed) and any("embed" in name for name in changed)
        assert line["optimizer/grad_norm"] > 0 and line["optimizer/num_skipped"] == 0
        assert (
            line["optimizer/num_optimizer_steps"] == 2 * line["step"] and line["publish/weight_version"] == line["step"]
        )


def test_the_journal_has_the_programs_turns_with_their_masks(trained):
    _, run, _ = trained
    tokenizer = load_tokenizer(str(run.weights_version_dir(0)))
    for step in range(NUM_STEPS):
        batch = Journal(run.journal_dir).read(step).batch
        assert [len(group.episodes) for group in batch.groups] == [GROUP_SIZE] * NUM_PROMPTS
        for one in batch.episodes:
            assert one.failure is None and one.num_turns == 2 and one.num_branches == 0, one.failure
            (row,) = one.rows()
            sampled = [t for t, mask in zip(row.response_token_ids, row.response_mask, strict=True) if mask]
            assert sampled == [token for turn in one.turns for token in turn.token_ids]
            assert 0 < sum(row.response_mask) < len(row.response_mask)
            between = [t for t, mask in zip(row.response_token_ids, row.response_mask, strict=True) if not mask]
            assert "user\n1+1=" in tokenizer.decode(between)
            assert {version for turn in one.turns for version in turn.weight_versions} == {step}
            assert one.reward == earned(*(turn.messages[0]["content"] for turn in one.turns))


def test_the_metrics_count_what_the_program_did(trained):
    _, run, lines = trained
    for step, line in enumerate(lines):
        assert line["rollout/num_trajectories"] == BATCH and line["rollout/num_turns"] == 2 * BATCH
        assert line["episode/turns_mean"] == line["episode/turns_max"] == 2 and line["episode/rows_mean"] == 1
        assert 0 < line["episode/masked_fraction"] < 1
        assert line["rollout/num_endpoint_retries"] == BATCH, "one of each program's requests came again"
        assert line["rollout/num_endpoint_errors"] == BATCH, "one of each program's requests was refused"
        assert line["rollout/num_episode_failures"] == line["rollout/num_reward_failures"] == 0
        episodes = Journal(run.journal_dir).read(step).batch.episodes
        assert line["reward/mean"] == pytest.approx(sum(one.reward for one in episodes) / BATCH, abs=1e-12)
        lengths = [len(one.turns[0].messages[0]["content"]) for one in episodes]
        (first,) = (value for name, value in line.items() if name.startswith("reward/function/") and "first" in name)
        assert first == pytest.approx(sum(lengths) / BATCH, abs=1e-12)
        assert line["rollout/num_generated_tokens"] == sum(one.num_sampled_tokens for one in episodes)
        # The sum of every token's share of its sequence, which rounds.
        assert line["policy/num_sequences"] == pytest.approx(BATCH) and line["groups/constant_fraction"] == 0
        # The trainer scores the very rows that the server sampled, with what stands between the turns.
        assert line["mismatch/abs_log_ratio_max"] > 0
        assert differ_by_rounding(run, line), "fp32: the two engines differ by rounding, and by no more"
