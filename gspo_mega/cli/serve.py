"""Own one SGLang server: start it, register it in the run folder, restart it with the run's current weights.

    gspo-mega serve my_run.yaml                  on another machine: one more server for the run that goes on

`gspo-mega train` starts `server.num_servers` of these. Started by hand on any machine that sees the run folder, this
command adds a server to the running attempt, under the next free index; without a running attempt, the server gets an
attempt of its own. A server over several nodes (`server.num_nodes`) needs this command on each of them. The command
ends the server and all its processes when it receives a stop signal or when the process that started it is gone.
"""

from __future__ import annotations

import argparse
import logging
import sys
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from gspo_mega.base import processes
from gspo_mega.base.errors import ConfigError, PublishError
from gspo_mega.base.network import address_problem
from gspo_mega.base.run_folder import Attempt, RunFolder, atomic_write_json
from gspo_mega.checkpoint.served_folders import CopyMaker, StartWeights, needed_copy
from gspo_mega.config import Config, load_config
from gspo_mega.config.deadlines import preflight_seconds
from gspo_mega.launcher.attempt_state import SILENCE_SECONDS, beats, read_state
from gspo_mega.launcher.lease import hold
from gspo_mega.launcher.prepare import device_here, task_of_step
from gspo_mega.rollout.server.multinode import PartSupervisor
from gspo_mega.rollout.server.next_attempt import Orders
from gspo_mega.rollout.server.reward_server import own_model, reward_config, reward_folder
from gspo_mega.rollout.server.start_weights import StartCopy
from gspo_mega.rollout.server.supervise import ServerSupervisor
from gspo_mega.sync.servers import loaded_versions_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="the run's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the configuration")
    parser.add_argument(
        "--attempt", type=Path, metavar="DIR", help="attempt folder to register in (default: the running attempt)"
    )
    parser.add_argument("--index", type=int, metavar="K", help="index of this server in the attempt (server-K)")
    parser.add_argument(
        "--next-attempts",
        action="store_true",
        help="read from the input into which attempts this server goes on (train.keep_servers)",
    )
    parser.add_argument("--reward-model", metavar="NAME", help="serve this entry of reward.model instead of the policy")
    parser.add_argument(
        "--host", metavar="ADDRESS", help="this machine's address to bind and register, instead of server.host"
    )
    parser.add_argument(
        "--hosts",
        metavar="A,B",
        help="addresses of one server's nodes, in the order of the Slurm step's tasks, one task per node",
    )
    parser.add_argument(
        "--part",
        type=int,
        metavar="N",
        help="number of this node in a server over several nodes; node 0 registers it (default: the Slurm task)",
    )


def run(args: argparse.Namespace) -> int:
    config = load_config(args.config, args.overrides).config
    num_nodes = config.server.num_nodes if args.reward_model is None else 1
    part = which_part(num_nodes, args.part, args.hosts, args.index, task_of_step())
    host = args.host if args.hosts is None else args.hosts.split(",")[part]
    if host is not None and (problem := address_problem(host)) is not None:
        raise ConfigError(f"gspo-mega serve: --host: {problem}")
    config = _at(config, host)
    folder = RunFolder(Path(config.run.dir) / config.run.name)
    attempt = running_attempt(folder, time.time(), SILENCE_SECONDS) if args.attempt is None else Attempt(args.attempt)
    index = args.index
    if index is None and args.reward_model is not None:
        index = 0
    if index is None:
        index = free_index(attempt, config.server.num_servers) if attempt is not None and args.attempt is None else 0
    if attempt is None and part > 0:
        raise ConfigError("gspo-mega serve: --part: no attempt runs; start part 0 first, or name --attempt")
    if attempt is None:
        with hold(folder):  # refused if a run is just starting
            attempt = folder.new_attempt()
    if args.reward_model is not None:
        model = own_model(config.reward, args.reward_model)
        config, attempt = reward_config(config, model), reward_folder(attempt, model.name)

    def config_of(file: str) -> Config:
        """The configuration of this server by another file, or the same file later."""
        found = _at(load_config(file, args.overrides).config, host)
        return found if args.reward_model is None else reward_config(found, own_model(found.reward, args.reward_model))

    orders = Orders(sys.stdin.fileno()) if args.next_attempts else None
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # The server's processes inherit it: each open request needs a connection.
    processes.raise_open_file_limit()
    if args.reward_model is not None:
        own = Path(config.model.path)
        return ServerSupervisor(
            config, attempt, index, start=own, classifies=True, orders=orders, config_of=config_of
        ).run()
    if part > 0:
        return PartSupervisor(config.server, attempt, index, part).run()
    if config.publish.method == "distributed" and device_here() == "gpu":
        # The server's start takes longer, so this does not delay it.
        asked = (attempt, index, preflight_seconds(config.cluster))
        threading.Thread(target=_record_own_software, args=asked, daemon=True, name="software").start()
    start = _start(StartWeights.of(config), folder, index)
    return ServerSupervisor(config, attempt, index, start=start, orders=orders, config_of=config_of).run()


