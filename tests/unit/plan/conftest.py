import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gspo_mega.config import LoadedConfig, load_config

SHAPES = Path(__file__).parents[3] / "configs" / "models"
SMALLEST = """\
run: {name: test}
model: {path: m}
batch: {prompts_per_step: 8, group_size: 4, micro_batch_tokens: 256}
optimizer: {lr: 1e-6}
data: {path: train.jsonl, max_prompt_tokens: 16}
reward: gsm8k
rollout: {max_new_tokens: 32}
"""


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., LoadedConfig]:
    """The smallest configuration with overrides."""
    path = tmp_path / "c.yaml"
    path.write_text(SMALLEST)
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
