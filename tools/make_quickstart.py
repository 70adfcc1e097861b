"""Make the quickstart's model and data: `python tools/make_quickstart.py OUT_DIR`.

    OUT_DIR/model/               a tiny Qwen3-MoE of random weights, with its tokenizer, as a Hugging Face folder; its
                                 shape is configs/models/quickstart_moe.json. --dense: a Qwen3 without experts;
                                 --wide: one whose matrices consist of whole 128 x 128 blocks, for FP8
    OUT_DIR/data/train.jsonl     additions with worked solutions
    OUT_DIR/data/heldout.jsonl   other additions; no problem is in both files

`--task mixed` makes additions of 3 to 6 digits. `--task calculator` makes a model without experts whose chat template
names tools, and sums that are worked out with a calculator, in two or three turns.

The same arguments make the same bytes. Existing files with other content are an error and never overwritten. Exit
code 0: all files exist; 2: they cannot be made.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

if __package__ is None or __package__ == "":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from safetensors.torch import save_file

from gspo_mega.base import atomic_io
from gspo_mega.base.errors import DataError, GspoMegaError
from gspo_mega.base.untrusted import printable_output, read_json_file
from gspo_mega.data import calculator, quickstart
from gspo_mega.data.quickstart import CHAT_TEMPLATE, END_OF_TEXT, TURN_END, Split, write_tokenizer
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.tensors import hf_tensors

SHAPES = Path(__file__).resolve().parents[1] / "configs" / "models"


class Task(NamedTuple):
    """What is learned. `rows`: (split, number, seed) to the rows of a file; `shape`: of the model, if none is named."""

    rows: Callable[[Split, int, int], Iterator[dict[str, Any]]]
    num_train: int
    shape: str
    chat_template: str


TASKS = {
    "arithmetic": Task(
        lambda split, number, seed: (quickstart.row_of(*pair) for pair in quickstart.problems(split, number, seed)),
        40_000,
        "moe",
        CHAT_TEMPLATE,
    ),
    "mixed": Task(
        lambda split, number, seed: (
            quickstart.row_of(*pair) for pair in quickstart.mixed_problems(split, number, seed)
        ),
        40_000,
        "moe",
        CHAT_TEMPLATE,
    ),
    "calculator": Task(
        lambda split, number, seed: map(calculator.row_of, calculator.problems(split, number, seed)),
        10_000,
        "dense",
        calculator.CHAT_TEMPLATE,
    ),
}


@printable_output()
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="make_quickstart", description="Make the quickstart's model, tokenizer and data."
    )
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR", help="folder for the files; created if missing")
    parser.add_argument("--seed", type=int, default=1, help="seed of the weights and the problems (default: 1)")
    parser.add_argument("--num-train", type=int, help="train problems (default: 40000; calculator: 10000)")
    parser.add_argument("--num-heldout", type=int, default=512, help="held-out problems (default: 512)")
    parser.add_argument(
        "--task", choices=TASKS, default="arithmetic", help="what is learned (default: arithmetic, in one turn)"
    )
    shapes = parser.add_mutually_exclusive_group()
    for shape, what in (("dense", "a model without experts"), ("wide", "a wider one, of whole FP8 blocks")):
        shapes.add_argument(f"--{shape}", dest="shape", action="store_const", const=shape, help=what)
    shapes.add_argument("--shape", dest="file", type=Path, metavar="JSON", help="a model of this config.json's shape")
    options = parser.parse_args(arguments)
    out_dir: Path = options.out_dir
    task = TASKS[options.task]
    num_train = task.num_train if options.num_train is None else options.num_train
    num_problems: dict[Split, int] = {"train": num_train, "heldout": options.num_heldout}
    shape = options.file or SHAPES / f"quickstart_{options.shape or task.shape}.json"
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=out_dir) as making:
            write_model(Path(making) / "model", shape, options.seed, task.chat_template)
            write_data(Path(making) / "data", task, num_problems, options.seed)
            install(Path(making), out_dir)
    except (GspoMegaError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{out_dir / 'model'}: {sum(p.stat().st_size for p in (out_dir / 'model').iterdir())} bytes")
    print(f"{out_dir / 'data'}: {num_train} train problems, {options.num_heldout} held-out problems")
    return 0


def write_model(folder: Path, shape: Path, seed: int, chat_template: str) -> None:
    """A Hugging Face folder: config, random float32 weights under their on-disk names, tokenizer."""
    folder.mkdir()
    tokenizer = write_tokenizer(folder, chat_template)
    ends = {"eos_token_id": tokenizer.token_to_id(TURN_END), "pad_token_id": tokenizer.token_to_id(END_OF_TEXT)}
    config = read_json_file(shape) | ends
    if config["vocab_size"] != tokenizer.get_vocab_size():
        raise DataError(
            f"{shape}: vocab_size is {config['vocab_size']}; the tokenizer has {tokenizer.get_vocab_size()} tokens"
        )
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", ends)
    generator = torch.Generator().manual_seed(seed)
    weights = {
        # Norms start as ones, every matrix from a normal distribution, as in Hugging Face's own initialisation.
        entry.name: torch.ones(entry.shape)
        if len(entry.shape) == 1
        else torch.randn(entry.shape, generator=generator) * config["initializer_range"]
        for entry in hf_tensors(read_model_spec(folder))
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    atomic_io.follow_umask(folder / "model.safetensors")


def write_data(folder: Path, task: Task, num_problems: dict[Split, int], seed: int) -> None:
    """`train.jsonl` and `heldout.jsonl`."""
    folder.mkdir()
    for split in get_args(Split):
        try:
            rows = list(task.rows(split, num_problems[split], seed))
        except ValueError as error:
            raise DataError(str(error)) from error
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")


def install(made: Path, out_dir: Path) -> None:
    """Move files into place. Raises DataError, and moves nothing, if one exists with other content."""
    names = [path.relative_to(made) for path in sorted(made.rglob("*")) if path.is_file()]
    different = [
        str(out_dir / name) for name in names if (out_dir / name).exists() and not same(made / name, out_dir / name)
    ]
    if different:
        raise DataError(
            f"these exist with other content: {', '.join(different)}\n"
            "They are not overwritten. Name another folder, remove this one, or use the arguments that made it."
        )
    for name in names:
        (out_dir / name).parent.mkdir(exist_ok=True)
        os.replace(made / name, out_dir / name)


def same(one: Path, other: Path) -> bool:
    return other.is_file() and filecmp.cmp(one, other, shallow=False)


def write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