def _at(config: Config, host: str | None) -> Config:
    """The configuration with the address of this machine, if one is given."""
    if host is None:
        return config
    return config.model_copy(update={"server": config.server.model_copy(update={"host": host})})


def which_part(num_nodes: int, part: int | None, hosts: str | None, index: int | None, task: int | None) -> int:
    """The number of the server's part that this command runs: `part`, or with `hosts` the `task` of the Slurm step.
    Raises ConfigError if they do not fit a server over `num_nodes` nodes.
    """
    if hosts is not None:
        if len(hosts.split(",")) != num_nodes:
            raise ConfigError(
                f"gspo-mega serve: --hosts: {len(hosts.split(','))} addresses for server.num_nodes {num_nodes};"
                " valid: one per node"
            )
        part = task if part is None else part
        if part is None:
            raise ConfigError(
                "gspo-mega serve: --hosts: SLURM_PROCID is not set, so that nothing says which of them this"
                " machine is; add --part"
            )
    if num_nodes > 1 and (part is None or index is None):
        raise ConfigError(
            f"gspo-mega serve: a server over {num_nodes} nodes (server.num_nodes) needs --part 0 to {num_nodes - 1},"
            " one per node, and the same --index for all"
        )
    if part is not None and not 0 <= part < num_nodes:
        raise ConfigError(
            f"gspo-mega serve: --part: {part} with server.num_nodes {num_nodes}; valid: 0 to {num_nodes - 1}"
        )
    return part or 0


def running_attempt(folder: RunFolder, now: float, patience_seconds: float) -> Attempt | None:
    """The newest attempt, if its supervisor shows signs of life; else None. `now`: unix seconds. A supervisor that is
    silent by this clock is watched for `patience_seconds`, because its machine's clock may differ.
    """
    latest = folder.latest_attempt()
    state = read_state(latest) if latest is not None else None
    if latest is None or state is None or state.is_over:
        return None
    return latest if not state.is_silent(now) or beats(latest, patience_seconds) else None


def free_index(attempt: Attempt, num_servers: int) -> int:
    """Reserve and return an index. Its log file is created here, so that two servers started at once get different
    indices. Indices below `num_servers` belong to the supervisor.
    """
    index = num_servers
    while True:
        try:
            attempt.server_log(index).touch(exist_ok=False)
        except FileExistsError:
            index += 1
            continue
        return index


def _start(weights: StartWeights, folder: RunFolder, index: int) -> StartCopy | None:
    """The copy of the model that the server starts from; None if it starts from `model.path`."""
    copy = needed_copy(weights, folder)
    return None if copy is None else StartCopy(copy, partial(CopyMaker, weights, copy) if index == 0 else None)


def _record_own_software(attempt: Attempt, index: int, seconds: float) -> None:
    """Record the versions of this Python's PyTorch and NCCL. The trainer compares them with its own before it
    publishes.
    """
    try:
        record_software(attempt.software_dir, f"server-{index}", loaded_versions_of(sys.executable, seconds))
    except (PublishError, OSError) as error:
        logging.warning("%s; this server's versions are not compared with the trainer's", error)


def record_software(folder: Path, server_id: str, software: Mapping[str, str | None]) -> None:
    """Write the versions of a server's software into `folder`, where the trainer reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write_json(folder / f"{server_id}.json", dict(software))
