"""Entry of one rank: `python -m gspo_mega.train.worker --config FILE --attempt DIR --command train`.

Owns what surrounds the work of a rank: log, signals, torch.distributed, the error record, the exit code. Reads RANK,
WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, which the supervisor or torchrun sets. In a step of a Slurm job
only the last two are set; the others are srun's SLURM_PROCID, SLURM_NTASKS and SLURM_LOCALID. The work itself is
`loop.py`, `sft_loop.py`, `evaluate.py`, or a rank of `certify`, `budget` or
`compare`.

Exit code: 0 done; 75 stopped on request, to be continued by the same command; otherwise the error's.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from gspo_mega.base import descriptors, kill_points, process_death, proxies
from gspo_mega.base.addresses import is_loopback
from gspo_mega.base.errors import ConfigError, RankError
from gspo_mega.base.importing import uncollected
from gspo_mega.base.run_folder import EXIT_STOPPED, Attempt, atomic_write_json
from gspo_mega.config import Config, LoadedConfig, load_config
from gspo_mega.config.deadlines import COLLECTIVE_SECONDS, preflight_seconds
from gspo_mega.config.layer_library import TRANSFORMER_ENGINE_VARIABLE, has_transformer_engine_layers
from gspo_mega.plan.watchdog_bounds import patience
from gspo_mega.train.beat_writer import BeatWriter
from gspo_mega.train.gpu_variables import set_variables
from gspo_mega.train.rank_log import console, redirect_output
from gspo_mega.train.shutdown import fail, leave
from gspo_mega.train.stack_dump import StackDumps
from gspo_mega.train.worker_context import KeyValueStore, WorkerContext

# A collective that has not ended after this time never will: with all ranks alive, the longest wait in one is for a
# publish or a checkpoint. (Waiting for rollouts is not a collective.)
COLLECTIVE_TIMEOUT = timedelta(seconds=COLLECTIVE_SECONDS)

ENTRY_POINTS = {
    "train": ("gspo_mega.train.loop", "run_train"),
    "sft": ("gspo_mega.train.sft_loop", "run_sft"),
    "eval": ("gspo_mega.train.evaluate", "run_eval"),
    "budget": ("gspo_mega.verify.mismatch.budget_ranks", "run_budget"),
    "certify": ("gspo_mega.verify.certify.ranks", "run_certify"),
    "compare": ("gspo_mega.verify.compare.compare_ranks", "run_compare"),
    "reward_model": ("gspo_mega.train.fit_scores", "run_fit"),
}


@dataclass(frozen=True)
class RankEnvironment:
    """The rank, the number of ranks and the rank on this machine, as the launcher set them."""

    rank: int
    world_size: int
    local_rank: int

    @property
    def is_lead(self) -> bool:
        """Whether this is rank 0, which alone samples, writes metrics and speaks to the user."""
        return self.rank == 0

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> RankEnvironment:
        """Raises ConfigError naming every variable that is missing or not a number."""
        names = {"RANK": "rank", "WORLD_SIZE": "world_size", "LOCAL_RANK": "local_rank"}
        # All three from one source: torchrun inside a Slurm job sets the first three names, srun the others.
        if not any(environment.get(name) for name in names) and environment.get("SLURM_PROCID"):
            names = {"SLURM_PROCID": "rank", "SLURM_NTASKS": "world_size", "SLURM_LOCALID": "local_rank"}
        wrong = [name for name in names if not environment.get(name, "").isdecimal()]
        wrong += [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
        if wrong:
            raise ConfigError(
                f"a rank needs {', '.join(wrong)} in its environment; `gspo-mega train` sets them, and so does torchrun"
            )
        place = cls(**{field: int(environment[name]) for name, field in names.items()})
        if place.rank >= place.world_size:
            raise ConfigError(f"RANK={place.rank} is not below WORLD_SIZE={place.world_size}")
        return place


def main(arguments: list[str] | None = None) -> None:
    """Does not return: the process ends with the rank's exit code."""
    parser = argparse.ArgumentParser(prog="gspo_mega.train.worker")
    parser.add_argument("--config", required=True, help="config.resolved.yaml of the run")
    parser.add_argument("--attempt", required=True, type=Path, help="attempt folder")
    parser.add_argument("--command", required=True, choices=sorted(ENTRY_POINTS))
    args = parser.parse_args(arguments)
    attempt = Attempt(args.attempt)
    place = RankEnvironment.read(os.environ)
    kill_points.arm(os.environ.get(kill_points.VARIABLE), place.rank)
    # Megatron forks writers for a save: they must end with a killed rank.
    process_death.forks_die_with_us()
    redirect_output(attempt.rank_log(place.rank))
    _default_signals()
    descriptors.raise_limit()  # rank 0 has a connection for every open request of every server
    try:
        loaded = load_config(args.config, command=args.command)
        proxies.keep_direct([os.environ["MASTER_ADDR"], loaded.config.server.host])
        bounds = patience(loaded.config)
        StackDumps(attempt, place.rank, place.world_size)
        writer = None if bounds is None else BeatWriter(attempt, place.rank, place.world_size, bounds)
        result = _work(args.command, loaded, attempt, place)
        if result is not None and place.is_lead:
            atomic_write_json(attempt.result_file, result)
        code = EXIT_STOPPED if result and result.get("stopped") else 0
        leave(code, [] if writer is None else [writer.close])
    except BaseException as error:
        # Including SystemExit and KeyboardInterrupt: whatever ends this rank early must end the other ranks.
        fail(error, place.rank, attempt)


