"""What makes a trajectory is told apart by what it is made of: the source of rewards, their options, weights,
settings.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from gspo_mega.base import user_functions
from gspo_mega.config import load_config
from gspo_mega.train.reusable_records import first_weights, made_by, source_digest

CONFIG = "configs/quickstart.yaml"


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """Writes source files below the working directory, as a user's rewards are."""
    monkeypatch.chdir(tmp_path)

    def write(files=(), **more):
        for name, text in {**dict(files), **more}.items():
            path = tmp_path / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))

    return write


def test_a_repaired_function_of_the_same_name_is_another_and_nothing_is_run_to_know_it(sources, tmp_path):
    ran = tmp_path / "ran"
    sources(my_reward=f"open({str(ran)!r}, 'w')\ndef score(**_):\n    return 0\n", other="x = 1")
    before = source_digest("my_reward:score")
    sources(other="x = 2")
    assert source_digest("my_reward:score") == before
    sources(my_reward=f"open({str(ran)!r}, 'w')\ndef score(**_):\n    return 1\n")
    assert source_digest("my_reward:score") != before
    assert not ran.exists() and "my_reward" not in sys.modules


@pytest.mark.parametrize(
    "how",
    [
        "import helper",
        "from helper import check",
        "from pack import tools",
        "from pack.tools import check",
        "import pack.tools",
        "import chain",
    ],
)
def test_what_the_function_imports_of_its_own_counts_as_well(sources, how):
    sources(my_reward=f"{how}\n", helper="check = 1", chain="import helper")
    sources({"pack/__init__": "", "pack/tools": "from . import deep", "pack/deep": "x = 1"})
    before = source_digest("my_reward:score")
    sources({"helper": "check = 2"} if "pack" not in how else {"pack/deep": "x = 2"})
    assert source_digest("my_reward:score") != before


def test_relative_imports_of_a_package_are_followed(sources):
    sources({"pack/__init__": "", "pack/tools": "x = 1", "pack/score": "from .tools import x"})
    before = source_digest("pack.score:f")
    sources({"pack/tools": "x = 2"})
    assert source_digest("pack.score:f") != before


def test_a_module_that_only_the_configurations_folder_has_counts_and_one_of_the_working_directory_comes_first(
    sources, tmp_path, monkeypatch
):
    sources({"task/beside": "import beside_helper", "task/beside_helper": "x = 1"})
    (tmp_path / "beside").mkdir()  # a folder without code is no module
    nothing = source_digest("beside:score")
    user_functions.look_last_in(str(tmp_path / "task"))
    first = source_digest("beside:score")
    sources({"task/beside_helper": "x = 2"})
    second = source_digest("beside:score")
    sources(beside="import beside_helper")
    assert len({nothing, first, second}) == 3 and source_digest("beside:score") == second, "the same sources elsewhere"
    sources(beside="x = 3")
    assert source_digest("beside:score") not in (nothing, first, second)


def test_folders_without_an_init_are_packages_at_any_depth(sources):
    sources({"of_team/rewards/sums/score": "from of_team.rewards.tools import x", "of_team/rewards/tools": "x = 1"})
    before = source_digest("of_team.rewards.sums.score:f")
    assert before != source_digest("of_team.rewards.sums.other:f")
    sources({"of_team/rewards/tools": "x = 2"})
    assert source_digest("of_team.rewards.sums.score:f") != before
    assert "of_team" not in sys.modules


def test_installed_packages_and_broken_sources_are_no_obstacle(sources):
    sources(my_reward="import numpy, json, not_there\nfrom gspo_mega.base.errors import DataError\n", broken="def (\n")
    assert source_digest("my_reward:score") == source_digest("my_reward:score") != source_digest("broken:score")
    assert source_digest("not_there:score") == source_digest("not_there_either.x:score")


