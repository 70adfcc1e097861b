"""Entry point of one rank: `python -m gspo_mega.train.worker --config FILE --attempt DIR --command train`.

`main` sets up what surrounds the work of a rank: log, signals, torch.distributed, the error record and the exit code.
It reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, which the supervisor or torchrun sets. In a step of
a Slurm job only the last two are set, and srun sets SLURM_PROCID, SLURM_NTASKS and SLURM_LOCALID in place of the
others. `ENTRY_POINTS` names the function that does the work of each command.

At the end of the file are the two ways in which a rank ends, and the rank's log and its lines for the user.

Exit code: 0 done; 75 stopped on request, and the same command continues; otherwise the error's.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import io
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from gspo_mega.base import failpoints, network, processes
from gspo_mega.base.errors import ConfigError, GspoMegaError, RankError
from gspo_mega.base.garbage import keep_freed_memory, uncollected
from gspo_mega.base.machine_faults import machine_fault
from gspo_mega.base.network import is_loopback
from gspo_mega.base.run_folder import EXIT_STOPPED, Attempt, atomic_write_json
from gspo_mega.base.untrusted import printable
from gspo_mega.base.user_functions import look_last_in
from gspo_mega.config import LoadedConfig, load_config
from gspo_mega.config.deadlines import COLLECTIVE_SECONDS, preflight_seconds
from gspo_mega.config.precision import TRANSFORMER_ENGINE_VARIABLE, has_transformer_engine_layers
from gspo_mega.config.schema import Cluster, Engine, Fp8, Precision, Server
from gspo_mega.plan.watchdog_bounds import patience
from gspo_mega.train.context import KeyValueStore, WorkerContext
from gspo_mega.train.gpu_variables import set_variables
from gspo_mega.train.signals import BeatWriter, StackDumps

logger = logging.getLogger(__name__)
console_logger = logging.getLogger("gspo_mega.console")

# A collective that has not ended after this time never will. While all ranks live, the longest wait in one is for a
# publish or a checkpoint. (Waiting for rollouts is not a collective.)
COLLECTIVE_TIMEOUT = timedelta(seconds=COLLECTIVE_SECONDS)

ENTRY_POINTS = {
    "train": ("gspo_mega.train.loop", "run_train"),
    "sft": ("gspo_mega.train.sft_loop", "run_sft"),
    "eval": ("gspo_mega.train.eval_rank", "run_eval"),
    "budget": ("gspo_mega.verify.mismatch.ranks", "run_budget"),
    "certify": ("gspo_mega.verify.certify.ranks", "run_certify"),
    "compare": ("gspo_mega.verify.compare.ranks", "run_compare"),
    "reward_model": ("gspo_mega.train.fit_scores", "run_fit"),
}


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The `config`, `attempt` and `command` of a rank; `arguments`: those of this process if None."""
    parser = argparse.ArgumentParser(prog="gspo_mega.train.worker")
    parser.add_argument("--config", required=True, help="config.resolved.yaml of the run")
    parser.add_argument("--attempt", required=True, type=Path, help="attempt folder")
    parser.add_argument("--command", required=True, choices=sorted(ENTRY_POINTS))
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run one rank. Does not return: the process ends with the rank's exit code."""
    args = parse_arguments(arguments)
    attempt = Attempt(args.attempt)
    place = RankEnvironment.read(os.environ)
    failpoints.arm(os.environ.get(failpoints.VARIABLE), place.rank)
    # Megatron forks processes that write a save. They must end with a rank that is killed.
    processes.forks_die_with_us()
    redirect_output(attempt.rank_log(place.rank))
    _default_signals()
    processes.raise_open_file_limit()  # rank 0 has a connection for every open request of every server
    try:
        loaded = load_config(args.config, command=args.command)
        look_last_in(loaded.config.run.modules_dir)
        network.set_no_proxy([os.environ["MASTER_ADDR"], loaded.config.server.host])
        bounds = patience(loaded.config)
        StackDumps(attempt, place.rank, place.world_size)
        writer = None if bounds is None else BeatWriter(attempt, place.rank, place.world_size, bounds)
        result = _work(args.command, loaded, attempt, place)
        if result is not None and place.is_lead:
            atomic_write_json(attempt.result_file, result)
        code = EXIT_STOPPED if result and result.get("stopped") else 0
        leave(code, [] if writer is None else [writer.close])
    except BaseException as error:
        # This includes SystemExit and KeyboardInterrupt: if anything ends this rank early, the other ranks must end.
        fail(error, place.rank, attempt)


