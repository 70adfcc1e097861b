"""Functions of the user in place of built-in parts: what is told from the configuration against them, by key and place."""

from __future__ import annotations

import json

import pytest
from config_refusals import refused

from gspo_mega.config import load_config
from gspo_mega.config.clip_range import band_of
from gspo_mega.config.derived import filters_groups, hooks_of
from gspo_mega.config.loader import render_config, render_json_schema

CUSTOM = ("algorithm=custom", "objective.ratio=sequence", "objective.function=mine:term")

REFUSED = [
    (["advantage.function=mine"], "advantage.function: 'mine' is no function; valid: package.module:function"),
    (["rollout.group_filter=a b:c"], "rollout.group_filter: 'a b:c' is no function"),
    (
        ["advantage=mine:f", "advantage.std_ddof=1"],
        "override 'advantage.std_ddof=1': advantage.std_ddof: has no effect with `advantage.function`",
    ),
    (["advantage=mine:f", "advantage.baseline=batch", "batch.group_size=1"], "advantage.baseline: has no effect with"),
    (["advantage=mine:f", "algorithm=dr_grpo"], "advantage.function: contradicts `algorithm: dr_grpo`, which removes"),
    (["advantage=mine:f", "algorithm=ppo"], "advantage.function: has no effect with `algorithm: ppo`"),
    (["objective.function=mine:f"], "objective.function: contradicts `algorithm: gspo`, which has its own term; valid"),
    (["algorithm=custom", "objective=mine:f"], "objective.ratio: missing; `algorithm: custom` needs it"),
    ([*CUSTOM, "objective.ratio=sequence_token"], "its terms are of sequences or of tokens; valid: sequence, token"),
    ([*CUSTOM, "objective.clip_high=0.1"], "objective.clip_high: has no effect with `objective.function`"),
    ([*CUSTOM, "objective.dual_clip=3"], "objective.dual_clip: has no effect with `objective.function`"),
    (
        ["rollout.group_filter=mine:f", "rollout.filter_constant_groups=true"],
        "rollout.filter_constant_groups: true with `rollout.group_filter`, which decides instead; valid: false",
    ),
    (["data.source=mine:C", "data.shuffle=false"], "data.shuffle: false has no effect with `data.source`"),
    (
        ["data.source=mine:C", "rollout.max_staleness=1"],
        "rollout.max_staleness: 1 with `data.source`: prompts would be",
    ),
    (["data.source=mine:C", "data.path=null", "eval={path: a}"], "data.source: there are no files of prompts"),
    (
        ["data={max_prompt_tokens: 8, source: 'mine:C', sources: [{name: a, path: a, weight: 2}]}"],
        "data.source: weights of sources have no effect with it, which makes the order",
    ),
    (["objective.entropy_coefficient=-1"], "objective.entropy_coefficient"),
    (
        ["objective.entropy_coefficient=0.01", "engine.batch_invariant=true", "precision=fp32"],
        "objective.entropy_coefficient: set with `engine.batch_invariant: true`: its gradient was not compared",
    ),
]


@pytest.mark.parametrize(("overrides", "said"), REFUSED)
def test_a_hook_that_contradicts_another_key_is_refused_at_its_place(write, overrides, said):
    assert said in " ".join(refused(write(), *overrides).split())


def test_a_file_says_file_line_and_key(write):
    text = refused(write("advantage: mine.of mine:f\nrollout_: 1\n"))
    assert "c.yaml:9:1: rollout_" in text or "rollout_" in text
    path = write("advantage: {function: 'mine', turns: return_to_go}\nalgorithm: grpo\n")
    assert f"{path}:8:" in refused(path) and "advantage.function: 'mine' is no function" in refused(path)


def test_a_name_stands_for_a_function_with_options_and_survives_rendering(write):
    loaded = load_config(write("advantage: mine:f\n"), ["data.source={function: mine:C, options: {levels: 3}}"])
    hooks = hooks_of(loaded.config)
    assert {key: (hook.function, hook.options) for key, hook in hooks.items()} == {
        "advantage.function": ("mine:f", {}),
        "data.source": ("mine:C", {"levels": 3}),
    }
    assert loaded.where("advantage.function").endswith(":8:1")
    again = write(text=render_config(loaded.config), name="again.yaml")
    assert load_config(again).config == loaded.config
    assert any("data.source: mine:C takes the place of the built-in part" in notice for notice in loaded.notices)
    schema = json.loads(render_json_schema())
    assert schema["properties"]["advantage"]["anyOf"][0]["type"] == "string"


def test_what_follows_from_a_hook(write):
    config = load_config(write(), [*CUSTOM, "rollout.group_filter=mine:f"]).config
    assert band_of(config.algorithm, config.objective) is None and filters_groups(config.rollout)
    plain = load_config(write()).config
    assert (
        band_of(plain.algorithm, plain.objective) is not None
        and not filters_groups(plain.rollout)
        and not hooks_of(plain)
    )
