"""Describe a checkpoint: `python tools/inspect_checkpoint.py DIR`, or `gspo-mega inspect-checkpoint DIR`."""

from __future__ import annotations

import sys

from conversion_tool import run_command

from gspo_mega.base.untrusted import printable_output
from gspo_mega.cli import inspect_checkpoint


@printable_output()
def main(arguments: list[str] | None = None) -> int:
    return run_command("inspect_checkpoint", "Describe a checkpoint.", inspect_checkpoint, arguments)


if __name__ == "__main__":
    sys.exit(main())
