"""Whose objective and advantages an algorithm of a comparison has."""

from __future__ import annotations

import pytest
from compare_rows import config

from gspo_mega.base.errors import ConfigError
from gspo_mega.config.algorithms import RECIPES
from gspo_mega.verify.compare.run import check_algorithms, config_of, range_of


def test_the_runs_own_algorithm_keeps_what_the_run_says():
    run = config(objective={"clip_low": 3e-3, "clip_high": 4e-3}, advantage={"divide_by_std": False})
    own = config_of(run, "gspo")
    assert (own.objective.clip_low, own.objective.clip_high, own.advantage.divide_by_std) == (3e-3, 4e-3, False)


@pytest.mark.parametrize(("own", "other"), [("gspo", "gspo_token"), ("gspo_token", "gspo")])
def test_the_other_form_of_the_runs_objective_has_the_runs_range_and_advantages(own, other):
    run = config(
        algorithm=own,
        objective={"clip_low": 3e-3, "clip_high": 4e-3, "dual_clip": 3.0},
        advantage={"std_ddof": 1, "baseline": "batch", "std_over": "batch"},
    )
    found = config_of(run, other)
    assert (found.algorithm, found.objective, found.advantage) == (other, run.objective, run.advantage)
    assert range_of(run, other) == {"clip_low": 3e-3, "clip_high": 4e-3, "range_of": "run"}


def test_a_term_of_the_whole_response_has_no_advantages_of_turns():
    run = config(algorithm="gspo_token", advantage={"turns": "return_to_go", "turn_discount": 0.5, "std_ddof": 1})
    found = config_of(run, "gspo").advantage
    assert (found.turns, found.turn_discount, found.std_ddof) == ("episode", 1.0, 1)
    assert config_of(run, "gspo_token").advantage == run.advantage


def test_whose_range_an_algorithm_has_is_said():
    run = config(algorithm="luspo", objective={"clip_low": 3e-3, "clip_high": 4e-3})
    assert range_of(run, "luspo")["range_of"] == "run"
    assert range_of(run, "gspo") == {"clip_low": 3e-4, "clip_high": 4e-4, "range_of": "paper"}
    assert range_of(run, "sapo") == {"clip_low": None, "clip_high": None, "range_of": None}


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in ("custom", "gspo", "gspo_token")])
def test_another_algorithm_has_its_papers_defaults(name):
    run = config(objective={"clip_low": 3e-3, "clip_high": 4e-3}, advantage={"divide_by_std": False})
    other, recipe = config_of(run, name), RECIPES[name]
    assert {key: getattr(other.objective, key) for key in recipe.objective_defaults} == dict(recipe.objective_defaults)
    assert other.advantage.divide_by_std == recipe.settings.get("advantage", {}).get("divide_by_std", True)
    assert other.old_log_probs == run.old_log_probs and other.mismatch == run.mismatch


def test_nothing_but_the_objective_is_in_the_gradient():
    run = config(kl={"coefficient": 0.1}, moe={"load_balancing": "aux_loss", "load_balancing_coefficient": 1e-3})
    alone = config_of(run, "grpo")
    assert (alone.kl.coefficient, alone.moe.load_balancing, alone.batch.num_mini_batches) == (0.0, "none", 1)


def test_algorithms_that_are_not_there_are_refused():
    with pytest.raises(
        ConfigError, match=r"--algorithms: the gradient of ppo is made of a critic's values.*gspo_token"
    ):
        check_algorithms(config().algorithm, ["gspo", "ppo"])
    with pytest.raises(ConfigError, match="--algorithms: 'cisp' is no algorithm; did you mean 'cispo'?"):
        check_algorithms(config().algorithm, ["gspo", "cisp"])
    with pytest.raises(ConfigError, match="custom has no defaults of its own, and the run's algorithm is gspo"):
        check_algorithms(config().algorithm, ["custom"])
    assert check_algorithms(config().algorithm, ["gspo", "grpo", "gspo"]) == ("gspo", "grpo")
