"""What a recipe gives to other keys, and what contradicts it, by key and in words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from config_refusals import refused
from documented_runs import documented_runs

from gspo_mega.base.errors import ConfigError
from gspo_mega.config import load_config
from gspo_mega.config.algorithms import RECIPES
from gspo_mega.config.derived import compares_within_groups, least_of_group
from gspo_mega.plan import plan_run

ROOT = Path(__file__).parents[3]

CONTRADICTIONS = [
    ("dapo", ["objective.aggregation=sequence_mean_token_mean"], "contradicts `algorithm: dapo`; valid: token_mean"),
    ("luspo", ["objective.clip_high=0.2"], "is a mean over a whole response and is clipped at 0.002 / 0.0025"),
    ("cispo", ["kl.coefficient=0.1"], "contradicts `algorithm: cispo`, which has no KL term"),
    (
        "dr_grpo",
        ["advantage.divide_by_std=true"],
        "advantage.divide_by_std: true contradicts `algorithm: dr_grpo`, which removes the division by the group's"
        " standard deviation; valid: false",
    ),
    (
        "minirl",
        ["mismatch.correction=mask"],
        "mismatch.correction: mask contradicts `algorithm: minirl`, which weighs every token by its ratio to the"
        " server's log-prob; valid: none",
    ),
    (
        "minirl",
        ["old_log_probs=rollout"],
        "old_log_probs: rollout contradicts `algorithm: minirl`, which clips by the trainer's own old log-probs",
    ),
    (
        "clip_cov",
        ["old_log_probs=rollout"],
        "contradicts `algorithm: clip_cov`, which chooses tokens by the trainer's own",
    ),
    ("clip_cov", ["objective.covariance_low=5"], "objective.covariance_low: 5; must be < covariance_high (5)"),
    ("grpo", ["objective.covariance_share=0.1"], "objective.covariance_share: has no effect with `algorithm: grpo`"),
    ("minirl", ["advantage.divide_by_std=true"], "contradicts `algorithm: minirl`, whose advantage is R - E[R]"),
    (
        "gspo",
        ["objective.temperature_positive=1"],
        "objective.temperature_positive: has no effect with `algorithm: gspo`; leave it out, or use `algorithm: sapo`",
    ),
    ("sapo", ["objective.power_negative=1"], "leave it out, or use `algorithm: vespo`"),
    ("vespo", ["objective.weight_limit=1"], "leave it out, or use `algorithm: minirl`"),
    ("sapo", ["objective.dual_clip=3"], "objective.dual_clip: `algorithm: sapo` bounds no term from below"),
    ("gmpo", ["advantage.turns=return_to_go"], "a term of the whole sequence has one advantage"),
    ("vespo", ["advantage.turns=return_to_go"], "a term of the whole sequence has one advantage"),
    (
        "gspo",
        ["advantage.std_over=batch", "advantage.divide_by_std=false"],
        "advantage.std_over: batch has no effect with `divide_by_std: false`",
    ),
    (
        "grpo",
        ["advantage.baseline=leave_one_out"],
        "leave_one_out with a division by the group's standard deviation; set `divide_by_std: false` (RLOO), or"
        " `std_over: batch` (REINFORCE++)",
    ),
    ("grpo", ["advantage.baseline=batch"], "batch with a division by the group's standard deviation"),
    (
        "grpo",
        ["advantage.std_over=batch", "advantage.turns=return_to_go"],
        "return_to_go has a baseline of the group's turns; valid then: `baseline: group`, `std_over: group`",
    ),
    ("dr_grpo", ["objective.ratio=token"], "`algorithm: dr_grpo` has its own ratio"),
]


@pytest.mark.parametrize(("name", "overrides", "said"), CONTRADICTIONS)
def test_what_contradicts_a_recipe_is_refused_with_its_reason(write, name, overrides, said):
    with pytest.raises(ConfigError) as error:
        load_config(write(), [f"algorithm={name}", *overrides])
    assert said in " ".join(str(error.value).split())


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "custom"])
def test_every_recipe_is_a_configuration_by_its_name_alone(write, name):
    config = load_config(write(), [f"algorithm={name}"]).config
    recipe = RECIPES[name]
    for section, values in recipe.settings.items():
        of = getattr(config, section) if section else config
        assert {key: getattr(of, key) for key in values} == dict(values)


def test_defaults_of_other_keys_are_the_recipes(write):
    config = load_config(write(), ["algorithm=minirl"]).config
    assert (config.mismatch.correction, config.advantage.divide_by_std) == ("none", False)
    assert config.objective.weight_limit == 5.0
    config = load_config(write(), ["algorithm=dppo"]).config
    assert config.old_log_probs == "rollout"
    assert load_config(write(), ["algorithm=dppo", "old_log_probs=trainer"]).config.old_log_probs == "trainer"
    assert load_config(write(), ["algorithm=gspo"]).config.old_log_probs == "trainer"


def test_vespos_advantage_is_its_equations_and_a_division_its_scripts(write):
    """Eq. 20 has A = R - b; the authors' scripts leave a division by the group's deviation on."""
    assert not load_config(write(), ["algorithm=vespo"]).config.advantage.divide_by_std
    divided = load_config(write(), ["algorithm=vespo", "advantage.divide_by_std=true"])
    assert divided.config.advantage.divide_by_std


def test_a_recipe_that_divides_by_a_constant_has_the_generation_budget(write):
    config = load_config(write(), ["algorithm=dr_grpo"]).config
    assert config.objective.norm_constant_tokens == config.rollout.max_new_tokens
    given = load_config(write(), ["algorithm=dr_grpo", "objective.norm_constant_tokens=7"]).config
    assert given.objective.norm_constant_tokens == 7
    otherwise = load_config(write(), ["algorithm=dppo", "objective.aggregation=token_mean"]).config
    assert otherwise.objective.norm_constant_tokens is None


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["algorithm=sapo"], "algorithm sapo clips nothing"),
        (["algorithm=vespo"], "algorithm vespo clips nothing"),
        (["algorithm=dapo"], "as the paper's dynamic sampling does"),
        (["algorithm=dppo", "old_log_probs=trainer"], "advise against recomputed ones"),
        (["algorithm=dppo", "advantage.divide_by_std=true"], "; dppo divides by none"),
        (
            ["advantage.baseline=leave_one_out", "advantage.divide_by_std=false"],
            "advantages are relative to leave_one_out; the paper's are relative to the group only",
        ),
        (["advantage.std_over=batch"], "advantages are relative to group, divided by the batch's deviation"),
        (["algorithm=cispo", "objective.clip_high=1"], "clip range 1 / 1 instead of 1 / 4, the published one of cispo"),
    ],
)
def test_what_changes_the_meaning_is_said(write, overrides, said):
    assert any(said in notice for notice in load_config(write(), overrides).notices)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], "1 with `algorithm: gspo`, whose advantages compare the responses to one prompt; at least 2 (1 is valid"),
        (
            ["advantage.std_over=batch"],
            "1 with `algorithm: gspo`, whose advantages compare the responses to one prompt",
        ),
        (
            ["advantage.baseline=leave_one_out", "advantage.divide_by_std=false"],
            "1 with `advantage.baseline: leave_one_out`, which is the mean of the other responses to a prompt; at least"
            " 2 (1 is valid with: ppo, `advantage.baseline: batch`)",
        ),
    ],
)
def test_advantages_within_a_group_need_a_second_response(write, overrides, said):
    assert f"batch.group_size: {said}" in " ".join(refused(write(), "batch.group_size=1", *overrides).split())


def test_advantages_against_the_whole_batch_need_one_response_and_learn_from_equal_rewards(write):
    batch = ["algorithm=grpo", "advantage.baseline=batch", "advantage.std_over=batch"]
    config = load_config(write(), [*batch, "batch.group_size=1"]).config
    assert least_of_group(config) == 1 and not compares_within_groups(config)
    assert compares_within_groups(load_config(write(), ["algorithm=grpo", "advantage.std_over=batch"]).config)
    said = refused(write(), *batch, "rollout.filter_constant_groups=true")
    assert "with `advantage.baseline: batch`: a group whose rewards are all equal has advantages" in said


def test_certify_records_old_log_probs_of_its_own(write):
    overrides = ["algorithm=minirl", "old_log_probs=rollout"]
    assert load_config(write(), overrides, "certify").config.old_log_probs == "rollout"


ADVANTAGES = {
    "grpo-leave_one_out": ("leave_one_out", "group", False),
    "grpo-batch-batch": ("batch", "batch", True),
    "grpo-batch": ("group", "batch", True),
}


@pytest.mark.parametrize("name", [*RECIPES, *ADVANTAGES])
def test_each_recipe_and_estimator_has_a_documented_line_whose_configuration_plans(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    lines = {name: (file, overrides) for name, file, overrides in documented_runs(ROOT)}
    assert set(lines) == {*RECIPES, *ADVANTAGES} and len(documented_runs(ROOT)) == len(lines)
    file, overrides = lines[name]
    loaded = load_config(file, overrides, "train")
    config, recipe = loaded.config, RECIPES[name.partition("-")[0]]
    assert config.algorithm == recipe.name and recipe.name in Path(file).read_text(), "the file names it"
    assert plan_run(loaded, "cpu", ROOT / "configs/models/quickstart_moe.json").layout.world_size == 2
    assert config.batch.prompts_per_step * config.batch.group_size == 256, "lines are compared at equal samples"
    if name not in ("gspo", "gspo_token", "custom"):  # the paper's own range and average
        wanted = dict(recipe.objective_defaults)
        assert {key: getattr(config.objective, key) for key in wanted} == wanted
    for section, values in recipe.settings.items():
        of = getattr(config, section) if section else config
        assert {key: getattr(of, key) for key in values} == dict(values)
    if name in ADVANTAGES:
        own = config.advantage
        assert (own.baseline, own.std_over, own.divide_by_std) == ADVANTAGES[name]


def test_each_commented_line_of_the_configuration_of_objectives_plans(tmp_path):
    """Each `# algorithm:`, `# advantage:`, `# objective:` and `# mismatch:` line taken in, by itself, is a run; no recipe
    lacks one.
    """
    text = (ROOT / "configs/objectives.yaml").read_text()
    lines = re.findall(r"^# ((?:algorithm|advantage|objective|mismatch): .*)$", text, re.MULTILINE)
    seen = {"grpo", "ppo"}  # as it stands; from a file of its own
    for line in lines:
        key, _, value = line.partition(": ")
        taken = text.replace("\nalgorithm: grpo", "\n# algorithm: grpo") if key == "algorithm" else text
        if key == "objective" and "ratio:" in value:
            taken, value = text.replace("\nalgorithm: grpo", "\nalgorithm: custom"), "custom"
        file = tmp_path / "c.yaml"
        file.write_text(taken.replace(f"# {line}", line))
        several = ["reward={functions: [{function: integer}, {function: length}]}"] if "separate" in value else []
        loaded = load_config(file, several, "train")
        assert plan_run(loaded, "cpu", ROOT / "configs/models/quickstart_moe.json").layout.world_size == 2
        if key == "algorithm" or value == "custom":
            assert loaded.config.algorithm == value.split()[0]
            seen.add(loaded.config.algorithm)
    assert seen == set(RECIPES)
    # And GDPO's, and a function of the user's.
    assert sum(line.startswith("advantage") for line in lines) == len(ADVANTAGES) + 2


def test_a_recipe_as_published_says_nothing_of_its_advantages(write):
    for name in ("dr_grpo", "minirl", "dppo", "vespo"):
        assert not any("advantages are" in notice for notice in load_config(write(), [f"algorithm={name}"]).notices)


NAMED_CORRECTIONS = [
    (
        ["mismatch.correction=icepop"],
        "icepop weighs tokens, and `algorithm: gspo` has one term of a whole response; valid: none, truncate, mask,"
        " sequence_mis (or `algorithm: gspo_token`)",
    ),
    (
        ["algorithm=gmpo", "mismatch.correction=token_tis"],
        "token_tis weighs tokens, and `algorithm: gmpo` has one term",
    ),
    (
        ["algorithm=grpo", "mismatch.correction=kpop", "old_log_probs=rollout"],
        "kpop with `old_log_probs: rollout`: the servers' log-probs are the old ones, so the mismatch is in the policy"
        " ratio and its weight is 1",
    ),
    (["algorithm=dppo", "mismatch.correction=m2po"], "m2po with `old_log_probs: rollout`"),
    (["algorithm=minirl", "mismatch.correction=token_tis"], "token_tis contradicts `algorithm: minirl`"),
    (["mismatch.upper=3"], "mismatch.upper: has no effect with `correction: mask`; it belongs to: token_tis, icepop,"),
    (
        ["algorithm=grpo", "mismatch={correction: token_tis, threshold: 1}"],
        "mismatch.threshold: has no effect with `correction: token_tis`; it belongs to: kpop, m2po",
    ),
    (
        ["algorithm=grpo", "mismatch={correction: token_tis, bound_nats: 1}"],
        "mismatch.bound_nats: has no effect with `correction: token_tis`; leave it out",
    ),
    (["algorithm=grpo", "mismatch={correction: icepop, lower: 5}"], "mismatch.lower: 5 is not below mismatch.upper"),
]


@pytest.mark.parametrize(("overrides", "said"), NAMED_CORRECTIONS)
def test_a_named_correction_is_refused_where_it_has_no_meaning(write, overrides, said):
    assert said in " ".join(refused(write(), *overrides).split())


@pytest.mark.parametrize("name", ["token_tis", "icepop", "kpop", "sequence_mis", "m2po"])
def test_a_named_correction_is_taken_and_announced(write, name):
    from gspo_mega.algorithm.correction import CorrectionRule

    loaded = load_config(write("train: {num_steps: 1}\n"), ["algorithm=grpo", f"mismatch.correction={name}"])
    (notice,) = [text for text in loaded.notices if text.startswith("mismatch.correction")]
    assert notice.startswith(f"mismatch.correction {name} (") and "9.2 nats drops its response" in notice
    rule = CorrectionRule(name)
    assert (rule.upper_limit if name in ("token_tis", "icepop", "sequence_mis") else rule.divergence_limit) > 0


TWO = "reward={functions: [{function: gsm8k}, {function: format, weight: 0.5}]}"
SEPARATE = [
    ([], "advantage.rewards: separate, but the reward has 1 functions; at least 2"),
    ([TWO, "algorithm=dr_grpo"], "separate divides by each function's deviation; valid then: `divide_by_std: true`"),
    ([TWO, "advantage.std_over=batch"], "advantage.std_over: has no effect with `advantage.rewards: separate`"),
    (["reward={functions: [{function: gsm8k}, {function: gsm8k}]}"], "two functions are called gsm8k; give each"),
    ([TWO, "rollout.filter_constant_groups=true"], "a group with equal sums may differ in its parts; valid: false"),
    ([TWO, "algorithm=ppo"], "advantage.rewards: has no effect with `algorithm: ppo`"),
    ([TWO, "advantage.function=mine:f"], "advantage.rewards: has no effect with `advantage.function`"),
    (
        [TWO, "data={sources: [{name: s, path: x.jsonl, reward: gsm8k}], max_prompt_tokens: 16}"],
        "advantage.rewards: separate, and a source has a reward of its own; valid then: sum",
    ),
    ([TWO, "rollout.episode=mine:f"], "whose turns may have rewards of their own; valid then: sum"),
]


@pytest.mark.parametrize(("overrides", "said"), SEPARATE)
def test_separate_rewards_are_refused_where_they_have_no_meaning(write, overrides, said):
    assert said in " ".join(refused(write(), "algorithm=grpo", "advantage.rewards=separate", *overrides).split())


def test_separate_rewards_are_taken(write):
    assert load_config(write(), ["algorithm=grpo", "advantage.rewards=separate", TWO]).config.advantage.rewards
