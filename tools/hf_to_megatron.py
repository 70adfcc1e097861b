"""Convert a Hugging Face folder to Megatron: `python tools/hf_to_megatron.py HF_DIR OUT_DIR`.

OUT_DIR/megatron is a `torch_dist` checkpoint that any tensor, pipeline and expert layout can load; config, tokenizer
and a manifest are beside it. The tool builds no model and needs no GPU; it needs memory for a few of the largest
tensors. The same command continues after an interruption. Exit code 0: complete; 2: the source cannot be used; 6:
OUT_DIR cannot be written.
"""

from __future__ import annotations

import sys

from conversion_tool import convert

from gspo_mega.checkpoint.convert import to_megatron


def main(arguments: list[str] | None = None) -> int:
    return convert(
        "hf_to_megatron", "Convert a Hugging Face folder to Megatron's torch_dist format.", to_megatron, arguments
    )


if __name__ == "__main__":
    sys.exit(main())
