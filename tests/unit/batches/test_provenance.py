"""What makes a trajectory is told apart by what it is made of: the source of rewards, their options, weights,
settings.
"""

from __future__ import annotations

import sys
import textwrap

import pytest

from gspo_mega.batches.provenance import first_weights, made_by, source_digest
from gspo_mega.config import load_config

CONFIG = "configs/quickstart.yaml"


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """Writes source files below the working directory, as a user's rewards are."""
    monkeypatch.chdir(tmp_path)

    def write(files=(), **more):
        for name, text in {**dict(files), **more}.items():
            path = tmp_path / f"{name}.py"
            path.parent.mkdir(exist_ok=True)
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


def test_installed_packages_and_broken_sources_are_no_obstacle(sources):
    sources(my_reward="import numpy, json, not_there\nfrom gspo_mega.errors import DataError\n", broken="def (\n")
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
        return first_weights(load_config(CONFIG, [f"model.path={tmp_path}"]).config)

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
