"""The study of the paper's claims: its runs, what is read off them, and the row that a run gets."""

import asyncio
import dataclasses
import json
import math
from pathlib import Path

import claims
import claims_arms
import claims_counting
import claims_rows
import claims_turns
import pytest
import study_rows
import tolerance

from gspo_mega.agents.protocol import Task
from gspo_mega.config import load_config
from gspo_mega.data.calculator import calculator
from gspo_mega.models.huggingface import read_model_spec

CONFIGS = Path(__file__).parents[3] / "configs"


def test_every_run_has_a_name_of_its_own_and_a_configuration():
    runs = claims_arms.in_order(claims_arms.ARMS, claims_arms.SEEDS)
    assert len({(arm.block, arm.name, seed) for arm, seed in runs}) == len(runs) == 60
    assert [(arm.name, seed) for arm, seed in runs[:4]] == [("gspo", 1), ("grpo", 1), ("ppo", 1), ("gspo", 2)]
    for arm, seed in runs:
        config = load_config(CONFIGS / arm.config, [f"run.name={arm.name}-seed{seed}", *arm.overrides()]).config
        assert config.algorithm == arm.algorithm and config.moe.routing_replay == arm.replay
        assert config.batch.num_mini_batches == arm.mini_batches and config.eval.every_steps == 10
        if arm.block == "turns":
            assert config.objective.clip_low == 3e-3 and config.advantage.turns == arm.advantages
            assert config.train.num_steps * config.batch.prompts_per_step * config.batch.group_size == 40 * 256
            continue
        if arm.block == "mini_batches":
            expected = (0.0015, 0.002) if arm.algorithm == "gspo" else (0.2, 0.27)
            assert (config.objective.clip_low, config.objective.clip_high) == expected
            samples = config.train.num_steps * config.batch.prompts_per_step * config.batch.group_size
            assert samples == 40 * 128 and config.optimizer.lr == 1e-4
            continue
        num_steps = {"learning": 80, "routing": 40, "critic": 80}[arm.block]
        assert config.train.num_steps * config.batch.prompts_per_step * config.batch.group_size == num_steps * 256
        assert config.rollout.max_new_tokens == 48 and config.optimizer.lr == 1e-4
        if arm.algorithm != "gspo":
            assert config.objective.clip_low == 0.2
        if arm.block == "critic":
            assert config.batch.group_size == (8 if arm.algorithm == "gspo" or arm.responses else 1)
            assert arm.algorithm == "gspo" or (config.critic.optimizer.lr < 1e-9) == arm.frozen
    shape = read_model_spec(claims.SHAPE)
    assert (shape.num_layers, shape.moe.num_experts) == (6, 32)


def test_the_area_under_a_curve():
    assert claims_rows.area_under([(0, 0.2), (10, 0.4), (40, 0.6)]) == pytest.approx((10 * 0.3 + 30 * 0.5) / 40)
    with pytest.raises(ValueError, match="1 measurements"):
        claims_rows.area_under([(0, 0.2)])


def lines(changed=0.25):
    yield {"step": 0, "eval/accuracy": 0.3}
    for step in range(1, 21):
        line = {"step": step, "reward/mean": step / 20, "policy/token_clip_fraction": 0.1, "policy/clip_fraction": 0.2}
        line |= {"policy/entropy": 1.0, "routing/changed_since_old": changed if step <= 10 else 3 * changed}
        line |= {f"routing/layer/{layer}/replaced_since_old": layer / 1000 * step / 10.5 for layer in (0, 2, 10)}
        yield line | ({"eval/accuracy": 0.5} if step % 10 == 0 else {})


def test_what_is_read_off_a_run():
    found = claims_rows.measured(list(lines()))
    assert found["area"] == pytest.approx(0.45) and (found["token_clip"], found["sequence_clip"]) == (0.1, 0.2)
    assert (found["changed"], found["changed_last"]) == (0.5, 0.75)
    assert found["replaced"] == pytest.approx(0.004) and found["replaced_layers"] == "0.000 0.200 1.000"
    assert found["reward_best"] == found["reward_last"] == pytest.approx(sum(range(11, 21)) / 200)
    assert math.isnan(found["explained"]) and math.isnan(found["changed_from_rollout"])
    assert found["reward"] == pytest.approx(10.5 / 20) and found["setback"] == 0.0


