"""The configuration of a command has the sections that the command needs, unchanged."""

from __future__ import annotations

import pytest

from gspo_mega.base.errors import ConfigError
from gspo_mega.config import load_config
from gspo_mega.config.derived import sft_config, train_config


def test_every_section_is_the_same_object(write):
    config = load_config(write(), ["train.num_steps=3", "algorithm=grpo"]).config
    narrowed = train_config(config)
    assert narrowed.train.num_steps == 3
    assert dict(narrowed) == dict(config)
    assert all(getattr(narrowed, key) is getattr(config, key) for key in type(config).model_fields)
    assert narrowed.model_fields_set == config.model_fields_set


@pytest.mark.parametrize(("narrow", "key"), [(train_config, "train"), (sft_config, "eval")])
def test_an_absent_section_is_an_error(write, narrow, key):
    with pytest.raises(ConfigError, match=f"^{key}: missing"):
        narrow(load_config(write()).config)
