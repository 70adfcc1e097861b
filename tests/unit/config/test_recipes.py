"""The table of algorithms: every entry is a choice of the schema, has an objective, and refuses what contradicts it."""

from __future__ import annotations

from typing import get_args

import pytest

from gspo_mega.algorithm.objective import AGGREGATIONS, mini_batch_denominator
from gspo_mega.algorithm.terms import objective_settings
from gspo_mega.base.errors import ConfigError
from gspo_mega.config import load_config
from gspo_mega.config.algorithms import RECIPES, SURROGATES, Aggregation, Surrogate
from gspo_mega.config.schema import Config, Objective
from gspo_mega.config.validate import resolve_defaults


def test_the_schema_offers_the_names_of_the_table():
    assert list(get_args(Config.model_fields["algorithm"].annotation)) == list(RECIPES)
    assert all(name == recipe.name for name, recipe in RECIPES.items())


def test_every_term_has_its_facts_and_is_used_by_a_recipe():
    assert set(SURROGATES) == set(get_args(Surrogate)) == {recipe.surrogate for recipe in RECIPES.values()}


def test_every_aggregation_of_the_schema_has_a_denominator_and_coefficients():
    assert set(AGGREGATIONS) == set(get_args(Aggregation))


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.ratio is not None])
def test_a_recipe_gives_the_ratio_and_its_defaults(write, name):
    config, recipe = load_config(write(), [f"algorithm={name}"]).config, RECIPES[name]
    settings = objective_settings(config.algorithm, config.objective)
    assert settings.surrogate == recipe.surrogate
    assert all(getattr(settings, key) == value for key, value in recipe.parameters.items())
    assert (settings.ratio, settings.clip_low, settings.clip_high, settings.aggregation) == (
        recipe.ratio,
        recipe.clip_low,
        recipe.clip_high,
        recipe.aggregation,
    )


def test_what_was_given_is_not_replaced_by_a_default(write):
    objective = resolve_defaults(load_config(write(), ["algorithm=grpo", "objective.clip_low=0.1"]).config).objective
    assert (objective.clip_low, objective.clip_high) == (0.1, 0.27)


def test_an_objective_without_any_ratio_is_refused():
    with pytest.raises(ValueError, match=r"objective\.ratio is absent"):
        objective_settings("custom", Objective())


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if not recipe.takes_kl])
def test_a_kl_term_contradicts_some_recipes(write, name):
    with pytest.raises(ConfigError, match=f"contradicts `algorithm: {name}`"):
        load_config(write(), [f"algorithm={name}", "kl.coefficient=0.1"])


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("sequence_mean_token_mean", 3.0), ("token_mean", 10.0), ("group_mean_token_mean", 2.0)],
)
def test_a_denominator_counts_what_is_averaged_over(aggregation, expected):
    assert mini_batch_denominator(aggregation, [2, 3, 5], [7, 7, 9]) == expected
    assert mini_batch_denominator(aggregation, [], []) == 1.0
