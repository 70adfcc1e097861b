"""The commands by which docs/objectives.md says that each algorithm runs."""

from __future__ import annotations

import shlex
from pathlib import Path

NAMELESS = {
    "configs/quickstart.yaml": "gspo",
    "configs/objectives.yaml": "grpo",
    "configs/quickstart_ppo.yaml": "ppo",
}


def documented_runs(root: Path) -> list[tuple[str, str, list[str]]]:
    """(name, configuration, overrides) of each line of its section "Running each".

    The name is the algorithm, and with advantages that are not the algorithm's own `algorithm-advantage-...`.
    """
    text = (root / "docs/objectives.md").read_text(encoding="utf-8")
    section = text.partition("## Running each")[2].partition("\n## ")[0]
    found = []
    for line in section.splitlines():
        if line.startswith("gspo-mega train "):
            _, _, file, *overrides = shlex.split(line, comments=True)
            given = dict(word.split("=", 1) for word in overrides)
            name = given.get("algorithm") or NAMELESS[file]
            own = [value for key, value in given.items() if key in ("advantage.baseline", "advantage.std_over")]
            found.append(("-".join([name, *own]), file, overrides))
    return found