def test_options_weights_and_settings_count_and_how_a_run_is_served_does_not():
    def of(*overrides):
        return made_by(load_config(CONFIG, overrides).config)

    base = of()
    assert base == of(
        "reward.num_workers=5", "reward.deadline_seconds=3", "rollout.max_concurrent_requests=3", "server.num_servers=2"
    )
    assert (
        base["rewards"] != of("reward.functions.0.weight=2")["rewards"]
        and base["sampling"] == of("reward.functions.0.weight=2")["sampling"]
    )
    assert base["rewards"] != of("reward=exact_match")["rewards"]
    assert base["sampling"] != of("rollout.temperature=0.9")["sampling"]


def test_other_weights_of_the_same_shape_are_others(tmp_path):
    def of(**files):
        for name, data in files.items():
            (tmp_path / name.replace("_", ".")).write_bytes(data)
        return first_weights(load_config(CONFIG, [f"model.path={tmp_path}"]).config.model)

    size = 1_000_000
    first = of(config_json=b"{}", model_safetensors=b"a" * size)
    assert of() == first
    assert of(tokenizer_json=b"{}") == first
    assert (
        len(
            {
                first,
                of(model_safetensors=b"a" * (size - 1) + b"b"),
                of(model_safetensors=b"a" * (size // 2) + b"b" + b"a" * (size // 2 - 1)),
                of(config_json=b"{ }"),
            }
        )
        == 4
    )


def of_episodes(*overrides):
    needed = (
        "rollout.episode={function: 'my_agent:play', options: {script: 'agent.py --fast'}}",
        "episodes.max_tokens=64",
        "data.chat_template=true",
    )
    return made_by(load_config(CONFIG, [*needed, "rollout.tools=['my_tools:add']", *overrides]).config)


def changed(one, other):
    return {kind for kind in one.keys() | other.keys() if one.get(kind) != other.get(kind)}


def test_of_an_episode_of_several_turns_its_source_options_limits_tools_and_template_count(sources, tmp_path):
    repository = Path(load_config.__code__.co_filename).parents[2]
    model = tmp_path / "model"
    model.mkdir()
    for link in ("configs", "data"):
        if (repository / link).exists():
            (tmp_path / link).symlink_to(repository / link)
    sources(my_agent="import rules\n", rules="x = 1", my_tools="def add(): ...\n")
    (tmp_path / "agent.py").write_text("print(1)")
    place = f"model.path={model}"
    base = of_episodes(place)
    assert of_episodes(place, "episodes.num_workers=7", "episodes.deadline_seconds=500") == base
    assert changed(base, of_episodes(place, "rollout.episode.options={script: 'agent.py --slow'}")) == {"episode"}
    assert changed(base, of_episodes(place, "episodes.max_turns=3")) == {"episode"}
    assert changed(base, of_episodes(place, "rollout.tools=['my_tools:add', 'my_tools:sub']")) == {"tools"}
    sources(rules="x = 2")
    assert changed(base, of_episodes(place)) == {"episode"}, "what the agent imports of its own"
    sources(rules="x = 1", my_tools="def add(): return 1\n")
    assert changed(base, of_episodes(place)) == {"tools"}
    sources(my_tools="def add(): ...\n")
    (tmp_path / "agent.py").write_text("print(2)")
    assert changed(base, of_episodes(place)) == {"episode"}, "the program that an option names"
    (tmp_path / "agent.py").write_text("print(1)")
    assert of_episodes(place) == base
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert changed(base, of_episodes(place)) == {"template"}


def test_episodes_of_one_turn_have_the_fingerprints_that_they_always_had():
    def of(*overrides):
        return made_by(load_config(CONFIG, overrides).config)

    base = of()
    assert base == of("episodes.max_turns=3") and base.keys() == {"rewards", "sampling"}
    assert changed(base, of("episodes.max_tokens=200")) == {"episode"}, "it bounds a single turn, too"


def test_sampling_ahead_changes_no_fingerprint_but_keeping_the_cache_over_a_publish_does():
    def of(*overrides):
        return made_by(load_config(CONFIG, overrides).config)

    ahead = of("rollout.max_staleness=2")
    assert ahead == of() == of("rollout.max_staleness=2", "rollout.on_publish=continue")
    assert changed(ahead, of("rollout.max_staleness=2", "rollout.on_publish=continue_with_cache")) == {"sampling"}
