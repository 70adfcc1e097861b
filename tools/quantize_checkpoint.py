"""Quantise a checkpoint to FP8 blocks: `python tools/quantize_checkpoint.py CHECKPOINT OUT_DIR`.

The same as `gspo-mega quantize`.
"""

from __future__ import annotations

import sys

from conversion_tool import run_command

from gspo_mega.base.untrusted import printable_output
from gspo_mega.cli import quantize


@printable_output()
def main(arguments: list[str] | None = None) -> int:
    return run_command("quantize_checkpoint", "Quantise a checkpoint to FP8 blocks.", quantize, arguments)


if __name__ == "__main__":
    sys.exit(main())
