"""Which releases of SGLang a server of a run can be. Standard library alone: the doctor reads it before anything else.

Owns the oldest one. Its arguments, its routes for weights (`begin_weight_update`, in-place pauses) and its streamed
reports are what `rollout/` speaks to; releases before it have others (in 0.5.17 there is no such route, and ServerArgs
is another kind of class).
"""

from __future__ import annotations

import re

TESTED = "0.5.23"


def problem(version: str | None) -> str | None:
    """Why a server of this `version` is refused, with what is valid; None for one that is not older than TESTED. A
    version that tells no release, such as that of a source tree without tags (0.0.0.dev1), is not refused.
    """
    found = _release(version)
    if found is None or found >= (_release(TESTED) or ()):
        return None
    return (
        f"SGLang {version} is older than {TESTED}, and lacks what a run asks of its servers (updates of weights as"
        f" transactions); valid: sglang=={TESTED} (launch/env/gpu-server.txt)"
    )


def _release(version: str | None) -> tuple[int, ...] | None:
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version or "")
    numbers = tuple(map(int, found.groups())) if found else ()
    return numbers if any(numbers) else None