def test_how_ratios_spread_and_how_far_the_reward_falls_back():
    rewards = [0.1] * 5 + [0.5] * 10 + [0.2] * 10 + [0.4] * 10
    steps = [
        {"step": step, "reward/mean": reward, "policy/k2": 0.02, "policy/log_ratio/update/sd": 0.003}
        | {"response/length_mean": 145.0, "optimizer/grad_norm": 0.5, "optimizer/grad_norm_max": step / 10}
        for step, reward in enumerate(rewards, 1)
    ]
    found = claims_rows.measured([{"step": 0, "eval/accuracy": 0.0}, *steps, {"step": 35, "eval/accuracy": 1.0}])
    assert found["setback"] == pytest.approx(0.3) and found["reward_last"] == pytest.approx(0.4)
    assert found["token_spread"] == pytest.approx(0.2), "k2 is half of the mean square"
    assert (found["sequence_spread"], found["response_tokens"]) == (pytest.approx(0.003), 145.0)
    assert (found["grad_norm"], found["grad_norm_max"]) == (pytest.approx(0.5), 3.5)


@pytest.fixture
def study(monkeypatch, tmp_path):
    monkeypatch.setattr(claims.Study, "cold_start", lambda self: (tmp_path, "abc", (0.3, 0.02)))
    monkeypatch.setattr(claims.Study, "accuracy", lambda self, model, name: {"accuracy": 0.6, "standard_error": 0.015})
    folder = tmp_path / "learning"

    def call(command, log, good=(0,)):
        name = next(word.removeprefix("run.name=") for word in command if word.startswith("run.name="))
        (folder / "arms" / name).mkdir(parents=True)
        (folder / "arms" / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines()))
        return codes.pop(0)

    codes = [0, tolerance.NumericsError.exit_code]
    monkeypatch.setattr(claims, "call", call)
    return claims.Study(folder)


def test_a_finished_run_has_a_row_that_is_read_back_and_not_made_again(study, tmp_path):
    row, ended = study.train(claims_arms.ARMS[0], 1), study.train(claims_arms.ARMS[1], 2)
    assert (row.outcome, row.accuracy, row.num_steps, row.cold_start) == ("trained", 0.6, 20, "abc")
    assert (ended.outcome, ended.accuracy, ended.arm, ended.seed) == ("not finite", 0.0, "grpo", 2)
    file = tmp_path / "rows.csv"
    for one in (row, ended):
        study_rows.append_row(file, one)
    back = study_rows.read_table(file, claims_rows.Row)
    assert [one.arm for one in back] == ["gspo", "grpo"] and math.isnan(back[0].explained)
    assert claims_rows.finished(back, claims.PROTOCOL) == {("learning", "gspo", 1), ("learning", "grpo", 2)}
    assert claims_rows.finished(back, {"learning": claims.PROTOCOL["learning"] + 1}) == set()


def test_the_plan_shows_what_has_a_row(study, tmp_path, capsys):
    file = tmp_path / "rows.csv"
    study_rows.append_row(file, study.train(claims_arms.ARMS[0], 1))
    assert claims.main(["--plan", "--rows", str(file), "--block", "learning", "--seeds", "1"]) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["row", "1", "1"]


def test_arms_by_name(tmp_path, capsys):
    place = ["--plan", "--rows", str(tmp_path / "rows.csv")]
    assert (
        claims.main([*place, "--block", "learning", "routing", "--arm", "ppo", "grpo-routes_R2", "--seeds", "1", "2"])
        == 0
    )
    found = [line.split()[1:4] for line in capsys.readouterr().out.splitlines()]
    assert found == [[name, "seed", seed] for name in ("ppo", "grpo-routes_R2") for seed in ("1", "2")]
    with pytest.raises(SystemExit):
        claims.main([*place, "--block", "routing", "--arm", "ppo"])
    assert "no such arm: ppo" in capsys.readouterr().err


