import json
from pathlib import Path

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_mega.config import Config, load_config, render_config
from gspo_mega.config.validate_servers import validate_server_options

TEXT = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=20) | st.sampled_from(
    [
        "no",
        "1e-6",
        "1:30:00",
        "0o17",
        "0x1f",
        "~",
        "null",
        "true",
        "<<",
        "=",
        "2024-01-02",
        "1_000",
        "- a",
        "a: b",
        "#",
        " x ",
        "a\nb",
        "\r",
        "\t",
        "\u2028",
        "\x85",
        "'",
        '"',
        "|",
        "é",
    ]
)
FLOATS = st.floats(min_value=1e-300, max_value=1e300) | st.sampled_from([1e-6, 1e22, 3e-4, 0.1 + 0.2])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(1 - 2**64, 2**64 - 1) | FLOATS | TEXT,  # larger ones are refused
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def configs(draw):
    sources = draw(
        st.lists(st.fixed_dictionaries({"path": TEXT, "weight": FLOATS, "reward": st.none() | TEXT}), max_size=2)
    )
    raw = {
        "run": {"name": "n", "dir": draw(TEXT), "seed": draw(st.integers(0, 2**31 - 1))},
        "model": {"path": draw(TEXT)},
        "algorithm": draw(st.sampled_from(["gspo", "gspo_token", "grpo"])),
        "mismatch": {"budget": draw(FLOATS)},
        "batch": {"prompts_per_step": 4, "group_size": 4, "micro_batch_tokens": draw(st.integers(1, 10**9))},
        "optimizer": {"lr": draw(FLOATS)},
        "data": {"max_prompt_tokens": 4, "system_prompt": draw(st.none() | TEXT), "answer_key": draw(TEXT)},
        "reward": {
            "functions": [
                {
                    "function": draw(TEXT),
                    "weight": -draw(FLOATS),
                    "options": draw(st.dictionaries(TEXT, JSON, max_size=3)),
                }
            ]
        },
        "rollout": {"max_new_tokens": 4},
        "server": {
            "options": draw(
                st.dictionaries(
                    TEXT.filter(lambda name: not list(validate_server_options({name: None}))), JSON, max_size=3
                )
            )
        },
    }
    if sources:
        raw["data"]["sources"] = [{"name": f"s{i}", **source} for i, source in enumerate(sources)]
    else:
        raw["data"]["path"] = draw(TEXT)
    return Config.model_validate_json(json.dumps(raw), strict=True)


@settings(max_examples=60, deadline=None)
@given(config=configs())
def test_a_rendered_configuration_loads_back_equal(config, tmp_path_factory):
    path = Path(tmp_path_factory.getbasetemp()) / "resolved.yaml"
    path.write_bytes(render_config(config).encode())
    found = load_config(path).config
    if config.run.modules_dir is None:  # a file without it stands for its own folder
        config = config.model_copy(update={"run": config.run.model_copy(update={"modules_dir": str(path.parent)})})
    assert found == config


@settings(max_examples=60, deadline=None)
@given(config=configs())
def test_other_yaml_readers_see_the_same_values(config):
    assert yaml.safe_load(render_config(config)) == config.model_dump(mode="json")


def test_resolved_defaults_are_written_out(write, tmp_path):
    config = load_config(write(), ["algorithm=grpo"]).config
    text = render_config(config)
    assert "clip_low: 0.2\n" in text and "clip_high: 0.27\n" in text
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(text)
    again = load_config(resolved)
    assert again.config == config and again.notices == ()
    assert render_config(again.config) == text
