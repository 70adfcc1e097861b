import pytest

from gspo_mega.base.errors import ConfigError
from gspo_mega.config import load_config


def refused(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value).splitlines()


def test_values_are_read_by_the_yaml_rules_of_files(write):
    config = load_config(
        write(),
        [
            "optimizer.lr=3e-4",
            "train.num_steps=7",
            "run.name=no",
            "data.shuffle=false",
            "server.options={chunked_prefill_size: 64}",
            "server.options.watchdog.limit=a=b",
            "eval=",
        ],
    ).config
    assert (config.optimizer.lr, config.train.num_steps, config.run.name, config.data.shuffle) == (3e-4, 7, "no", False)
    assert config.server.options == {"chunked_prefill_size": 64, "watchdog": {"limit": "a=b"}}
    assert config.eval is None


def test_the_last_of_several_overrides_of_a_key_counts(write):
    loaded = load_config(write(), ["optimizer.lr=1e-3", "optimizer.lr=2e-3"])
    assert loaded.config.optimizer.lr == 2e-3
    assert loaded.where("optimizer.lr") == "override 'optimizer.lr=2e-3'"


def test_list_entries_are_addressed_by_index(write):
    sources = ["data.path=null", "data.sources=[{name: a, path: x}, {name: b, path: y}]"]
    config = load_config(write(), [*sources, "data.sources.1.path=z"]).config
    assert [source.path for source in config.data.sources] == ["x", "z"]
    assert refused(write(), *sources, "data.sources.2.path=z") == [
        "override 'data.sources.2.path=z': data.sources is a list with entries 0 to 1, not '2'"
    ]


def test_the_reward_shorthand(write):
    assert load_config(write(), ["reward=pkg.mod:f"]).config.reward.functions[0].function == "pkg.mod:f"
    weighed = load_config(write(), ["reward.functions.0.weight=2"]).config.reward.functions[0]
    assert (weighed.function, weighed.weight) == ("gsm8k", 2.0)


def test_unreadable_overrides_are_reported_together_with_the_file(write):
    lines = refused(write("zzz: 1\n"), "optimizer.lr", "=3", "optimizer..lr=1", "run.seed=[1", "run.name.x=1")
    assert lines[0].split(": ", 1)[1].startswith("zzz: unknown key")
    assert lines[1:] == [
        "override 'optimizer.lr': no `=` in it; write key=value, for example train.num_steps=10",
        "override '=3': the key '' has an empty part; write section.key=value",
        "override 'optimizer..lr=1': the key 'optimizer..lr' has an empty part; write section.key=value",
        lines[4],
        "override 'run.name.x=1': run.name is 'test', a value without keys inside",
    ]
    assert lines[4].startswith("override 'run.seed=[1': run.seed: not YAML")


def test_a_wrong_key_or_value_names_the_override(write):
    assert refused(write(), "optimizer.lrr=1") == [
        "override 'optimizer.lrr=1': optimizer.lrr: unknown key; did you mean 'lr'?"
    ]
    assert refused(write(), "optmizer.lr=1") == [
        "override 'optmizer.lr=1': optmizer: unknown key; did you mean 'optimizer'?"
    ]
    assert refused(write(), "batch.group_size=one") == [
        "override 'batch.group_size=one': batch.group_size: is 'one'; must be a whole number"
    ]
    assert refused(write(), "batch.num_mini_batches=17") == [
        "override 'batch.num_mini_batches=17': batch.num_mini_batches: 17 mini-batches of prompts_per_step x group_size"
        " = 16 trajectories leave some empty; at most 16"
    ]


def test_an_override_replaces_a_whole_section_and_its_positions(write):
    origin = "override 'batch={group_size: 0}': "
    lines = refused(write(), "batch={group_size: 0}")
    assert len(lines) == 3 and all(line.startswith(origin) for line in lines)
    assert origin + "batch.prompts_per_step: missing; it has no default (Prompts per rollout batch.)" in lines
    assert origin + "batch.group_size: is 0; must be >= 1" in lines
