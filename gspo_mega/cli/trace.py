"""Trace a step of a configuration's ranks on a machine without a GPU: memory, exchange, FLOPs and waits.

    gspo-mega trace configs/qwen3_4b_1node.yaml                       one rank of each kind, beside the plan
    gspo-mega trace my_run.yaml --layers 2                            with two layers, in seconds
    gspo-mega trace my_run.yaml --rank 12 --svg held.svg              one rank, and a picture of what it holds

Runs the GPU's own code, with the Megatron-Core that launch/env/gpu.txt pins, on CUDA tensors that have shapes and no
memory. It needs launch/setup.sh --trace and a C++ compiler; about a minute and 2 GB per rank. Exit code 0: traced; 2:
the configuration cannot be used; another one: an operation that cannot be traced, by name.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gspo_mega.base.errors import ConfigError
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.metrics.writer import read_metrics
from gspo_mega.plan.memory import EXPERT_IMBALANCE
from gspo_mega.verify.trace.job import trace_run
from gspo_mega.verify.trace.report import draw, render, trace_json

_MEASURED = "routing/rank_load_max"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="the run's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the configuration")
    parser.add_argument("--model", metavar="PATH", help="trace this Hugging Face folder or config.json instead")
    parser.add_argument("--rank", type=int, metavar="R", help="trace this rank only (default: one of each kind)")
    parser.add_argument("--layers", type=int, metavar="N", help="trace a model of N layers, otherwise the same")
    parser.add_argument(
        "--packs", type=int, metavar="N", help="packs of the mini-batch (default: what the pipeline holds, at least 2)"
    )
    parser.add_argument(
        "--imbalance",
        default=str(EXPERT_IMBALANCE),
        metavar="X",
        help="tokens that a rank's experts receive, in means, or the folder of a run, which measured the largest"
        f" (default: the plan's {EXPERT_IMBALANCE})",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, with the stacks of large tensors")
    parser.add_argument("--svg", metavar="FILE", help="also draw what each phase holds at its peak into this file")


def run(args: argparse.Namespace) -> int:
    for name, least in (("layers", 1), ("packs", 1), ("rank", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name} {value}: give a whole number from {least} on")
    imbalance = _imbalance(args.imbalance)
    traced = trace_run(
        args.config,
        args.overrides,
        model=args.model,
        rank=args.rank,
        layers=args.layers,
        packs=args.packs,
        imbalance=imbalance,
    )
    if args.svg is not None:
        try:
            title = f"{traced.plan.config.run.name}: {traced.plan.model}"
            Path(args.svg).write_text(draw(traced.ranks, title), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--svg {args.svg}: cannot be written: {error.strerror}") from None
    show = trace_json(traced.ranks, traced.differences) if args.json else None
    print(show or render(traced.plan, traced.ranks, traced.differences))
    return 0


def _imbalance(text: str) -> float:
    """The number, or the largest that the run of a folder measured."""
    try:
        number = float(text)
    except ValueError:
        if not Path(text).is_dir():
            raise ConfigError(
                f"--imbalance {text}: give a number above 0, 1 for even experts, or a run's folder"
            ) from None
        loads = [line[_MEASURED] for line in read_metrics(RunFolder(text).metrics_file) if _MEASURED in line]
        if not loads:
            raise ConfigError(
                f"--imbalance {text}: that run has not measured {_MEASURED}; it needs parallel.expert above 1"
            ) from None
        return max(loads)
    if not 0 < number < 100:
        raise ConfigError(f"--imbalance {number:g}: give a number above 0, 1 for even experts, or a run's folder")
    return number
