"""`data.reasoning_gym`: its short form, the files that follow from it, and what contradicts it."""

import pytest

from gspo_mega.base.errors import ConfigError
from gspo_mega.config import load_config
from gspo_mega.config.prompt_sources import held_out_path, sources_of

MADE = "data.reasoning_gym={tasks: {chain_sum: 1, leg_counting: 2.5}, num_rows: 8, num_held_out: 2, folder: /gym}"


def test_names_with_weights_are_short_for_the_list(write):
    short = load_config(write(), ["data.path=null", MADE]).config
    long = MADE.replace("{chain_sum: 1, leg_counting: 2.5}", "[{name: chain_sum}, {name: leg_counting, weight: 2.5}]")
    assert short == load_config(write(), ["data.path=null", long]).config
    assert [(source.name, source.path, source.weight) for source in sources_of(short.data)] == [
        ("chain_sum", "/gym/chain_sum.train.jsonl", 1.0),
        ("leg_counting", "/gym/leg_counting.train.jsonl", 2.5),
    ]


def test_held_out_prompts_are_its_own_unless_a_file_is_named(write):
    made = ["data.path=null", MADE]
    for overrides, path in (
        ([*made, "eval={}"], "/gym/held_out.jsonl"),
        ([*made, "eval={path: x.jsonl}"], "x.jsonl"),
        (["eval=null"], None),
    ):
        config = load_config(write(), overrides).config
        assert held_out_path(config.eval, config.data) == path


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (["eval={}"], "eval.path", "missing; the JSONL file of held-out prompts"),
        (
            [
                *("data.path=null", MADE, "data.procedural_python=/gym/bin/python"),
                "reward.functions=[{function: reasoning_gym}]",
            ],
            "reward.functions.0.options",
            "lacks `python`; data.procedural_python is /gym/bin/python, which has to score as well",
        ),
        (
            ["data.path=null", MADE.replace("2.5", "-1")],
            "data.reasoning_gym.tasks",
            "tasks.1.weight: is -1; must be > 0",
        ),
        (["data.path=null", MADE.replace("2.5", "much")], "data.reasoning_gym.tasks", "number"),
    ],
)
def test_what_contradicts_is_refused(write, overrides, key, said):
    with pytest.raises(ConfigError) as caught:
        load_config(write(), overrides)
    assert key in str(caught.value) and said in str(caught.value)