def _work(command: str, loaded: LoadedConfig, attempt: Attempt, place: RankEnvironment) -> dict[str, Any] | None:
    _keep_to_this_machine(loaded.config.cluster, loaded.config.server)
    module, function = ENTRY_POINTS[command]
    with uncollected():
        config = loaded.config
        on_cpu = _prepare_torch(place, config.precision, config.engine, config.fp8)
        work = getattr(importlib.import_module(module), function)
    _init_distributed(place, on_cpu, timedelta(seconds=preflight_seconds(loaded.config.cluster)))
    context = WorkerContext(
        config=loaded.config,
        attempt_dir=attempt.path,
        run_dir=attempt.run_folder.path,
        is_lead=place.is_lead,
        console=console(attempt) if place.is_lead else lambda line: None,
        open_store=_open_store,
    )
    return work(context)


@dataclass(frozen=True)
class RankEnvironment:
    """The rank, the number of ranks, and the rank on this machine, as the launcher set them."""

    rank: int
    world_size: int
    local_rank: int

    @property
    def is_lead(self) -> bool:
        """Whether this is rank 0. Only rank 0 samples, writes metrics and shows lines to the user."""
        return self.rank == 0

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> RankEnvironment:
        """The values in the environment variables. Raises ConfigError naming every variable that is missing or not a
        number.
        """
        names = {"RANK": "rank", "WORLD_SIZE": "world_size", "LOCAL_RANK": "local_rank"}
        # All three come from one source: torchrun inside a Slurm job sets the first names, srun the others.
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


def _default_signals() -> None:
    """Make SIGTERM end the process at once, even inside a collective, where no Python handler would run.

    SIGUSR2 writes the main thread's stack to the log, and no others: those of running threads could change while they
    are read. (SIGUSR2 to the supervisor asks for all stacks of all ranks: `signals.py`.)
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=False)


def _keep_to_this_machine(cluster: Cluster, server: Server) -> None:
    """Make gloo and NCCL listen only on the loopback interface if all ranks and servers are on this machine, regardless
    of what the machine's name resolves to.
    """
    is_one_machine = cluster.num_nodes == 1 and cluster.num_rollout_nodes == 0
    if is_one_machine and is_loopback(os.environ["MASTER_ADDR"]) and is_loopback(server.host):
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, "lo")


def _prepare_torch(place: RankEnvironment, precision: Precision, engine: Engine, fp8: Fp8) -> bool:
    """Set the variables that torch reads when it is imported, import torch, and choose this rank's device. Returns
    whether the device is a CPU.
    """
    set_variables_before_torch(place, precision, engine, fp8)
    import torch

    import gspo_mega.cpu.backend as cpu  # before any other import of Megatron, which it enables to run on a CPU

    on_cpu = cpu.is_cpu_backend()
    if on_cpu:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        keep_freed_memory(os.environ)
    else:
        torch.cuda.set_device(place.local_rank)
    return on_cpu


def set_variables_before_torch(
    place: RankEnvironment, precision: Precision, engine: Engine, fp8: Fp8, opens_device: bool = True
) -> None:
    """Set the variables that torch, Megatron and Transformer Engine read when they are imported. `opens_device`: make
    this rank's GPU the current device, which may create its context.
    """
    set_variables(os.environ, place.local_rank, fp8, opens_device=opens_device)
    # Read when the engine is imported on a machine without a GPU.
    on_cpu_too = has_transformer_engine_layers(precision, engine, has_gpu=False)
    os.environ[TRANSFORMER_ENGINE_VARIABLE] = "1" if on_cpu_too else "0"


def _init_distributed(place: RankEnvironment, on_cpu: bool, patience: timedelta) -> None:
    """Set up torch.distributed over all ranks: gloo for host tensors, NCCL for GPU tensors. Collective. `patience`: how
    long the ranks wait for each other.
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
    """A client of the job's key-value store. Rank 0 serves the store, unless torchrun started the ranks and serves it.
    Raises RankError if the store cannot be reached within `patience`.
    """
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
    """A client of the job's key-value store, a torch TCPStore. With `serve` this process serves it, only on `address`;
    torch's own server would listen on every address of the machine.
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
    """A new client of the store of torch.distributed's rendezvous, with a prefix of its own."""
    # torch leaves both names out of its __all__.
    from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return PrefixStore("gspo_mega", store)


