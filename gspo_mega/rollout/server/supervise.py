"""Keeps one SGLang server alive: start, wait until healthy, register, restart with the current weights, end.

`ServerSupervisor` has the process group of one server and writes its registration file. It never changes a running
server's weights (the publisher does) and knows no other server. This process imports neither torch nor sglang.

`RestartBudget` says how many restarts a server may have before it is given up.

With `train.keep_servers`, a server may go on into the next attempt of its run (`next_attempt.py`).

`drain` spends the last seconds of a server that is asked to stop: its open requests leave it, then it may end. Clients
see the state `draining`, and end their own requests with the tokens so far. Requests that are left when the time is
nearly over are cut short here, and their answers have their tokens, too.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, Protocol

from gspo_mega.base.errors import ConfigError, GspoMegaError, RankError, RolloutError
from gspo_mega.base.network import with_port
from gspo_mega.base.run_folder import Attempt, atomic_write_json, read_json
from gspo_mega.base.untrusted import read_text
from gspo_mega.config.precision import publishes, publishes_adapters
from gspo_mega.config.schema import Config
from gspo_mega.models.block_fp8 import served_layout
from gspo_mega.rollout.registration import Registration, ensure_secret, read_secret, server_may_start
from gspo_mega.rollout.server.multinode import ServerParts
from gspo_mega.rollout.server.next_attempt import Order, Orders, answer, differs, forget
from gspo_mega.rollout.server.process import RunningServer, free_port, log_tail, remove_abandoned
from gspo_mega.rollout.server.spec import ServerSpec, served_precision, spec_from_config
from gspo_mega.rollout.server.start_weights import CopyWait, StartCopy, current_weights

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.25

_HEARTBEAT_SECONDS = 2.0

_PROBE_SECONDS = 15.0

_MOST_CAUSES = 5

# What a Python without a package says. Once may be a network folder's fault.
_MISSING = re.compile(r"(?:ModuleNotFoundError|ImportError): .*")

_SCHEDULER_ANSWERS = "/server_info"

_FIRST_DELAY_SECONDS = 0.5

_LONGEST_DELAY_SECONDS = 30.0


_DRAIN_POLL_SECONDS = 0.125

# How long no request must be open. Before that, the pool may not have read the new state yet: it reads every quarter of
# a second, and a request may be on its way.
_SETTLED_SECONDS = 0.625

# The fraction of `server.drain_seconds` after which the requests that are left are cut short.
_CUT_SHORT_AT = 0.8

_ANSWER_SECONDS = 2.0


class _Stop(Exception):
    """A signal asks this process to stop, or the parent process has ended."""


class ServerSupervisor:
    """Runs server `index` of `attempt` until a signal asks it to stop, or until the server has failed more often than
    allowed.

    `entry` is the command that runs a server, without --spec and --parent; it may use the Python of another
    environment. `start` is the folder to start from before anything is published. It may be a copy that is still to be
    made; None means `model.path`. `classifies` says that the server's model scores texts. `orders`, if there are any,
    say into which attempt the server goes on, and `config_of` reads the configuration that it would have there.
    """

    def __init__(
        self,
        config: Config,
        attempt: Attempt,
        index: int,
        entry: Sequence[str] = (sys.executable, "-m", "gspo_mega.rollout.server.entry"),
        start: Path | StartCopy | None = None,
        classifies: bool = False,
        orders: Orders | None = None,
        config_of: Callable[[str], Config] | None = None,
    ) -> None:
        self._entry = list(entry)
        self._orders, self._config_of = orders, config_of
        self._classifies = classifies
        self._copy = start if isinstance(start, StartCopy) else None
        self._start_folder = str(start.path if isinstance(start, StartCopy) else start or config.model.path)
        self._config = config
        self._attempt = attempt
        self._index = index
        self._log = attempt.server_log(index)
        self._stop = threading.Event()
        self._num_signals = self._num_failures = 0
        self._parent = os.getppid()
        self._running: RunningServer | None = None
        self._budget = RestartBudget(config.server.max_restarts, config.server.restart_forgiven_after_seconds)
        self._parts = ServerParts(attempt, index, config.server.num_nodes)
        self._last_healthy = 0.0
        self._ready_from: int | None = None  # the end of the log, in bytes, when this start was ready
        self._registered_at = 0.0
        self._heartbeat_failed = False
        # A generation names one start in the attempt, also across restarts of this supervisor.
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
        """Block until asked to stop, then return 0. Call it from the main thread, which gets the signals.

        Raises RankError if the server failed too often, and ConfigError if it refuses its configuration. The
        registration shows the error, too.
        """
        # srun forwards SIGUSR1. On any other of these signals it aborts the step at once, without an orderly end.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, self._note_signal)
        for folder in (self._attempt.servers_dir, self._attempt.logs_dir):
            folder.mkdir(parents=True, exist_ok=True)
        try:
            ensure_secret(self._attempt.api_key_file)
            remove_abandoned()
            self._wait_for_copy()
            self._serve()
        except _Stop:
            self._drain()
            self._register(state="stopped")
            return 0
        except GspoMegaError as error:
            self._register_failure(str(error))
            raise
        except BaseException as error:
            self._register_failure(f"{type(error).__name__}: {error}")
            raise
        finally:
            self._end()

    def _wait_for_copy(self) -> None:
        """Wait until there is a folder to start from, and show in the registration how far its copy is."""
        if self._copy is None:
            return
        wait = CopyWait(self._copy, self._attempt, self._config.server.start_deadline_seconds)
        try:
            self._register(waits_for=wait.what)
            while (amounts := wait.look()) is not None:
                done_bytes, total_bytes = amounts
                self._registration = replace(self._registration, done_bytes=done_bytes, total_bytes=total_bytes)
                self._write_heartbeat()
                self._sleep(_POLL_SECONDS)
        finally:
            wait.end()
        self._register(waits_for=None, done_bytes=0, total_bytes=0)

    def _note_signal(self, *_: object) -> None:
        self._num_signals += 1
        self._stop.set()

    def _drain(self) -> None:
        """Let the open requests leave a healthy server. A second signal, or the parent's end, ends it at once."""
        seconds = self._config.server.drain_seconds
        if self._registration.state != "ready" or seconds == 0 or not self._may_wait(0):
            return
        self._register(state="draining")
        requests = ServerRequests(self._registration.address, self._attempt.api_key_file)
        logger.info("%s: drained: %s", self._registration.server_id, drain(requests, seconds, self._may_wait))

    def _may_wait(self, seconds: float) -> bool:
        time.sleep(seconds)  # a signal's handler may run in between; the sleep then goes on
        self._write_heartbeat()
        return self._num_signals < 2 and os.getppid() == self._parent

    def _serve(self) -> NoReturn:
        server, missing = self._config.server, None
        while True:
            cause = self._serve_once()
            delay = self._budget.failed(self._last_healthy)
            self._num_failures += 1
            if self._running is not None and (line := self._running.failure_line(self._ready_from)) is not None:
                cause = f"{cause}: {line}"
            # A server that was ready lacks no package, even if its log names optional ones that are missing.
            lacks = None if self._ready_from is not None else _MISSING.search(cause)
            if lacks and lacks[0] == missing:
                raise RankError(
                    f"{self._registration.server_id}: {cause}, at two starts in a row: the servers' Python lacks what"
                    f" SGLang imports (launch/env/gpu-server.txt).\n{log_tail(self._log)}"
                )
            missing = lacks and lacks[0]
            if delay is None:
                raise RankError(
                    f"{self._registration.server_id}: {cause}, and it was restarted {server.max_restarts} times already"
                    f" (server.max_restarts; one is forgiven after {server.restart_forgiven_after_seconds:g} s in"
                    f" health, server.restart_forgiven_after_seconds).\n{log_tail(self._log)}"
                )
            failed, most = self._budget.failed_starts, self._budget.most_starts
            logger.warning(
                "%s: %s; starting it again in %.1f s, attempt %d of %d",
                *(self._registration.server_id, cause, delay, failed + 1, most),
            )
            self._register(
                state="restarting",
                error=cause,
                num_failures=self._num_failures,
                failed_starts=failed,
                most_starts=most,
                recent_failures=[*self._registration.recent_failures, cause.strip().splitlines()[0]][-_MOST_CAUSES:],
            )
            self._end()
            self._sleep(delay)

    def _serve_once(self) -> str:
        """Start the server, and watch it until it dies or hangs. Return the cause."""
        self._wait_for_turn()
        self._ready_from = None
        running = self._running = self._start()
        started = time.monotonic()
        while not self._answers("/health", timeout=2.0):
            self._sleep(_POLL_SECONDS)
            if self._write_heartbeat():
                running.note_shared_memory()
            if (cause := self._death_of(running)) is not None:
                return cause
            if time.monotonic() - started > self._config.server.start_deadline_seconds:
                late = f"not healthy {self._config.server.start_deadline_seconds:g} s after its start"
                return late + self._parts.missing(self._registration.generation)
        running.note_shared_memory()
        try:
            precision = served_precision(
                self._config.server, self._config.precision, self._registration.address, self._attempt.api_key_file
            )
        except RankError as error:
            return str(error)
        self._ready_from = running.log_end
        self._register(state="ready", precision=precision)
        self._budget.healthy()
        logger.info("%s: ready at %s, %s", self._registration.server_id, self._registration.address, precision)
        return self._watch(running)

    def _wait_for_turn(self) -> None:
        """Wait until the ranks leave this server its GPUs. Rank 0 first writes whose turn it is, and then looks for
        servers that are `starting`. So this server first registers as `starting`, and then reads whose turn it is.
        """
        while self._config.cluster.colocated:
            self._register(state="starting")
            if server_may_start(self._attempt):
                return
            self._register(state="waiting")
            while not server_may_start(self._attempt):
                self._sleep(_POLL_SECONDS)
                self._write_heartbeat()

    def _watch(self, running: RunningServer) -> str:
        """Wait until the process dies, or does not answer for as long as a whole start may take. Return the cause."""
        done = threading.Event()
        self._last_healthy = time.monotonic()
        threading.Thread(target=self._probe, args=(done,), daemon=True).start()
        try:
            while True:
                if (cause := self._death_of(running)) is not None:
                    return cause
                now = time.monotonic()
                if now - self._last_healthy > self._config.server.start_deadline_seconds + _PROBE_SECONDS:
                    return f"silent for {now - self._last_healthy:.0f} s"
                self._write_heartbeat()
                self._sleep(_POLL_SECONDS)
        finally:
            done.set()

    def _probe(self, done: threading.Event) -> None:
        while not done.wait(_PROBE_SECONDS):
            # A server that has released its cache cannot generate, but its scheduler answers.
            path = _SCHEDULER_ANSWERS if self._config.cluster.colocated else "/health_generate"
            if self._answers(path, timeout=_PROBE_SECONDS):
                self._last_healthy = time.monotonic()

    def _start(self) -> RunningServer:
        config, attempt, generation = self._config, self._attempt, self._registration.generation + 1
        weight_version, model_path = None, self._start_folder
        if not publishes_adapters(config):  # versions of adapters hold no weights to start from
            weight_version, model_path = current_weights(attempt, self._start_folder, served_layout(config))
        port = free_port(config.server.host)

        def make_spec(scratch: Path) -> ServerSpec:
            """Make the spec, order the other parts to start, and register the new generation."""
            spec = spec_from_config(
                config,
                model_path=model_path,
                weight_version=weight_version,
                port=port,
                api_key_file=attempt.api_key_file,
                # The seed depends on the attempt's own name, not on that of the link `latest`.
                attempt=attempt.path.resolve().name,
                index=self._index,
                generation=generation,
                store=scratch / "store",
                rendezvous=self._parts.rendezvous(config.server.host, port),
            )
            spec = replace(spec, classifies=self._classifies)
            self._parts.order(generation, spec)
            self._registration = replace(
                self._registration,
                address=f"http://{with_port(config.server.host, port)}",
                generation=generation,
                weight_version=weight_version,
            )
            self._register(state="starting")
            return spec

        return RunningServer.start(self._entry, self._log, make_spec)

    def _death_of(self, running: RunningServer) -> str | None:
        """Say how the process ended; None while it runs. Raises ConfigError if it refused its configuration, unless the
        reason is that its weights were replaced by newer ones while it loaded them.
        """
        how, part = running.how_it_ended, self._parts.death(self._registration.generation)
        if how is None or part is not None:
            return part
        if running.model_path != self._start_folder and not Path(running.model_path).is_dir():
            return f"its weights were removed while it loaded them: {running.model_path}"
        if running.process.returncode == ConfigError.exit_code:  # the same configuration would fail again
            raise ConfigError(f"{self._registration.server_id} refused its configuration:\n{log_tail(self._log)}")
        return how

    def _answers(self, path: str, timeout: float) -> bool:
        # http.client takes host:port, with the brackets of an IPv6 address.
        connection = http.client.HTTPConnection(self._registration.address.removeprefix("http://"), timeout=timeout)
        try:
            headers = {}
            if path == _SCHEDULER_ANSWERS:
                headers = {"Authorization": f"Bearer {read_secret(self._attempt.api_key_file)}"}
            connection.request("GET", path, headers=headers)
            return connection.getresponse().status == 200
        except (OSError, ConfigError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _write_heartbeat(self) -> bool:
        """Write the heartbeat if it is due, and return whether it was."""
        if time.monotonic() - self._registered_at <= _HEARTBEAT_SECONDS:  # independent of the system clock
            return False
        try:
            self._register()
        except OSError as error:  # the server itself is well; the next heartbeat is tried as usual
            if not self._heartbeat_failed:
                logger.warning(
                    "%s: its heartbeat could not be written: %s; tried again until it can be",
                    self._registration.server_id,
                    error,
                )
            self._heartbeat_failed = True
        else:
            self._heartbeat_failed = False
        return True

    def _register_failure(self, error: str) -> None:
        """Register a failure if possible. A full disk must not hide the error; the launcher registers a server that
        ended without a registered error.
        """
        try:
            self._register(state="failed", error=error)
        except OSError as problem:
            logger.warning("%s: its failure could not be registered: %s", self._registration.server_id, problem)

    def _register(self, **changes) -> None:
        self._registered_at = time.monotonic()
        self._registration = replace(self._registration, heartbeat=time.time(), **changes)
        self._registration.write(self._attempt.servers_dir)

    def _sleep(self, seconds: float) -> None:
        """Sleep. Raise _Stop as soon as a signal, or the end of the parent, asks to stop."""
        deadline = time.monotonic() + seconds
        while True:
            if self._stop.is_set() or os.getppid() != self._parent:
                raise _Stop
            left = deadline - time.monotonic()
            if left <= 0:
                return
            if self._orders is None:
                self._stop.wait(min(left, _POLL_SECONDS))
            elif (order := self._orders.wait(min(left, _POLL_SECONDS))) is not None:
                self._go_on(order)

    def _go_on(self, order: Order) -> None:
        """Go on in another attempt, as a server that has just become ready there. If that is not possible, say why and
        raise _Stop.
        """
        began, server_id, attempt = time.monotonic(), self._registration.server_id, Attempt(order.attempt)
        try:
            config = self._forget(order)
        except GspoMegaError as error:
            logger.warning("%s: does not go on in %s: %s", server_id, attempt.path, error)
            self._register(state="restarting", error=str(error))  # its requests are lost, so it has nothing to drain
            answer(attempt, server_id, str(error), time.monotonic() - began)
            raise _Stop from None
        with contextlib.suppress(OSError):
            self._register(state="stopped")
        if (software := read_json(self._attempt.software_dir / f"{server_id}.json")) is not None:
            attempt.software_dir.mkdir(parents=True, exist_ok=True)
            atomic_write_json(attempt.software_dir / f"{server_id}.json", software)
        self._config, self._attempt, self._log = config, attempt, attempt.server_log(self._index)
        self._parts = ServerParts(attempt, self._index, config.server.num_nodes)
        assert self._running is not None
        self._running = replace(self._running, log=self._log)
        self._num_failures = 0
        self._register(
            state="ready",
            generation=self._registration.generation + 1,
            weight_version=None,
            error=None,
            num_failures=0,
            failed_starts=0,
            recent_failures=[],
        )
        answer(attempt, server_id, None, time.monotonic() - began)
        logger.info("%s: goes on in %s", server_id, attempt.path)

    def _forget(self, order: Order) -> Config:
        """Let SGLang forget what it did in this attempt, and return the configuration of the next one. Raises
        GspoMegaError if the server cannot go on.
        """
        state, running = self._registration.state, self._running
        if state != "ready" or running is None:
            raise RolloutError(f"it is {state}")
        if (how := running.how_it_ended) is not None:
            raise RolloutError(how)
        config = self._config if self._config_of is None else self._config_of(order.config)
        if differs(config, self._config, self._start_folder):
            raise ConfigError("it would be started with other settings now")
        groups = []
        with contextlib.suppress(FileNotFoundError):
            groups = read_text(self._attempt.weight_groups_file).split()
        is_published_to = not self._classifies and publishes(config.train, config.sft)
        forget(self._registration.address, self._attempt.api_key_file, groups, is_published_to=is_published_to)
        return config

    def _end(self) -> None:
        if self._running is not None:
            self._running.end()
            self._running = None


class RestartBudget:
    """Counts restarts. Each adds one, and every `forgiven_after_seconds` of healthy serving take one away.

    A server that never becomes healthy gets `max_restarts` restarts; one that fails once a week never runs out of them.
    Time spent starting, hanging or waiting forgives nothing.
    """

    def __init__(
        self, max_restarts: int, forgiven_after_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_restarts, self._forgiven_after_seconds, self._clock = max_restarts, forgiven_after_seconds, clock
        self._counted = 0.0
        self._healthy_since: float | None = None

    @property
    def failed_starts(self) -> int:
        """How many of the `max_restarts + 1` starts have failed, without those that were forgiven."""
        return math.ceil(self._counted)

    @property
    def most_starts(self) -> int:
        return self._max_restarts + 1

    def healthy(self) -> None:
        """Note that the server became ready now."""
        self._healthy_since = self._clock()

    def failed(self, last_healthy: float | None = None) -> float | None:
        """Note that the server has failed. Return the seconds to wait before its next start, longer each time, or None
        if the server is given up.

        `last_healthy` is the clock's time at which the server was last healthy; the default is now.
        """
        if self._healthy_since is not None:
            healthy_seconds = (self._clock() if last_healthy is None else last_healthy) - self._healthy_since
            self._counted = max(0.0, self._counted - max(0.0, healthy_seconds) / self._forgiven_after_seconds)
            self._healthy_since = None
        self._counted += 1.0
        if self._counted > self._max_restarts:
            return None
        return min(_LONGEST_DELAY_SECONDS, _FIRST_DELAY_SECONDS * 2 ** (self._counted - 1))


class OpenRequests(Protocol):
    """The open requests of one server."""

    def count(self) -> int | None:
        """Return how many there are; None if the server does not say."""
        ...

    def cut_short(self) -> None:
        """Ask the server to end them all. Each answer has its tokens so far."""
        ...


def drain(
    requests: OpenRequests,
    seconds: float,
    may_wait: Callable[[float], bool],
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """Wait until no request is open, but at most `seconds`. Return what happened, in words.

    `may_wait` sleeps for the given seconds, and returns whether to go on waiting.
    """
    began, quiet_since, was_cut = clock(), None, False
    most = 0
    while True:
        count, now = requests.count(), clock()
        most = max(most, count or 0)
        if count is None:
            return "it does not say what is open"
        quiet_since = None if count else now if quiet_since is None else quiet_since
        if quiet_since is not None and now - quiet_since >= _SETTLED_SECONDS:
            how = "cut short" if was_cut else "left"
            return f"{most} open requests {how} in {now - began:.1f} s" if most else "no request was open"
        if now - began >= seconds:
            return f"{count} requests were still open after {seconds:g} s (server.drain_seconds)"
        if count and not was_cut and now - began >= _CUT_SHORT_AT * seconds:
            requests.cut_short()
            was_cut = True
        if not may_wait(_DRAIN_POLL_SECONDS):
            return f"told to end at once, with {count} requests open"


class ServerRequests:
    """`OpenRequests` of the SGLang server at `address`, over HTTP with the attempt's key."""

    def __init__(self, address: str, api_key_file: Path) -> None:
        self._host = address.removeprefix("http://")
        self._api_key_file = api_key_file

    def count(self) -> int | None:
        """Return how many requests run and wait, on all data-parallel ranks of the server."""
        try:
            loads = json.loads(self._call("GET", "/v1/loads?include=core"))["loads"]
            counts = [load[name] for load in loads for name in ("num_running_reqs", "num_waiting_reqs")]
            return sum(counts) if all(type(count) is int and count >= 0 for count in counts) else None
        except (OSError, http.client.HTTPException, ConfigError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def cut_short(self) -> None:
        try:
            self._call("POST", "/abort_request", {"rid": "", "abort_all": True})
        except (OSError, http.client.HTTPException, ConfigError):
            return  # the server is ending already; its requests fail, and continue from what they had reported

    def _call(self, method: str, path: str, body: object = None) -> bytes:
        connection = http.client.HTTPConnection(self._host, timeout=_ANSWER_SECONDS)
        try:
            headers = {"Authorization": f"Bearer {read_secret(self._api_key_file)}", "Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            return connection.getresponse().read()
        finally:
            connection.close()