def test_the_table_says_what_can_be_told(study, tmp_path, capsys):
    import claims_figures

    file, page = tmp_path / "rows.csv", tmp_path / "claims.md"
    row = study.train(claims_arms.ARMS[0], 1)
    accuracies = {"gspo": (0.60, 0.62, 0.64), "grpo": (0.61, 0.60, 0.62), "ppo": (0.30, 0.32, 0.34)}
    for arm, values in accuracies.items():
        for seed, accuracy in enumerate(values, 1):
            one = dataclasses.replace(row, arm=arm, seed=seed, accuracy=accuracy)
            study_rows.append_row(file, one)
    page.write_text("before\n<!-- rows of claims begin -->\nold\n<!-- rows of claims end -->\nafter\n")
    place = ["--out", str(tmp_path), "--page", str(page)]
    assert claims_figures.main(["--rows", str(file), *place]) == 0
    text = page.read_text()
    assert "\nold\n" not in text and text.startswith("before") and text.endswith("after\n")
    assert "| `gspo` | 3 | 0.620 ± 0.012 (0.600 0.620 0.640) | 0.450 ± 0.000 | 0.1 ± 0 |" in text
    lines = [line for line in text.splitlines() if " less `" in line]
    assert len(lines) == 2 and lines[0].startswith("| `grpo` less `gspo` | -0.010 | 0.")
    assert [line for line in text.splitlines() if "**" in line] == lines[1:], "what can be told is in bold"
    assert lines[1].startswith("| `ppo` less `gspo` | **-0.300** | 0.") and lines[1].endswith(" |")
    assert (tmp_path / "claims_learning.svg").read_text().count("<circle") == 9 + 4
    assert not (tmp_path / "claims_routing.svg").exists()
    assert claims_figures.main(["--rows", str(tmp_path / "none.csv"), *place]) == 1


def test_a_cold_start_that_solves_next_to_nothing_is_refused(monkeypatch, study, tmp_path, capsys):
    monkeypatch.setattr(claims.Study, "cold_start", lambda self: (tmp_path, "abc", (0.011, 0.003)))
    place = ["--rows", str(tmp_path / "rows.csv"), "--folder", str(tmp_path), "--block", "turns"]
    assert claims.main(place) == 2 and not (tmp_path / "rows.csv").exists()
    assert "turns: the cold start solves 0.011, under 0.05" in capsys.readouterr().out


def test_rows_of_an_earlier_protocol_of_a_block_stay_in_the_file_alone(study, tmp_path, capsys):
    import claims_figures

    row = dataclasses.replace(study.train(claims_arms.ARMS[0], 1), block="turns", arm="gspo-episode")
    rows = [dataclasses.replace(row, protocol=1, accuracy=0.001), dataclasses.replace(row, protocol=2, seed=2)]
    assert claims_rows.of_protocol(rows, claims.PROTOCOL) == rows[1:]
    file, page = tmp_path / "rows.csv", tmp_path / "claims.md"
    for one in rows:
        study_rows.append_row(file, one)
    page.write_text("<!-- rows of claims begin -->\n<!-- rows of claims end -->\n")
    assert claims_figures.main(["--rows", str(file), "--out", str(tmp_path), "--page", str(page)]) == 0
    assert "| `gspo-episode` | 1 | 0.600 (0.600) |" in page.read_text() and "0.001" not in page.read_text()
    capsys.readouterr()
    assert claims.main(["--plan", "--rows", str(file), "--arm", "gspo-episode", "--seeds", "1", "2"]) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["1", "row"]


def test_an_arm_is_compared_with_what_its_claim_is_about():
    import claims_figures

    def compared(block):
        return claims_figures.compared([arm.name for arm in claims_arms.ARMS if arm.block == block])

    assert compared("learning") == [("grpo", "gspo"), ("ppo", "gspo")]
    assert compared("routing") == [
        ("grpo-routes_none", "gspo-routes_none"),
        *((f"{name}-routes_{replay}", f"{name}-routes_none") for replay in ("R2", "R3") for name in ("gspo", "grpo")),
    ]
    assert compared("turns") == [
        ("gspo_token-episode", "gspo-episode"),
        ("gspo_token-return_to_go", "gspo_token-episode"),
    ]
    assert claims_figures.compared(["gspo-routes_none", "grpo-routes_R2"]) == []


