"""Peak memory of the conversion tools on a synthetic checkpoint of 6.8 GB: `python tests/soak/convert_memory.py FOLDER
[--layers N]`.

Makes a Qwen3 checkpoint of bf16 numbers under FOLDER (21 GB free are needed), converts it to Megatron and back and
compares both with it, each in a process of its own whose peak resident memory is measured. The bound is three of the
largest tensors and 1 GB. The checkpoint's vocabulary is no multiple of the padding, so that the largest tensor is
copied once. The folder's contents are deleted at the end. Exit code 0: both comparisons equal and every peak within the
bound.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gspo_mega.checkpoint.tensor_sources import write_safetensors
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.tensors import hf_tensors

TOOLS = Path(__file__).resolve().parents[2] / "tools"
SHAPE = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    vocab_size=151_943,
    hidden_size=2560,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=9728,
    max_position_embeddings=40960,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    hidden_act="silu",
    tie_word_embeddings=False,
    attention_bias=False,
    eos_token_id=2,
    dtype="bfloat16",
)
FACTOR, BASE_BYTES = 3, 10**9


def make(folder: Path, layers: int) -> tuple[int, int]:
    """Write the checkpoint; returns its bytes and those of its largest tensor."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": layers}))
    (folder / "tokenizer.json").write_text("{}")
    entries = hf_tensors(read_model_spec(folder))
    # Every tensor is a window of its own into the same numbers, so that no two are alike.
    numbers = torch.randn(
        max(e.num_elements for e in entries) + len(entries), generator=torch.Generator().manual_seed(0)
    ).bfloat16()
    groups: list[list[int]] = [[]]
    for index, _entry in enumerate(entries):
        if sum(entries[i].num_elements for i in groups[-1]) * 2 > 4 * 10**9:
            groups.append([])
        groups[-1].append(index)
    weight_map = {}
    for number, group in enumerate(groups):
        file = f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors"
        described = {entries[i].name: (torch.bfloat16, entries[i].shape) for i in group}
        write_safetensors(
            folder / file, described, (numbers[i : i + entries[i].num_elements].view(entries[i].shape) for i in group)
        )
        weight_map |= dict.fromkeys(described, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return 2 * sum(e.num_elements for e in entries), 2 * max(e.num_elements for e in entries)


def measured(tool: str, *arguments: Path) -> tuple[int, float, int]:
    """Exit code, seconds and peak resident bytes of one tool."""
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, str(TOOLS / f"{tool}.py"), *map(str, arguments)], stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    return os.waitstatus_to_exitcode(status), time.monotonic() - began, usage.ru_maxrss * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description="Peak memory of the conversion tools.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="an empty or new folder with 21 GB free")
    parser.add_argument("--layers", type=int, default=26)
    options = parser.parse_args()
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        parser.error(f"{folder} is not empty")
    try:
        # In a process of its own: what this one ever held would count as the peak of those that it starts.
        with multiprocessing.get_context("spawn").Pool(1) as maker:
            size, largest = maker.apply(make, (folder / "hf", options.layers))
        bound = FACTOR * largest + BASE_BYTES
        print(f"checkpoint {size / 1e9:.2f} GB, largest tensor {largest / 1e6:.0f} MB, bound {bound / 1e6:.0f} MB")
        good = True
        for tool, arguments in (
            ("hf_to_megatron", ("hf", "megatron")),
            ("megatron_to_hf", ("megatron", "back")),
            ("verify_checkpoint", ("hf", "megatron")),
            ("verify_checkpoint", ("hf", "back")),
        ):
            code, seconds, peak = measured(tool, *(folder / a for a in arguments))
            good = good and code == 0 and peak <= bound
            print(
                f"{tool:18s} {' '.join(arguments):12s} exit {code}  {seconds:6.1f} s  peak {peak / 1e6:6.0f} MB "
                f" {size / seconds / 1e6:5.0f} MB/s",
                flush=True,
            )
        print("within the bound" if good else "NOT within the bound, or not equal")
        return 0 if good else 1
    finally:
        for child in folder.iterdir():
            shutil.rmtree(child)


if __name__ == "__main__":
    sys.exit(main())
