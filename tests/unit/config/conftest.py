import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from run_configs import smallest_yaml


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write a configuration: the smallest valid one and what is appended, or a text of its own."""

    def writer(more: str = "", *, text: str | None = None, name: str = "c.yaml") -> Path:
        path = tmp_path / name
        path.write_text(
            textwrap.dedent(text) if text is not None else smallest_yaml(more=textwrap.dedent(more)), encoding="utf-8"
        )
        return path

    return writer