def error_record(error: BaseException, rank: int) -> dict:
    """The content of errors/rank_<r>.json.

    `is_user_error`: the user needs only the text. That is so for a GspoMegaError, except RankError, whose traceback
    matters. `machine_fault`: what the machine did to this rank, in words; then the traceback is left to the log. Any
    other error is a defect and shows `traceback`. `exit_code` is what the command returns. `time`: unix seconds.
    """
    is_user_error = isinstance(error, GspoMegaError) and not isinstance(error, RankError)
    return {
        "rank": rank,
        "type": f"{type(error).__module__}.{type(error).__qualname__}",
        "text": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "time": time.time(),
        "is_user_error": is_user_error,
        "machine_fault": None if isinstance(error, GspoMegaError) else machine_fault(error),
        "exit_code": error.exit_code if isinstance(error, GspoMegaError) else RankError.exit_code,
    }


def fail(error: BaseException, rank: int, attempt: Attempt) -> NoReturn:
    """Record `error` for the supervisor and end this process at once, without running destructors.

    A failed rank must skip Python's normal shutdown: destructors of process groups and atexit hooks wait for peers that
    wait for this rank. The record is durable before the process ends, and its time is the earliest of all ranks: peers
    whose collective breaks because this rank ends write their records later.
    """
    record = error_record(error, rank)
    logger.error("rank %d failed\n%s", rank, record["traceback"])
    code = record["exit_code"]
    try:
        # A folder that cannot be written must not keep the rank alive. The log has the traceback.
        atomic_write_json(attempt.error_file(rank), record)
    except OSError:
        logger.error("the error record of rank %d could not be written\n%s", rank, traceback.format_exc())
    _exit(code)


def leave(exit_code: int, last: Sequence[Callable[[], None]] = ()) -> NoReturn:
    """End after the work is done: wait for the other ranks, call `last`, destroy the process groups, exit.

    Collective over all ranks, so that no rank closes connections that another one still reads from. Python's normal
    shutdown is skipped here as well: with Megatron and its threads loaded it takes seconds and can only fail.
    """
    import torch.distributed as dist  # imported here so that a rank whose import of torch fails can still record that

    if dist.is_initialized():
        dist.barrier()
    for call in last:
        call()
    if dist.is_initialized():
        dist.destroy_process_group()
    _exit(exit_code)


def _exit(code: int) -> NoReturn:
    """End without Python's normal shutdown. That shutdown would also end the children of multiprocessing, so they are
    killed here: children of a library, such as Megatron's checkpoint writers, would wait for this process forever.
    """
    for child in multiprocessing.active_children():
        child.kill()
    logging.shutdown()
    os._exit(code)


class _LossyFile(io.RawIOBase):
    """A file object over a descriptor. Text that the disk refuses is lost, and does not end the rank."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError:
            return len(data)


def redirect_output(log: Path) -> None:
    """Redirect standard output and error of this process, including those of C libraries, to the rank's log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout, sys.stderr = _text(1), _text(2)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )


def _text(descriptor: int) -> io.TextIOWrapper:
    buffer = io.BufferedWriter(_LossyFile(descriptor))
    return io.TextIOWrapper(buffer, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def console(attempt: Attempt) -> Callable[[str], None]:
    """A function that shows a line to the user: it appends the line to console.log, which the supervisor shows, and to
    the rank's log. If console.log cannot be written, the line is only in the log.
    """

    def show(line: str) -> None:
        try:
            with attempt.console_log.open("a", encoding="utf-8") as file:
                file.write(printable(line) + "\n")
        except OSError as error:
            console_logger.warning("%s cannot be written: %s", attempt.console_log, error.strerror)
        console_logger.info("%s", line)

    return show


if __name__ == "__main__":
    main()
