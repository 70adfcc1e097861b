"""The configuration of one command: a `Config` that has the sections the command needs.

The loader checks that they are given (`rules.py`); these types tell it to the code that reads them.
Sections are frozen, so narrowing a key is sound; the type checker does not see that, so its rule is ignored below.
"""

from __future__ import annotations

from typing import TypeVar

from pydantic import Field

from gspo_mega.base.errors import ConfigError
from gspo_mega.config.schema import Config, Eval, Sft, Train


class TrainConfig(Config):
    """What `gspo-mega train` runs with."""

    train: Train = Field(default=...)  # pyright: ignore[reportIncompatibleVariableOverride]


class SftConfig(Config):
    """What `gspo-mega sft` runs with."""

    sft: Sft = Field(default=...)  # pyright: ignore[reportIncompatibleVariableOverride]
    eval: Eval = Field(default=...)  # pyright: ignore[reportIncompatibleVariableOverride]


CommandConfig = TypeVar("CommandConfig", TrainConfig, SftConfig)


def train_config(config: Config) -> TrainConfig:
    """`config` as that of `gspo-mega train`, the sections shared. Raises ConfigError where `train` is absent."""
    return _narrowed(config, TrainConfig)


def sft_config(config: Config) -> SftConfig:
    """`config` as that of `gspo-mega sft`, the sections shared. Raises ConfigError where `sft` or `eval` is absent."""
    return _narrowed(config, SftConfig)


def _narrowed(config: Config, kind: type[CommandConfig]) -> CommandConfig:
    for key, field in kind.model_fields.items():
        if field.is_required() and getattr(config, key) is None:
            raise ConfigError(f"{key}: missing; this command needs the section")
    return kind.model_construct(config.model_fields_set, **dict(config))
