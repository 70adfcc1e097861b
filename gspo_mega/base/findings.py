"""A finding of the doctor, and the text of a list of them. Standard library alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "wrong"]


@dataclass(frozen=True)
class Finding:
    """`level`: ok; note: works, but worth knowing; wrong: a run would not start or would not work as configured."""

    level: Level
    what: str
    text: str


def render(findings: Iterable[Finding], machine: str = "") -> str:
    """One line per finding, those of level `wrong` first."""
    order = {"wrong": 0, "note": 1, "ok": 2}
    prefix = f"{machine}: " if machine else ""
    return "\n".join(
        f"{prefix}{f.level:<5} {f.what:<9} {f.text}" for f in sorted(findings, key=lambda f: order[f.level])
    )
