"""Several turns with a tool, with real parts: a cold start from conversations, training, and what is shown of it."""

import subprocess
import sys

import pytest
from router_ties import differ_by_rounding
from run_support import REPOSITORY, SMALL, Command, environment

from gspo_mega.base.run_folder import RunFolder
from gspo_mega.data.calculator import calculator
from gspo_mega.data.chat import load_tokenizer
from gspo_mega.data.journal.journal import Journal
from gspo_mega.metrics.writer import read_metrics

NUM_STEPS = 2
# Enough steps to write calls, and too few to write the right ones.
FEW_STEPS = (
    *("sft.max_steps=40", "sft.eval_from_step=40", "sft.sequences_per_step=16"),
    *("sft.stop_accuracy_low=0", "sft.stop_accuracy_high=1"),
    *("optimizer.lr=5e-3", "optimizer.min_lr=5e-3", "optimizer.warmup_steps=0"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calculator")
    tool = [sys.executable, str(REPOSITORY / "tools/make_quickstart.py"), str(folder), "--task", "calculator"]
    subprocess.run(
        [*tool, "--num-train", "512", "--num-heldout", "16"],
        check=True,
        stdout=subprocess.DEVNULL,
        env=environment(),
    )
    return folder


def places(folder, name, model):
    data = folder / "data"
    return [
        *(f"run.dir={folder}", f"run.name={name}", f"model.path={folder / model}"),
        *(f"data.path={data / 'train.jsonl'}", f"eval.path={data / 'heldout.jsonl'}"),
        *(one for one in SMALL if not one.startswith("rollout.max_new_tokens")),
    ]


def finished(folder, command, config, *overrides):
    ended = Command(folder, command, str(REPOSITORY / "configs" / config), *overrides, forked=True)
    try:
        assert ended.finish() == 0, ended.out + ended.err
        assert ended.left_running(folder / ("sft" if command == "sft" else "train")) == []
        return ended
    finally:
        ended.end()


@pytest.fixture(scope="module")
def cold_start(folder):
    """The lines of metrics of `gspo-mega sft`, whose result is folder/sft/hf."""
    finished(folder, "sft", "calculator_sft.yaml", *places(folder, "sft", "model"), *FEW_STEPS)
    return read_metrics(RunFolder(folder / "sft").metrics_file)


@pytest.fixture(scope="module")
def trained(folder, cold_start):
    """(command, run folder, lines of metrics) of a short training."""
    command = finished(
        folder, "train", "calculator.yaml", *places(folder, "train", "sft/hf"), f"train.num_steps={NUM_STEPS}"
    )
    run = RunFolder(folder / "train")
    return command, run, [line for line in read_metrics(run.metrics_file) if line["step"] > 0]


def test_the_cold_start_learns_conversations(cold_start):
    first, last = cold_start[0], cold_start[-1]
    assert last["sft/loss"] < 0.5 * first["sft/loss"]
    # Two calls with their end tokens have 8 + 10 tokens, an answer 6; what the tool says is not among them.
    assert 16 * 14 < last["sft/num_tokens"] < 16 * 26
    assert last["eval/turns_mean"] > 1


def test_every_step_has_turns_and_calls_and_masks(trained):
    command, run, lines = trained
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    for line in lines:
        assert 1 < line["episode/turns_mean"] <= line["episode/turns_max"] <= 4
        assert line["rollout/num_tool_calls"] >= line["rollout/num_turns"] - line["rollout/num_trajectories"] > 0
        assert 0 < line["episode/masked_fraction"] < 1 and line["episode/rows_mean"] == 1
        assert line["rollout/num_episode_failures"] == 0
        # Each turn goes to the server that has its history, except the last token and what the tool said.
        assert 0.3 < line["rollout/cached_history_fraction"] < 1
        assert differ_by_rounding(run, line), "fp32: the two engines differ by rounding, and by no more"
    assert "turns " in command.out


def test_a_row_is_what_was_sampled_with_the_templates_text_between(folder, trained):
    _, run, _ = trained
    tokenizer = load_tokenizer(str(folder / "model"))
    num_calls = 0
    for step in range(NUM_STEPS):
        for episode in [one for group in Journal(run.journal_dir).read(step).groups.values() for one in group.episodes]:
            (row,) = episode.rows()
            assert row.response_mask.count(1) == episode.num_sampled_tokens
            sampled = [t for t, mask in zip(row.response_token_ids, row.response_mask, strict=True) if mask]
            assert sampled == [token for turn in episode.turns for token in turn.token_ids]
            whole = tokenizer.decode([*row.prompt.token_ids, *row.response_token_ids])
            assert whole.startswith("<|im_start|>system\ntools: calculator(expression)<|im_end|>\n<|im_start|>user\n")
            for call in episode.tool_calls:
                said = call.result if call.error is None else f"error: {call.error}"
                asked = f"[{call.arguments['expression']}]"
                assert asked in episode.turns[call.turn].text and f"tool\n{said}<|im_end|>" in whole
                if call.error is None:
                    assert said == calculator(call.arguments["expression"])
                num_calls += 1
    assert num_calls > 0


def test_inspect_shows_it_turn_by_turn(folder, trained):
    command = [sys.executable, "-m", "gspo_mega", "inspect", str(folder / "train"), "--step", "1"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, env=environment()).stdout
    for part in ("tool calculator {", "mask 1", "mask 0", "version 0"):
        assert part in shown, shown
