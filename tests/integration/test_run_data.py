"""`gspo-mega train` and what users bring: problems in GSM8K's shape, and a file with a broken line."""

import json

import pytest
from run_support import REPOSITORY, Command, small_overrides

from gspo_mega.base.run_folder import RunFolder
from gspo_mega.metrics.writer import read_metrics
from gspo_mega.rollout.registration import read_registrations

# Own problems in the shape of GSM8K's rows.
GSM8K_ROWS = r"""
{"question": "Ana plants 6 rows of 7 tulips. Rabbits eat 5 of them. How many are left?", "answer": "She plants 6*7 = <<6*7=42>>42 tulips.\n42-5 = <<42-5=37>>37 are left.\n#### 37"}
{"question": "A bus has 48 seats. A quarter of them are empty. How many people sit in it?", "answer": "48/4 = <<48/4=12>>12 seats are empty.\n48-12 = <<48-12=36>>36 people sit.\n#### 36"}
{"question": "Tom saves $15 a week. After 8 weeks he buys a ball for $20. How much does he have?", "answer": "He saves 15*8 = $<<15*8=120>>120.\nThen he has 120-20 = $<<120-20=100>>100.\n#### 100"}
{"question": "Lea reads 30 pages a day for 5 days, then twice as many on the sixth. How many pages is that?", "answer": "30*5 = <<30*5=150>>150.\n150+60 = <<150+60=210>>210.\n#### 210"}
{"question": "Three boxes hold 250 nails each. 1,100 nails are needed. How many are missing?", "answer": "There are 3*250 = <<3*250=750>>750.\n1100-750 = <<1100-750=350>>350 are missing.\n#### 350"}
{"question": "A shop sells 12 eggs for $3. What do 60 eggs cost?", "answer": "60/12 = <<60/12=5>>5 dozen.\n5*3 = $<<5*3=15>>15.\n#### 15"}
"""


@pytest.fixture
def start(tmp_path):
    started = []

    def launch(*arguments, forked=False):
        started.append(Command(tmp_path, "train", *arguments, forked=forked))
        return started[-1]

    yield launch
    assert [command.end() for command in started] == [[]] * len(started), "processes were left running"


def test_problems_in_gsm8ks_shape_train_and_long_ones_are_left_out(start, tmp_path, quickstart_files):
    rows = [json.loads(line) for line in GSM8K_ROWS.strip().splitlines()]
    rows[2:2] = [{"question": "How many? " + "And then, on the next day, ten more. " * 60, "answer": "Many.\n#### 610"}]
    rows.append({"question": "What is 1+1? " * 90, "answer": "#### 2"})
    data = tmp_path / "problems.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = start(
        str(REPOSITORY / "configs/gsm8k.yaml"),
        f"data.path={data}",
        f"model.path={quickstart_files / 'model'}",
        f"run.dir={tmp_path / 'runs'}",
        "train.num_steps=1",
        "batch.prompts_per_step=6",
        "batch.group_size=2",
        "rollout.max_new_tokens=16",
        "server.max_total_tokens=4096",
        "server.start_deadline_seconds=600",
        "rollout.no_server_deadline_seconds=900",
        forked=True,
    )
    assert command.finish() == 0, command.out + command.err
    assert command.err == ""
    assert (
        f"data     {data}: 8 prompts; 2 of 8 examined are longer than data.max_prompt_tokens and left out"
        in command.out
    )
    run = RunFolder(tmp_path / "runs" / "gsm8k")
    (line,) = read_metrics(run.metrics_file)
    assert line["rollout/num_trajectories"] == 12 and line["rollout/num_reward_failures"] == 0
    assert "reward/function/gsm8k" in line and "step 1/1" in command.out
    # Each of the six that fit, the system prompt in front, was sampled twice: no prompt is longer than 256 tokens.
    tokens = line["speed/tokens_per_second"] * line["time/step_seconds"] - 12 * line["response/length_mean"]
    assert 12 * 40 < tokens < 12 * 256
    assert line["data/epoch"] == 1.0, "six are sampled, and two passed over"
    assert command.left_running(run.path) == []


def test_a_broken_line_is_named_before_any_server_is_waited_for(start, tmp_path, quickstart_files):
    good = (quickstart_files / "data/train.jsonl").read_text().splitlines()
    data = tmp_path / "train.jsonl"
    data.write_text("\n".join([*good[:6], good[6][:-1], *good[7:9], '{"prompt": "1+1="}']) + "\n")
    overrides = small_overrides(quickstart_files, tmp_path / "runs", "broken")
    command = start(str(REPOSITORY / "configs/quickstart.yaml"), *overrides, f"data.path={data}")
    assert command.finish() == 2
    first, second = command.err.splitlines()
    assert f"data.path: {data}:7: not JSON" in first
    assert f"data.path: {data}:10: no key 'answer'" in second
    assert "Traceback" not in command.out + command.err
    run = RunFolder(tmp_path / "runs" / "broken")
    assert not any(
        found.state == "ready" for attempt in run.attempts() for found in read_registrations(attempt.servers_dir)
    )
    assert not run.metrics_file.exists()
    assert command.left_running(run.path) == []
