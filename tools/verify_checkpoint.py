"""Compare two checkpoints: `python tools/verify_checkpoint.py A B`, or `gspo-mega verify-checkpoint A B`."""

from __future__ import annotations

import sys

from conversion_tool import run_command

from gspo_mega.base.untrusted import printable_output
from gspo_mega.cli import verify_checkpoint


@printable_output()
def main(arguments: list[str] | None = None) -> int:
    return run_command(
        "verify_checkpoint", "Compare two checkpoints of any two formats, bit for bit.", verify_checkpoint, arguments
    )


if __name__ == "__main__":
    sys.exit(main())
