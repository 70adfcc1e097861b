"""One SGLang server, kept alive: start, wait healthy, register, restart with the current weights, end it all.

Owns the process group of one server and its registration file. It never touches a running server's weights (the
publisher does) and knows no other server. Light: no torch, no sglang in this process.
"""

from __future__ import annotations

import http.client
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gspo_mega.config.addresses import address_problem, with_port
from gspo_mega.config.schema import Config
from gspo_mega.errors import ConfigError, GspoMegaError, RankError
from gspo_mega.rollout.registration import Registration
from gspo_mega.rollout.secret import ensure_secret
from gspo_mega.rollout.server.process_tree import end_group, start_group
from gspo_mega.rollout.server.restart_budget import RestartBudget
from gspo_mega.rollout.server.scratch import Scratch, remove_abandoned
from gspo_mega.rollout.server.server_spec import spec_from_config
from gspo_mega.run_folder import Attempt, read_json

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.25
_HEARTBEAT_SECONDS = 2.0
_PROBE_SECONDS = 15.0
_TERM_GRACE_SECONDS = 2.0
_LOG_TAIL_LINES = 30


class _Stop(Exception):
    """A signal asked to stop, or the parent went."""


class ServerSupervisor:
    """Runs server `index` of `attempt` until told to stop, or until it failed more often than allowed.

    `entry` is the command that is a server, given --spec and --parent; another environment's Python, say.
    """

    def __init__(
        self,
        config: Config,
        attempt: Attempt,
        index: int,
        entry: Sequence[str] = (sys.executable, "-m", "gspo_mega.rollout.server.server_entry"),
    ) -> None:
        self._entry = list(entry)
        self._config = config
        self._attempt = attempt
        self._index = index
        self._log = attempt.server_log(index)
        self._stop = threading.Event()
        self._parent = os.getppid()
        self._process: subprocess.Popen | None = None
        self._scratch: Scratch | None = None
        self._budget = RestartBudget(config.server.max_restarts, config.server.restart_forgiven_after_seconds)
        self._last_healthy = 0.0
        self._beaten = 0.0
        self._beat_failed = False
        # A generation names one start of the attempt, whoever watched over it.
        before = read_json(attempt.server_file(f"server-{index}")) or {}
        self._registration = Registration(
            server_id=f"server-{index}",
            address="",
            pid=os.getpid(),
            state="starting",
            generation=before.get("generation", 0),
            weight_version=None,
            heartbeat=time.time(),
            tensor_parallel=config.server.tensor,
        )

    def run(self) -> int:
        """Blocks until asked to stop, then returns 0. Call it from the main thread (signals, parent-death). Raises
        RankError when the server failed too often and ConfigError when it refuses its configuration; registered as
        well.
        """
        # SIGUSR1 is what srun hands on: any other of these has it abort the step, with no time to end in order.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, lambda *_: self._stop.set())
        for folder in (self._attempt.servers_dir, self._attempt.logs_dir):
            folder.mkdir(parents=True, exist_ok=True)
        try:
            ensure_secret(self._attempt.api_key_file)
            remove_abandoned()
            self._serve()
        except _Stop:
            self._register(state="stopped")
            return 0
        except GspoMegaError as error:
            self._register(state="failed", error=str(error))
            raise
        except BaseException as error:
            self._register(state="failed", error=f"{type(error).__name__}: {error}")
            raise
        finally:
            self._end()

    def _serve(self) -> None:
        server = self._config.server
        while True:
            cause = self._serve_once()
            delay = self._budget.failed(self._last_healthy)
            if delay is None:
                raise RankError(
                    f"{self._registration.server_id}: {cause}, and it was restarted {server.max_restarts} times already"
                    f" (server.max_restarts; one is forgiven after {server.restart_forgiven_after_seconds:g} s in"
                    f" health, server.restart_forgiven_after_seconds).\n{self._log_tail()}"
                )
            logger.warning("%s: %s; starting it again in %.1f s", self._registration.server_id, cause, delay)
            self._register(state="restarting", error=cause)
            self._end()
            self._sleep(delay)

    def _serve_once(self) -> str:
        """Start the server and keep it until it dies or hangs. Returns what became of it."""
        self._start()
        started = time.monotonic()
        while not self._answers("/health", timeout=2.0):
            self._sleep(_POLL_SECONDS)
            if self._beat():
                self._scratch.note(self._process.pid)
            if (cause := self._death()) is not None:
                return cause
            if time.monotonic() - started > self._config.server.start_deadline_seconds:
                return f"not healthy {self._config.server.start_deadline_seconds:g} s after its start"
        self._scratch.note(self._process.pid)
        self._register(state="ready")
        self._budget.healthy()
        logger.info("%s: ready at %s", self._registration.server_id, self._registration.address)
        return self._watch()

    def _watch(self) -> str:
        """Until the process dies, or stays silent for as long as a whole start may take."""
        done = threading.Event()
        self._last_healthy = time.monotonic()
        threading.Thread(target=self._probe, args=(done,), daemon=True).start()
        try:
            while True:
                if (cause := self._death()) is not None:
                    return cause
                now = time.monotonic()
                if now - self._last_healthy > self._config.server.start_deadline_seconds + _PROBE_SECONDS:
                    return f"silent for {now - self._last_healthy:.0f} s"
                self._beat()
                self._sleep(_POLL_SECONDS)
        finally:
            done.set()

    def _probe(self, done: threading.Event) -> None:
        while not done.wait(_PROBE_SECONDS):
            if self._answers("/health_generate", timeout=_PROBE_SECONDS):
                self._last_healthy = time.monotonic()

    def _start(self) -> None:
        config, attempt = self._config, self._attempt
        weight_version, model_path = self._current_weights()
        generation = self._registration.generation + 1
        port = _free_port(config.server.host)
        # SGLang leaves sockets and marker files in the temporary folder when it is killed: give it its own.
        self._scratch = Scratch()
        spec = spec_from_config(
            config,
            model_path=model_path,
            weight_version=weight_version,
            port=port,
            api_key_file=attempt.api_key_file,
            # The link `latest` to an attempt is no name of its own.
            attempt=attempt.path.resolve().name,
            index=self._index,
            generation=generation,
            store=self._scratch.path / "store",
        )
        spec_file = self._scratch.path / "spec.json"
        spec.write(spec_file)
        self._registration = replace(
            self._registration,
            address=f"http://{with_port(config.server.host, port)}",
            generation=generation,
            weight_version=weight_version,
        )
        self._register(state="starting")
        command = [*self._entry, "--spec", str(spec_file), "--parent", str(os.getpid())]
        self._process = start_group(
            command, log=self._log, environment={**os.environ, "TMPDIR": str(self._scratch.path)}
        )

    def _current_weights(self) -> tuple[int | None, str]:
        """What this start loads, and its version: None where nobody in this attempt has committed one of it.

        `model.path` has none, not even 0: with `model.weights` the trainer begins with other weights, and a run that
        publishes through groups leaves nothing on disk. Nor has what an earlier attempt committed: going on from its
        checkpoint, this one gives the same numbers to other weights. Such a server gets work once it was published to.
        """
        current_file = self._attempt.run_folder.current_weights_file
        committed = _modified(current_file)  # before it is read: it may be replaced between
        current = read_json(current_file)
        if current is None:
            return None, self._config.model.path
        try:
            version, path = int(current["weight_version"]), str(current["path"])
            # Both files lie in the run folder, so that one clock wrote both times.
            return (
                version if committed is not None and committed >= _modified(self._attempt.api_key_file) else None
            ), path
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{current_file}: needs weight_version and path: {error!r}") from error

    def _death(self) -> str | None:
        code = self._process.poll()
        if code is None:
            return None
        if code == ConfigError.exit_code:  # said by the server entry; the same configuration would fail again
            raise ConfigError(f"{self._registration.server_id} refused its configuration:\n{self._log_tail()}")
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return f"SGLang {how} (see {self._log})"

    def _answers(self, path: str, timeout: float) -> bool:
        # http.client reads host:port, brackets included.
        connection = http.client.HTTPConnection(self._registration.address.removeprefix("http://"), timeout=timeout)
        try:
            connection.request("GET", path)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _beat(self) -> bool:
        """Whether it was time to."""
        if time.monotonic() - self._beaten <= _HEARTBEAT_SECONDS:  # whatever the clock on the wall does
            return False
        try:
            self._register()
        except OSError as error:  # the server is none the worse for it; the next beat says it again
            if not self._beat_failed:
                logger.warning(
                    "%s: its heartbeat could not be written: %s; tried again until it can be",
                    self._registration.server_id,
                    error,
                )
            self._beat_failed = True
        else:
            self._beat_failed = False
        return True

    def _register(self, **changes) -> None:
        self._beaten = time.monotonic()
        self._registration = replace(self._registration, heartbeat=time.time(), **changes)
        self._registration.write(self._attempt.servers_dir)

    def _sleep(self, seconds: float) -> None:
        """Sleep, and raise _Stop as soon as there is a reason to stop."""
        deadline = time.monotonic() + seconds
        while True:
            if self._stop.is_set() or os.getppid() != self._parent:
                raise _Stop
            left = deadline - time.monotonic()
            if left <= 0:
                return
            self._stop.wait(min(left, _POLL_SECONDS))

    def _end(self) -> None:
        if self._process is not None:
            if self._scratch is not None:
                self._scratch.note(self._process.pid)
            end_group(self._process, _TERM_GRACE_SECONDS)
            self._process = None
        if self._scratch is not None:
            self._scratch.remove()
            self._scratch = None

    def _log_tail(self) -> str:
        try:
            lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return ""
        return "\n".join(lines[-_LOG_TAIL_LINES:])


def _modified(path: Path) -> int | None:
    """When, in nanoseconds; None where there is no such file."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _free_port(host: str) -> int:
    """A port of `host` that is free now and below the ephemeral range, so that no outgoing connection takes it. Raises
    ConfigError where `host` is no address of this machine, or, by its name, the wildcard.
    """
    low, high = 20_000, 32_000
    start = (os.getpid() * 7919) % (high - low)
    for offset in range(high - low):
        port = low + (start + offset) % (high - low)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((host, port))
                if (problem := address_problem(probe.getsockname()[0])) is not None:
                    raise ConfigError(f"server.host: {host}: {problem}")
            except PermissionError:
                continue
            except OSError as error:
                if error.errno == 98:  # in use
                    continue
                raise ConfigError(f"server.host: cannot bind {host}: {error}") from error
            return port
    raise ConfigError(f"server.host: no free port of {host} between {low} and {high}")
