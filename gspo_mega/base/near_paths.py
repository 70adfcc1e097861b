"""What a user probably meant by a path at which nothing is: the nearest name in the same folder.

This file needs only the standard library, because the workers of episodes import it.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

# The least likeness of two names, as difflib counts it.
_LEAST_LIKE = 0.6


def near_path(path: str | Path) -> str | None:
    """Return the path that exists and differs from `path`, which does not, in one similar name; None if there is none.

    It is written as `path` is, relative or absolute. Names that begin with a dot are not offered.
    """
    whole = Path(path)
    wrong = next((part for part in (whole, *whole.parents) if part.name and os.path.isdir(part.parent)), None)
    if wrong is None or os.path.lexists(wrong):
        return None
    rest = whole.relative_to(wrong)
    try:
        names = [name for name in os.listdir(wrong.parent) if not name.startswith(".")]
    except OSError:
        return None
    for name in sorted(names, key=lambda name: (-_likeness(name, wrong.name), name)):
        if _likeness(name, wrong.name) < _LEAST_LIKE:
            return None
        if os.path.exists(wrong.parent / name / rest):
            return str(wrong.parent / name / rest)
    return None


def did_you_mean(path: str | Path) -> str:
    """Return `; did you mean PATH?`, for the end of a message about a path that is not there, or an empty text."""
    near = near_path(path)
    return f"; did you mean {near}?" if near is not None else ""


def missing_run_hint(path: str | Path) -> str:
    """Return the end of a message about a run that is not at `path`: the nearest path, and how to list runs."""
    return f"{did_you_mean(path) or ';'} `gspo-mega ls` lists the runs"


def _likeness(name: str, wanted: str) -> float:
    """Return how alike two names are, from 0 to 1. An ending that they share, as `.jsonl`, does not make them alike."""
    (stem, suffix), (wanted_stem, wanted_suffix) = os.path.splitext(name), os.path.splitext(wanted)
    if suffix == wanted_suffix:
        name, wanted = stem, wanted_stem
    return difflib.SequenceMatcher(None, name.lower(), wanted.lower()).ratio()
