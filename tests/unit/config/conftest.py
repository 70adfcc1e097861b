import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

SMALLEST = """\
run: {name: test}
model: {path: m}
batch: {prompts_per_step: 4, group_size: 4, micro_batch_tokens: 256}
optimizer: {lr: 1e-6}
data: {path: train.jsonl, max_prompt_tokens: 16}
reward: gsm8k
rollout: {max_new_tokens: 32}
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write a configuration: the smallest valid one and what is appended, or a text of its own."""

    def writer(more: str = "", *, text: str | None = None, name: str = "c.yaml") -> Path:
        path = tmp_path / name
        path.write_text(
            textwrap.dedent(text) if text is not None else SMALLEST + textwrap.dedent(more), encoding="utf-8"
        )
        return path

    return writer
