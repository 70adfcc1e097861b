"""Convert a Megatron checkpoint to a Hugging Face folder: `python tools/megatron_to_hf.py CHECKPOINT_DIR OUT_DIR`.

CHECKPOINT_DIR is a folder that hf_to_megatron wrote, or a run's checkpoints/step_N or bare torch_dist folder of any
layout, with `--described-by` naming the Hugging Face folder that the run started from. Optimizer state is not
converted. The tool builds no model and needs no GPU. The same command continues after an interruption. Exit code 0:
complete; 2 or 6: it cannot be read or written.
"""

from __future__ import annotations

import sys

from conversion_tool import convert

from gspo_mega.checkpoint.convert import to_huggingface


def main(arguments: list[str] | None = None) -> int:
    return convert(
        "megatron_to_hf",
        "Convert a Megatron torch_dist checkpoint to a Hugging Face folder.",
        to_huggingface,
        arguments,
    )


if __name__ == "__main__":
    sys.exit(main())