def _work(command: str, loaded: LoadedConfig, attempt: Attempt, place: RankEnvironment) -> dict[str, Any] | None:
    _keep_to_this_machine(loaded.config)
    module, function = ENTRY_POINTS[command]
    with uncollected():
        on_cpu = _prepare_torch(place, loaded.config)
        work = getattr(importlib.import_module(module), function)
    _init_distributed(place, on_cpu, timedelta(seconds=preflight_seconds(loaded.config)))
    context = WorkerContext(
        config=loaded.config,
        attempt_dir=attempt.path,
        run_dir=attempt.run_folder.path,
        is_lead=place.is_lead,
        notices=loaded.notices,
        console=console(attempt) if place.is_lead else lambda line: None,
        open_store=_open_store,
    )
    return work(context)


def _default_signals() -> None:
    """End at once on SIGTERM, also inside a collective, where no Python handler would run. SIGUSR2 writes the main
    thread's stack to the log; the stacks of other threads, which keep running, could change while they are read. (To
    the supervisor it asks for all stacks of all ranks: `stack_dump.py`.)
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=False)


def _keep_to_this_machine(config: Config) -> None:
    """Make gloo and NCCL listen on the loopback interface alone if all ranks and servers are on this machine, whatever
    the machine's name resolves to.
    """
    here_alone = config.cluster.num_nodes == 1 and config.cluster.num_rollout_nodes == 0
    if here_alone and is_loopback(os.environ["MASTER_ADDR"]) and is_loopback(config.server.host):
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, "lo")


def _prepare_torch(place: RankEnvironment, config: Config) -> bool:
    """Import torch, with the variables that it reads then, and choose this rank's device. Returns: is it a CPU?"""
    set_variables(os.environ, place.local_rank, config)  # before any import of torch
    # Read when the engine is imported on a machine without a GPU.
    on_cpu_too = has_transformer_engine_layers(config, has_gpu=False)
    os.environ[TRANSFORMER_ENGINE_VARIABLE] = "1" if on_cpu_too else "0"
    import torch

    import gspo_mega.cpu.backend as cpu  # before any other import of Megatron: it makes the CPU usable to it

    on_cpu = cpu.is_cpu_backend()
    if on_cpu:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    else:
        torch.cuda.set_device(place.local_rank)
    return on_cpu


def _init_distributed(place: RankEnvironment, on_cpu: bool, patience: timedelta) -> None:
    """Set up torch.distributed over all ranks: gloo for host tensors, NCCL for GPU tensors. Collective. `patience`: how
    long ranks wait for each other.
    """
    import torch.distributed as dist

    dist.init_process_group(
        backend="gloo" if on_cpu else "cpu:gloo,cuda:nccl",
        store=_store_of_job(place, patience),
        rank=place.rank,
        world_size=place.world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )


def _store_of_job(place: RankEnvironment, patience: timedelta) -> Any:
    """The job's key-value store. Rank 0 serves it, unless torchrun started the ranks and serves it."""
    serve = place.is_lead and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    from torch.distributed import DistError  # pyright: ignore[reportPrivateImportUsage]

    try:
        return rendezvous(address, port, place.rank, place.world_size, patience, serve)
    except DistError as error:
        seconds = patience.total_seconds()
        raise RankError(
            f"rank {place.rank} did not reach the store of rank 0 at {address}:{port} within {seconds:g} s"
            f" (cluster.preflight_seconds): {str(error).splitlines()[0]}"
        ) from error


def rendezvous(address: str, port: int, rank: int, world_size: int, timeout: timedelta, serve: bool) -> Any:
    """A client of the job's key-value store, a torch TCPStore. With `serve` it is served here, on `address` alone;
    torch's own would listen on every address of the machine.
    """
    # torch leaves both names out of its __all__.
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    if not serve:
        return TCPStore(address, port, world_size, is_master=False, timeout=timeout)
    listener = socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    return TCPStore(
        address,
        port,
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _open_store() -> KeyValueStore:
    """A client of the store that torch.distributed's rendezvous serves on rank 0, under a prefix of its own."""
    # torch leaves both names out of its __all__.
    from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return PrefixStore("gspo_mega", store)


if __name__ == "__main__":
    main()
