import json
from collections.abc import Callable
from pathlib import Path

import pytest
from run_configs import smallest_yaml

from gspo_mega.config import LoadedConfig, load_config

SHAPES = Path(__file__).parents[3] / "configs" / "models"


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., LoadedConfig]:
    """The smallest configuration with overrides."""
    path = tmp_path / "c.yaml"
    path.write_text(smallest_yaml(prompts_per_step=8))
    return lambda *overrides: load_config(path, overrides)


@pytest.fixture
def shape(tmp_path: Path) -> Callable[..., Path]:
    """A config.json of the quickstart's `moe` or `dense` shape, with changes."""

    def writer(kind: str, **changes: object) -> Path:
        raw = json.loads((SHAPES / f"quickstart_{kind}.json").read_text()) | changes
        path = tmp_path / f"{kind}.json"
        path.write_text(json.dumps(raw))
        return path

    return writer
