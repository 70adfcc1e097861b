"""Own one SGLang server: start it, register it in the run folder, restart it with the run's current weights.

`gspo-mega train` starts as many as `server.num_servers` says. Run by hand, on any machine that sees the run folder,
this adds one to the attempt that runs, under the next free index; where none runs, the server has an attempt of its
own. Ends the server and all its processes when it is told to stop, and when whoever started it is gone.
"""

from __future__ import annotations

import argparse
import logging
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from gspo_mega import descriptors
from gspo_mega.config import load_config
from gspo_mega.config.addresses import address_problem
from gspo_mega.errors import ConfigError, PublishError
from gspo_mega.launcher.attempt_state import SILENCE_SECONDS, beats, read_state
from gspo_mega.launcher.gpus_and_ports import device_here
from gspo_mega.launcher.lease import hold
from gspo_mega.rollout.server.supervise_server import ServerSupervisor
from gspo_mega.run_folder import Attempt, RunFolder, atomic_write_json
from gspo_mega.weights.software import ask


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="the run's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values to change in it")
    parser.add_argument(
        "--attempt", type=Path, metavar="DIR", help="attempt folder to register in; the one that runs by default"
    )
    parser.add_argument("--index", type=int, metavar="K", help="which server of the attempt this is (server-K)")
    parser.add_argument(
        "--host", metavar="ADDRESS", help="this machine's address to bind and register, instead of server.host"
    )


def run(args: argparse.Namespace) -> int:
    config = load_config(args.config, args.overrides).config
    if args.host is not None:
        if (problem := address_problem(args.host)) is not None:
            raise ConfigError(f"gspo-mega serve: --host: {problem}")
        config = config.model_copy(update={"server": config.server.model_copy(update={"host": args.host})})
    folder = RunFolder(Path(config.run.dir) / config.run.name)
    attempt = running_attempt(folder, time.time(), SILENCE_SECONDS) if args.attempt is None else Attempt(args.attempt)
    index = args.index
    if index is None:
        index = free_index(attempt, config.server.num_servers) if attempt is not None and args.attempt is None else 0
    if attempt is None:
        with hold(folder):  # unless a run is just starting
            attempt = folder.new_attempt()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    descriptors.raise_limit()  # the server's own processes inherit it: a connection for every open request
    if config.publish.method == "distributed" and device_here() == "gpu":
        # Beside the server's start, which takes longer.
        threading.Thread(target=_say_software, args=(attempt, index), daemon=True, name="software").start()
    return ServerSupervisor(config, attempt, index).run()


def record(folder: Path, server_id: str, software: Mapping[str, str | None]) -> None:
    """A server's word of itself, for the trainer."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write_json(folder / f"{server_id}.json", dict(software))


def _say_software(attempt: Attempt, index: int) -> None:
    """This Python's PyTorch and NCCL, which the trainer compares with its own before it publishes."""
    try:
        record(attempt.software_dir, f"server-{index}", ask(sys.executable))
    except (PublishError, OSError) as error:
        logging.warning("%s; it is not compared with the trainer's", error)


def running_attempt(folder: RunFolder, now: float, patience_seconds: float) -> Attempt | None:
    """The attempt whose supervisor shows signs of life, if one does. `now`: unix seconds; where by this clock it has
    been silent, it is watched for `patience_seconds`, for its clock may be another's.
    """
    latest = folder.latest_attempt()
    state = read_state(latest) if latest is not None else None
    if latest is None or state is None or state.is_over:
        return None
    return latest if not state.is_silent(now) or beats(latest, patience_seconds) else None


def free_index(attempt: Attempt, num_servers: int) -> int:
    """Taken by making its log, so that two servers started at once have one each. Below `num_servers` are the
    supervisor's own.
    """
    index = num_servers
    while True:
        try:
            attempt.server_log(index).touch(exist_ok=False)
        except FileExistsError:
            index += 1
            continue
        return index
