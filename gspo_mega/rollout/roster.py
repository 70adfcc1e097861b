"""The servers' registrations as the pool reads them repeatedly: which servers exist, and which have a live heartbeat.

Owns how failures of the file system are treated: a file that cannot be read changes nothing. Its last content holds
until its heartbeat is too old.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path

from gspo_mega.base.errors import RolloutError
from gspo_mega.rollout.registration import Registration, State, read_registrations

logger = logging.getLogger(__name__)

STALE_SECONDS = 60.0
"""A server whose heartbeat has not changed for this time gets no work."""


class Roster:
    """Call `read` from one thread at a time.

    Attributes:
        registrations: the latest registration of every server.
        num_errors: how many reads of a file failed in the file system.
        last_error: what the latest `read` could not read, or None.
    """

    def __init__(self, servers_dir: Path) -> None:
        self._servers_dir = servers_dir
        # By server: its latest heartbeat, and our monotonic time when that heartbeat was first seen.
        self._heartbeats: dict[str, tuple[float, float]] = {}
        self._logged_errors: set[tuple[str, str]] = set()
        self.registrations: list[Registration] = []
        self.num_errors = 0
        self.last_error: str | None = None

    def read(self) -> list[Registration]:
        """Read all files; returns the ready and the draining servers with a live heartbeat. Raises RolloutError for a
        file that is no registration.
        """
        errors: dict[Path, OSError] = {}
        try:
            found = read_registrations(self._servers_dir, on_error=errors.__setitem__)
        except OSError as error:  # the folder itself cannot be read
            errors[self._servers_dir] = error
            found = list(self.registrations)
        unread = {path.stem for path in errors}
        found += [r for r in self.registrations if r.server_id in unread and r not in found]
        self._note(errors)
        self.registrations = sorted(found, key=lambda r: r.server_id)
        return [r for r in self.registrations if self._is_alive(r) and r.state in ("ready", "draining")]

    def num_in(self, *states: State) -> int:
        """Servers whose latest registration says one of these states."""
        return sum(registration.state in states for registration in self.registrations)

    @property
    def num_not_coming(self) -> int:
        """Servers that nobody waits for: they gave up, end, or were stopped."""
        return self.num_in("failed", "draining", "stopped")

    def silent_seconds(self, server_id: str) -> float:
        """Seconds since the server's heartbeat last changed."""
        return time.monotonic() - self._heartbeats[server_id][1]

    def _note(self, errors: dict[Path, OSError]) -> None:
        self.num_errors += len(errors)
        self.last_error = None
        for path, error in errors.items():
            text = f"{path}: cannot be read: {error.strerror or error}"
            self.last_error = text
            if (str(path), text) not in self._logged_errors:  # once, not every quarter of a second
                self._logged_errors.add((str(path), text))
                logger.warning("%s; tried again until it can be", text)
        self._logged_errors = {(path, text) for path, text in self._logged_errors if Path(path) in errors}

    def _is_alive(self, registration: Registration) -> bool:
        """Whether the server's heartbeat still changes, by our own monotonic time: the clocks of two machines differ,
        and a clock may be set. Only a heartbeat that is seen for the first time is compared with the system clock.
        """
        now, beat = time.monotonic(), registration.heartbeat
        last = self._heartbeats.get(registration.server_id, (beat, now - max(0.0, time.time() - beat)))
        self._heartbeats[registration.server_id] = last if last[0] == beat else (beat, now)
        return now - self._heartbeats[registration.server_id][1] < STALE_SECONDS


class ReadyDeadline:
    """When servers must be ready: so many seconds from now, and anew from each progress of a copy that they wait for,
    its end included. Nothing else that servers do is progress.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._since = seconds, time.monotonic()
        self._done: dict[str, int] = {}
        self._preparing: set[str] = set()

    def is_over(self, registrations: list[Registration]) -> bool:
        """Whether it has passed, of servers that are registered so now."""
        preparing = {r.server_id: r.done_bytes for r in registrations if r.is_preparing}
        begun = {r.server_id for r in registrations if r.state in ("waiting", "starting", "ready")} - preparing.keys()
        grown = {server_id: done for server_id, done in preparing.items() if done > self._done.get(server_id, 0)}
        if grown or begun & self._preparing:
            self._since = time.monotonic()
        self._done, self._preparing = self._done | grown, set(preparing)
        return time.monotonic() - self._since > self._seconds


def describe_servers(roster: Roster, servers_dir: Path, held: Mapping[str, int | None], committed_version: int) -> str:
    """What is known of every server, for an error message. `held`: the version that each one in reach holds."""
    unread = f"; {roster.last_error}" if roster.last_error else ""
    if not roster.registrations:
        return f"none is registered in {servers_dir}{unread}"

    def one(registration: Registration) -> str:
        server_id = registration.server_id
        if server_id in held:
            what = f"holds version {held[server_id]} of {committed_version}"
        else:
            what = f"last heard of {roster.silent_seconds(server_id):.0f} s ago"
        what = f"waits for {registration.preparation}, {what}" if registration.is_preparing else what
        error = f" ({registration.error})" if registration.error else ""
        return f"{server_id}: {registration.state}, {what}{error}"

    return "; ".join(map(one, roster.registrations)) + unread


def failed_servers(failed: list[Registration]) -> str:
    """Why each of these servers is not started again, a line each."""
    return "\n".join(f"{r.server_id} gave up: {r.error}" for r in failed)


def watch_problem(error: BaseException | None) -> RolloutError | None:
    """What requests raise once the pool's watch has ended with `error`; None where it ended in order."""
    if error is None or isinstance(error, RolloutError):
        return error
    logger.error("the watch over the servers ended", exc_info=error)
    problem = RolloutError(f"the watch over the servers ended: {type(error).__name__}: {error}")
    problem.__cause__ = error
    return problem
