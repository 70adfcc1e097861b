"""The commands by which docs/objectives.md says that each algorithm runs."""

from __future__ import annotations

import shlex
from pathlib import Path


def documented_runs(root: Path) -> list[tuple[str, str, list[str]]]:
    """(algorithm, configuration, overrides) of each line of its section "Running each"."""
    text = (root / "docs/objectives.md").read_text(encoding="utf-8")
    section = text.partition("## Running each")[2].partition("\n## ")[0]
    found = []
    for line in section.splitlines():
        if line.startswith("gspo-mega train "):
            _, _, file, *overrides = shlex.split(line, comments=True)
            named = [word.removeprefix("algorithm=") for word in overrides if word.startswith("algorithm=")]
            found.append((named[0] if named else "ppo" if file.endswith("_ppo.yaml") else "gspo", file, overrides))
    return found
