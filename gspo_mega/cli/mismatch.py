"""Where the mismatch of trainer and servers comes from, and whether the clip range tolerates it, before a run.

    gspo-mega mismatch configs/quickstart.yaml             every cause, in both orders
    gspo-mega mismatch my_run.yaml --quick                 one order: fewer starts of servers
    gspo-mega mismatch my_run.yaml --json budget.json budget.num_prompts=64
    gspo-mega mismatch my_run.yaml budget.causes='[server KV cache, trainer precision]'

Samples a few responses with the run's own server, scores the same tokens again with one cause changed at a time
(server's batch, attention, KV cache, quantization, precision; trainer's precision, packing, layout, routing), and
splits d = trainer - rollout token by token. Says what the clip range would do if these log-probs were used directly,
what is no precision effect at all (a wrong temperature, prompt or weight, a stale cache), and which keys to set. Exit
code 0: measured; 1: something was found that is no precision effect.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gspo_mega.cli.screen import Screen
from gspo_mega.config import load_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a run's YAML file; its section `budget` says how many tokens")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the configuration")
    parser.add_argument(
        "--quick", action="store_true", help="change the causes in one order only, which starts servers less often"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers to this file")


def run(args: argparse.Namespace) -> int:
    from gspo_mega.verify.mismatch.run import budget  # needs numpy, which `--help` does not

    with Screen() as say:
        loaded = load_config(args.config, args.overrides, "budget")
        return budget(loaded, args.overrides, say, both_orders=not args.quick, json_file=args.json)