def test_what_sixteen_mini_batches_cost_one_algorithm_more_than_the_other(study):
    import claims_figures

    one = dataclasses.replace(study.train(claims_arms.ARMS[0], 1), block="mini_batches", share=0.5)
    accuracies = {"gspo-4": (0.60, 0.62), "gspo-16": (0.59, 0.61), "grpo-4": (0.61, 0.59), "grpo-16": (0.30, 0.32)}
    rows = [
        dataclasses.replace(one, arm=arm, seed=seed, accuracy=accuracy, response_tokens=144.6)
        for arm, values in accuracies.items()
        for seed, accuracy in enumerate(values, 1)
    ]
    lines = claims_figures.table(rows).splitlines()
    assert (
        lines[2].startswith("| `gspo-4` | 2 | 0.610 ± 0.010 (0.600 0.620) | 0.500 ± 0.000 |") and "| 145 |" in lines[2]
    )
    assert [line.split("|")[1].strip() for line in lines if " less `" in line] == [
        "`gspo-16` less `gspo-4`",
        "`grpo-4` less `gspo-4`",
        "`grpo-16` less `grpo-4`",
    ]
    # A spread of .0141 with 4 degrees of freedom: (2.776 + .941) x .0141 x sqrt(4 / 2) = .0743.
    assert "| final accuracy | -0.290 | -0.010 | **-0.280** | 0.074 |" in lines
    assert claims_figures.costs(rows[:6]) == [], "an arm is missing"


class Calls:
    """A policy that makes these calls one after the other, and a calculator; keeps the rewards of turns."""

    def __init__(self, *expressions):
        self.left, self.rewards, self.turns = list(expressions), {}, 0

    async def turn(self, messages):
        self.turns += 1
        call = self.left.pop(0) if self.left else None
        return {"role": "assistant", "content": "", **({"tool_calls": [call]} if call else {})}

    async def answer(self, message):
        return [{"role": "tool", "content": calculator(call)} for call in message["tool_calls"]]

    def set_reward(self, turn, value):
        assert turn == -1
        self.rewards[self.turns] = value


@pytest.mark.parametrize(
    "calls, rewards",
    [
        (("47*86", "4042+39"), {1: 0.25, 2: 0.25}),
        (("47*86+39",), {1: 0.25}),
        (("47+86", "47*86", "47*86", "4042-39"), {2: 0.25}),  # a needed result counts once
        ((), {}),
    ],
)
def test_a_call_is_rewarded_where_its_result_is_needed(calls, rewards):
    policy = Calls(*calls)
    task = Task(messages=[{"role": "user", "content": "47*86+39="}])
    assert asyncio.run(claims_turns.calculator_turns(task, policy, policy)).reward is None
    assert policy.rewards == rewards and policy.turns == len(calls) + 1


def test_what_a_problem_needs():
    assert claims_turns.needed("47*86=") == {"4042"} and claims_turns.needed("47*86-42=") == {"4042", "4000"}
    with pytest.raises(ValueError, match="'47' is no problem"):
        claims_turns.needed("47")


def test_counting_on_is_written_ones_first():
    row = claims_counting.row_of(417, 23)
    assert row["prompt"] == "714+320:" and row["response"] == row["answer"]
    assert row["answer"].startswith("a714+320=044b044+320=364c364+320=684") and row["answer"].endswith("=396")
    assert len(row["answer"]) == 144 and (417 + 12 * 23) == 693
    assert claims_counting.row_of(990, 15)["answer"].startswith("a099+510=500b500+510=020"), "modulo 1000"


def test_no_problem_is_in_both_files():
    train, heldout = ([row["prompt"] for row in claims_counting.rows(split, 5000)] for split in (False, True))
    assert len(set(train)) == len(set(heldout)) == 5000 and not set(train) & set(heldout)
    assert heldout[:9] == [row["prompt"] for row in claims_counting.rows(True, 9)]


def test_sums_count_up_to_the_first_mistake():
    row = claims_counting.row_of(417, 23)
    right = row["answer"]

    def score(response):
        found = claims_counting.score(prompt=row["prompt"], response=response, answer=right, metadata={})
        return found["reward"], found["correct"]

    assert score(right) == (1.0, True) and score("") == (0.0, False)
    assert score(right[:30]) == (2 / 12, False)
    assert score(right[:40] + "x" + right[41:]) == (3 / 12, False)
    assert score(right + right[:5]) == (12 / 13, False)
