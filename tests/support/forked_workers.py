"""Processes that are forked from one that has imported what they need, instead of importing it themselves: an import of
the engine costs three seconds, and a certificate starts up to ten ranks; one of SGLang costs six.

`ForkedWorkers().command(MODULE, ...)` is a command, for example of a rank for `certify(..., worker_command=...)`. It is
started as any other. It hands its arguments, environment, folder, input and output to the forking process, passes signals on to
the fork, in which `MODULE.main(arguments)` runs, and ends as the fork ends. A fork whose command is gone is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_START_SECONDS = 1200.0  # imports on a busy machine; waiting longer costs nothing where all is well
_STATUS_BYTES = 4
# What ranks need. The CPU backend, which the engine brings, comes before Megatron.
OF_RANKS = ("gspo_mega.engine", "gspo_mega.train.worker", "gspo_mega.verify.certify.ranks")


class ForkedWorkers:
    """The forking process, started when the first command is asked for. It imports `modules`, in this order, with
    `variables` in its environment.
    """

    def __init__(self, modules: Sequence[str] = OF_RANKS, **variables: str) -> None:
        self._modules, self._variables = modules, variables
        self._folder = tempfile.TemporaryDirectory()  # a short path: a socket's name is bounded
        self._socket = Path(self._folder.name) / "socket"
        self._server: subprocess.Popen | None = None

    def command(self, module: str, *words: str) -> list[str]:
        if self._server is None:
            variables = {
                "GSPO_TRANSFORMER_ENGINE": "0",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),  # forks find the tests' modules
                **self._variables,
            }
            self._server = subprocess.Popen(
                [sys.executable, __file__, "--serve", str(self._socket), str(os.getpid()), *self._modules],
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
            )
            deadline = time.monotonic() + _START_SECONDS
            while not self._socket.exists():
                assert self._server.poll() is None and time.monotonic() < deadline, "the forking process did not start"
                time.sleep(0.02)
        return [sys.executable, "-I", "-S", __file__, str(self._socket), module, *words]

    def close(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.wait()
        self._folder.cleanup()


def _hand_over(path: str, module: str, words: list[str]) -> None:
    """The command of a rank."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.connect(path)
        # Until the fork's pid is known, signals wait.
        signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
        job = dict(module=module, words=words, folder=os.getcwd(), environment=dict(os.environ), pid=os.getpid())
        job = json.dumps(job).encode()
        socket.send_fds(server, [len(job).to_bytes(_STATUS_BYTES, "little")], [0, 1, 2])
        server.sendall(job)
        pid = _number(server)
        for number in _PASSED_ON:
            signal.signal(number, lambda number, frame: os.kill(pid, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        code = os.waitstatus_to_exitcode(_number(server))
    if code < 0:
        for number in _PASSED_ON:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _number(connection: socket.socket) -> int:
    data = b""
    while len(data) < _STATUS_BYTES:
        more = connection.recv(_STATUS_BYTES - len(data))
        if not more:
            os._exit(1)  # the forking process is gone, and the launcher notices the end of this one
        data += more
    return int.from_bytes(data, "little")


def _serve(path: str, tests: int, modules: Sequence[str]) -> None:
    """Forks for everybody who connects, until the process `tests` ends. One thread, as forks are made of it."""
    from gspo_mega.base import processes
    from gspo_mega.base.garbage import uncollected

    processes.die_with_parent(tests)

    with uncollected():
        for module in modules:
            importlib.import_module(module)

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    draft = f"{path}.draft"
    listener.bind(draft)
    listener.listen(64)
    os.rename(draft, path)
    waiting = selectors.DefaultSelector()
    waiting.register(listener, selectors.EVENT_READ)
    parent = os.getpid()
    while True:
        for key, _ in waiting.select():
            if key.fileobj is listener:
                connection, job, descriptors = _accept(listener)
                pid = os.fork()
                if pid == 0:
                    processes.die_with_parent(parent)
                    listener.close()
                    _run(job, connection, descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
                fork = _Fork(pid, connection, os.pidfd_open(pid))
                _tell(connection, pid)
                waiting.register(fork.descriptor, selectors.EVENT_READ, fork)
                waiting.register(connection, selectors.EVENT_READ, fork)
            elif not (fork := key.data).is_over:
                if key.fileobj is fork.connection:  # its command is gone: nothing is ever sent here
                    os.kill(fork.pid, signal.SIGKILL)
                _, status = os.waitpid(fork.pid, 0)
                fork.is_over = True
                waiting.unregister(fork.descriptor)
                waiting.unregister(fork.connection)
                os.close(fork.descriptor)
                _tell(fork.connection, status)
                fork.connection.close()


@dataclass
class _Fork:
    pid: int
    connection: socket.socket
    descriptor: int  # ready when the process has ended
    is_over: bool = False


def _accept(listener: socket.socket) -> tuple[socket.socket, dict, list[int]]:
    """The connection, the job, and its input, output and errors."""
    connection, _ = listener.accept()
    length, descriptors, *_ = socket.recv_fds(connection, _STATUS_BYTES, 3)
    job = b""
    while len(job) < int.from_bytes(length, "little"):
        job += connection.recv(65536)
    return connection, json.loads(job), descriptors


def _tell(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # its command is gone
        connection.sendall(number.to_bytes(_STATUS_BYTES, "little"))


def _run(job: dict, connection: socket.socket, descriptors: list[int]) -> None:
    """The rank, in the fork. Does not return."""
    os.setsid()
    connection.close()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    _enter_network(job["pid"])
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["folder"])
    sys.argv = [job["module"], *job["words"]]
    code = importlib.import_module(job["module"]).main(job["words"]) or 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _enter_network(pid: int) -> None:
    """Have the network of the command, if that has one of its own (`unshare --net`)."""
    with open(f"/proc/{pid}/ns/net", "rb") as theirs:
        is_ours = os.fstat(theirs.fileno()).st_ino == os.stat("/proc/self/ns/net").st_ino
        if not is_ours and ctypes.CDLL(None, use_errno=True).setns(theirs.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        _serve(sys.argv[2], int(sys.argv[3]), sys.argv[4:])
    else:
        _hand_over(sys.argv[1], sys.argv[2], sys.argv[3:])
