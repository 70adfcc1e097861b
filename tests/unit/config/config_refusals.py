"""What the loader says of a configuration that it refuses."""

from __future__ import annotations

import pytest

from gspo_mega.base.errors import ConfigError
from gspo_mega.config import load_config


def refused(path, *overrides, command=None) -> str:
    """The whole message; fails where the configuration is taken."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, command)
    return str(caught.value)
