"""Own one SGLang server: start it, register it in the run folder, restart it with the run's current weights.

`gspo-mega train` starts as many as `server.num_servers` says; run it by hand (or under srun) to add a server from
another machine that sees the run folder. Ends the server and all its processes when it is told to stop, and when
whoever started it is gone.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from gspo_mega.config import load_config
from gspo_mega.rollout.supervise_server import ServerSupervisor
from gspo_mega.run_folder import Attempt, RunFolder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="the run's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values to change in it")
    parser.add_argument("--attempt", type=Path, metavar="DIR", help="attempt folder to register in; a new one by default")
    parser.add_argument("--index", type=int, default=0, metavar="K", help="which server of the attempt this is (server-K)")
    parser.add_argument("--host", metavar="ADDRESS", help="this machine's address to bind and register, instead of server.host")


def run(args: argparse.Namespace) -> int:
    config = load_config(args.config, args.overrides).config
    if args.host is not None:
        config = config.model_copy(update={"server": config.server.model_copy(update={"host": args.host})})
    if args.attempt is not None:
        attempt = Attempt(args.attempt)
    else:
        attempt = RunFolder(Path(config.run.dir) / config.run.name).new_attempt()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    return ServerSupervisor(config, attempt, args.index).run()
