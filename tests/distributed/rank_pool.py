"""A living pool of gloo ranks for tests: start once, lead through many layouts.

`RankPool(n).run("module:function", **arguments)` calls `function(**arguments)` on every rank at once and
returns the ranks' results in order; a rank's exception is raised here with its traceback.

Ranks are forked from a process that has imported the engine, and start in a tenth of a second. Those with Transformer
Engine import everything themselves: the two kinds cannot share a process.

A rank that a signal kills (a fault in native code) ends its job. Once per test session the job then runs again on new
ranks, with a warning that names the signal; `faulthandler` has shown where each thread was. A second such death is an
error. It happened in one of four whole runs of these tests (glibc: "unaligned tcache chunk"); it was never reproduced,
and its cause is not known.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
import traceback
import warnings
from typing import Any

from gspo_mega.base.garbage import uncollected
from gspo_mega.launcher.prepare import free_port

# What the process imports of which ranks are forked.
ENGINE_MODULES = ["gspo_mega.engine", "gspo_mega.train.loop", "gspo_mega.train.session"]
# A bound on what a rank's memory may pile up; its threads do not (test_groups.py).
JOBS_A_POOL = 60
_TEST_FOLDER = os.path.dirname(os.path.abspath(__file__))
_SUPPORT = os.path.join(os.path.dirname(_TEST_FOLDER), "support")


def _serve(rank: int, size: int, port: int, pipe, transformer_engine: bool) -> None:
    sys.path[:0] = [_TEST_FOLDER, _SUPPORT]
    os.setpgrp()  # so that what a rank starts can be ended with it
    faulthandler.enable()  # a rank that dies of a signal shows where
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        GSPO_TRANSFORMER_ENGINE=str(int(transformer_engine)),
    )
    warnings.filterwarnings("ignore")
    with uncollected():
        import torch
        import torch.distributed as dist

        import gspo_mega.engine  # noqa: F401  the CPU backend comes before torch.distributed and Megatron

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    while True:
        try:
            job = pipe.recv()
        except EOFError:  # the tests are gone
            job = None
        if job is None:
            break
        target, arguments = job
        module, _, function = target.partition(":")
        try:
            pipe.send(("ok", getattr(importlib.import_module(module), function)(**arguments)))
        except BaseException:
            pipe.send(("error", traceback.format_exc()))
    dist.destroy_process_group()


class RankDiedError(RuntimeError):
    """A rank's process is gone. `signal`: what killed it, None where it ended by itself."""

    def __init__(self, text: str, number: signal.Signals | None) -> None:
        super().__init__(text)
        self.signal = number


class RankPool:
    num_deaths = 0  # by a signal that nobody here sent, in all pools of this process

    def __init__(self, size: int, transformer_engine: bool = False) -> None:
        self.size, self._transformer_engine = size, transformer_engine
        atexit.register(self.kill)
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn" if self._transformer_engine else "forkserver")
        if not self._transformer_engine:
            context.set_forkserver_preload(ENGINE_MODULES)
        port = free_port()
        self._pipes, self._processes = [], []
        self.num_jobs = 0
        # Not daemons: a rank that saves a checkpoint starts a process of its own.
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, port, theirs, self._transformer_engine))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, target: str, timeout: float = 240.0, **arguments) -> list:
        try:
            return self._run(target, timeout, arguments)
        except RankDiedError as death:
            if death.signal is None:
                raise
            RankPool.num_deaths += 1
            if RankPool.num_deaths > 1:
                raise
            warnings.warn(f"{death}; the job runs once more on new ranks", stacklevel=2)
        self._start()
        return self._run(target, timeout, arguments)

    def _run(self, target: str, timeout: float, arguments: dict) -> list:
        self.num_jobs += 1
        for pipe in self._pipes:
            pipe.send((target, arguments))
        until, results = time.monotonic() + timeout, {}
        while len(results) < self.size:
            open_ranks = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in results}
            ready = multiprocessing.connection.wait(open_ranks, max(until - time.monotonic(), 0.0))
            if not ready:
                self.kill()
                rank = min(open_ranks.values())
                raise TimeoutError(f"rank {rank} of {self.size} did not finish {target} in {timeout:.0f} s")
            for pipe in sorted(ready, key=lambda one: open_ranks[one]):
                results[open_ranks[pipe]] = self._received(open_ranks[pipe], target)
        return [results[rank] for rank in range(self.size)]

    def _received(self, rank: int, target: str) -> Any:
        try:
            kind, value = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            raise self._death(rank, target) from None
        if kind == "error":
            # Others may wait for this rank for ever. Those that fail too do so soon, and the lowest is reported.
            for lower in range(rank):
                if self._pipes[lower].poll(2.0 / rank):
                    self._received(lower, target)
            dead = self._dead_of_a_signal()
            if dead is not None:  # what this rank reports is then that the other is gone
                raise self._death(dead, target)
            self.kill()
            raise AssertionError(f"rank {rank} of {self.size} in {target}:\n{value}")
        return value

    def _dead_of_a_signal(self) -> int | None:
        for rank, process in enumerate(self._processes):
            process.join(0.2)
            if process.exitcode is not None and process.exitcode < 0:
                return rank
        return None

    def _death(self, rank: int, target: str) -> RankDiedError:
        process = self._processes[rank]
        process.join(20)
        code = process.exitcode
        self.kill()
        number = signal.Signals(-code) if code is not None and code < 0 else None
        how = f"died of {number.name}" if number else f"ended with exit code {code}"
        return RankDiedError(f"rank {rank} of {self.size} {how} in {target}", number)

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes):
            if process.is_alive():
                pipe.send(None)
        for process in self._processes:
            process.join(20)
        self.kill()

    def kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:  # not yet in a group of its own
                    process.kill()
                process.join()


class RankPools:
    """Pools by size, and by whether their ranks load Transformer Engine; made when first asked for. A pool that a
    failure killed, or that has done its share, is replaced.
    """

    def __init__(self) -> None:
        self._pools: dict[tuple[int, bool], RankPool] = {}

    def __call__(self, size: int, transformer_engine: bool = False) -> RankPool:
        pool = self._pools.get((size, transformer_engine))
        if pool is not None and pool.num_jobs >= JOBS_A_POOL:
            pool.close()
        if pool is None or not all(p.is_alive() for p in pool._processes):
            pool = self._pools[size, transformer_engine] = RankPool(size, transformer_engine=transformer_engine)
        return pool

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
