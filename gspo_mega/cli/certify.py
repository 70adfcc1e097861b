"""Show that layouts compute the same numbers: every case against a reference, on one batch and one checkpoint.

    gspo-mega certify configs/certify_dense.yaml     many layouts of a small model, on this machine
    gspo-mega certify my_run.yaml                    the layout of that file, against one rank
    gspo-mega certify configs/certify_continue.yaml  runs that stop in one layout and go on in another
    gspo-mega certify my_run.yaml certify.reference.ranks=8 certify.reference.set='{parallel.tensor: 8}'

Compares log-probs per token, the loss, every tensor of the gradient, and the weights after three optimizer steps. A
`model.path` that names a shape (a .json file) gets random weights. Exit code 0: every case agrees with its reference;
1: at least one does not.
"""

from __future__ import annotations

import argparse

from gspo_mega.cli.screen import Screen
from gspo_mega.config import load_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a run's YAML file; its section `certify` lists the cases")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the configuration")


def run(args: argparse.Namespace) -> int:
    from gspo_mega.verify.certify.program import certify  # needs the trainer's packages, which `--help` does not

    with Screen() as say:
        return certify(load_config(args.config, args.overrides, "certify"), args.overrides, say)
