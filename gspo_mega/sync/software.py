"""Do the servers have the trainer's PyTorch and NCCL? Weights sent through NCCL's groups require it.

Owns a Python's report of its versions, and its comparison with those that servers recorded in the attempt's folder. The
check runs before the first publish; NCCL's own refusal ("Mismatched NCCL version") would come only after a whole step.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

from gspo_mega.base.errors import PublishError
from gspo_mega.base.run_folder import read_json

_ASK = "import json; from gspo_mega.sync.software import here; print(json.dumps(here()))"


def ask(python: str, seconds: float) -> dict[str, str | None]:
    """The versions `torch` and `NCCL` of another Python. Raises PublishError if it does not report them within
    `seconds`.
    """
    try:
        answer = subprocess.run(
            [python, "-c", _ASK], capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL
        )
        return dict(json.loads(answer.stdout.splitlines()[-1]))
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise PublishError(f"{python} does not report its PyTorch and NCCL versions: {error!r}") from error


def here() -> dict[str, str | None]:
    """The versions `torch` and `NCCL` of this process."""
    import torch
    from torch.cuda import nccl

    known = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return {"torch": torch.__version__, "NCCL": ".".join(map(str, nccl.version())) if known else None}


def check_same(folder: Path, trainer: Mapping[str, str | None]) -> None:
    """Compare the trainer with every server that recorded its versions. Builds of one release (`+cu130`) are equal.

    Raises PublishError naming each server that has another PyTorch or NCCL.
    """
    wrong = []
    for path in sorted(folder.glob("server-*.json")):
        server = read_json(path) or {}
        differing = [name for name in ("torch", "NCCL") if _release(server.get(name)) != _release(trainer.get(name))]
        if differing:
            wrong.append(
                f"{path.stem}: "
                + ", ".join(
                    f"{name} {server.get(name) or '(none)'} where the trainer has {trainer.get(name) or '(none)'}"
                    for name in differing
                )
            )
    if wrong:
        raise PublishError(
            "weights cannot be published by `publish.method: distributed` between different versions of PyTorch or"
            " NCCL:\n  "
            + "\n  ".join(wrong)
            + "\ninstall the same in both Pythons (launch/env/gpu.txt, launch/env/gpu-server.txt), or use"
            " `publish.method: disk`"
        )


def _release(version: str | None) -> str | None:
    return version.partition("+")[0] if version else None
