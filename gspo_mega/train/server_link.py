"""The ranks' link to the servers: wait for them, publish weights to them, bring those that came back up to date.

Owns these collective acts and what follows when servers fail in them. Sending weights is `gspo_mega.checkpoint`',
knowing the servers the pool's. A run that trains on a record has the `NoServers` link.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from gspo_mega.base import beats, kill_points
from gspo_mega.base.errors import PublishError
from gspo_mega.config.on_publish import on_publish
from gspo_mega.config.schema import Rollout, Server
from gspo_mega.rollout.client.server_control import HttpServerControl
from gspo_mega.sync.publish import Publisher, PublishResult
from gspo_mega.train.lead import Lead
from gspo_mega.train.phases import Phases
from gspo_mega.train.publish_pause import Pause, paused
from gspo_mega.train.rank_link import RankLink
from gspo_mega.train.shared_gpus import Gpus
from gspo_mega.train.stop import StopRequested

# A server that could not take the committed weights is tried again after this time.
CATCH_UP_PAUSE_SECONDS = 5.0
# The pool notices a dead server within this time.
DEATH_NOTICE_SECONDS = 5.0
_PUBLISH_AGAIN = "publish_again"


class ServerLink(Protocol):
    """One on every rank."""

    def wait(self) -> str | None:
        """Wait until every server of the run is up. Returns the reason where a stop was asked for meanwhile.
        Collective.
        """
        ...

    def publish(self, weight_version: int) -> PublishResult | None:
        """Send the engine's weights to all servers as `weight_version`; None where the run has no servers. Collective.

        Raises FolderError on rank 0 where another start of the run holds its folder.
        """
        ...

    def catch_up(self) -> None:
        """Rank 0, while the other ranks wait for it: publish the committed weights to servers that came back."""
        ...

    def metrics(self) -> dict[str, float]:
        """Rank 0: the metrics of the servers."""
        ...


class NoServers:
    """The link of a run that trains on a record."""

    def __init__(self, lead: Lead | None) -> None:
        self._lead = lead

    def wait(self) -> str | None:
        beats.enter("other")  # the start is over
        return None

    def publish(self, weight_version: int) -> PublishResult | None:
        if self._lead is not None:
            self._lead.check_held()
        return None

    def catch_up(self) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {}


class LiveServers:
    """The link of a run that samples."""

    def __init__(
        self,
        server: Server,
        rollout: Rollout,
        publisher: Publisher,
        ranks: RankLink,
        lead: Lead | None,
        phases: Phases,
        gpus: Gpus,
    ) -> None:
        self._server, self._rollout = server, rollout
        self._publisher, self._ranks, self._lead, self._phases = publisher, ranks, lead, phases
        self._gpus = gpus
        self._committed_version = 0
        self._catch_up_after = 0.0
        self.pause = Pause()
        ranks.on_request(_PUBLISH_AGAIN, lambda: self._publish_again([]))

    def wait(self) -> str | None:
        stop = None
        self._gpus.turn("sample")  # they start now, where they share the ranks' GPUs
        if self._lead is not None:
            # Servers have a deadline of their own to start in.
            deadline_seconds = self._server.start_deadline_seconds * (1 + self._server.max_restarts)
            try:
                self._lead.rollouts.pool.wait_ready(self._server.num_servers, deadline_seconds, self._on_wait_for_start)
                self._publisher.check_servers(self._lead.attempt.software_dir)
            except StopRequested as request:
                stop = str(request)
        stop = self._ranks.agree(stop)
        beats.enter("other")  # the start is over
        return stop

    def _on_wait_for_start(self) -> None:
        beats.beat()
        if self._lead is not None:
            self._lead.check_stop()

    def publish(self, weight_version: int) -> PublishResult | None:
        """As `ServerLink.publish`.

        Waits while all servers are being restarted, and begins again when all of them died meanwhile. A server that
        fails otherwise gets no work until it holds a committed version. Raises PublishError on every rank when no
        server is left, RolloutError when none comes back.
        """
        if self._lead is not None:
            self._lead.check_held()
        with self._phases.phase("publish"), self._pause():
            result = None
            while result is None:
                beats.beat()
                self._gpus.turn("publish")
                servers = self._servers_up()
                try:
                    result = self._publisher.publish(
                        weight_version, servers, self._announce, on_publish(self._rollout) == "continue_with_cache"
                    )
                except PublishError as error:
                    # Every rank is here, with the same error. Each round costs all servers a restart, so
                    # server.max_restarts ends it.
                    if not self._ranks.agree(self._are_gone(servers)):
                        raise
                    self._say(f"warning  {error}\nwarning  published again as soon as a server is back")
            self._commit(result)
        return result

    @contextlib.contextmanager
    def _pause(self) -> Iterator[None]:
        """Rank 0: while the block publishes, no request begins, and what is open does as `rollout.on_publish` says."""
        if self._lead is None:
            self._ranks.agree(None)  # open requests may take longer than a collective may
            yield
            return
        mode, pool = on_publish(self._rollout), self._lead.rollouts.pool
        with paused(pool, mode, self._on_wait_for_open) as pause:
            kill_points.reached("publish.paused")
            self.pause = pause
            self._ranks.agree(None)
            yield

    def _on_wait_for_open(self) -> bool:
        """Whether open requests are to end now, because a stop was asked for. The publish itself goes on: the step's
        weights are checkpointed behind it.
        """
        beats.beat()
        return self._lead is not None and self._lead.stop_request.check() is not None

    def catch_up(self) -> None:
        assert self._lead is not None
        behind = self._lead.rollouts.pool.servers_behind()
        if behind and time.monotonic() >= self._catch_up_after:
            self._ranks.request(_PUBLISH_AGAIN)
            self._publish_again(behind)

    def metrics(self) -> dict[str, float]:
        assert self._lead is not None
        return {
            "rollout/num_servers_given_up": self._lead.rollouts.pool.num_given_up,
            "publish/num_open_requests": self.pause.num_open,
            "publish/pause_seconds": self.pause.seconds,
            **self._gpus.take_metrics(),
        }

    def _servers_up(self) -> list[HttpServerControl]:
        """Rank 0: all servers that are up, at least one; elsewhere none."""
        if self._lead is None:
            return []
        pool = self._lead.rollouts.pool
        pool.wait_ready(1, self._rollout.no_server_deadline_seconds)
        return pool.controls()

    def _are_gone(self, servers: Sequence[HttpServerControl]) -> bool:
        """Rank 0: whether no server of these generations runs any more, once their deaths could be noticed."""
        if self._lead is None or not servers:
            return False
        tried, deadline = _generations(servers), time.monotonic() + DEATH_NOTICE_SECONDS
        while tried & _generations(self._lead.rollouts.pool.controls()):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def _announce(self, weight_version: int) -> None:
        """Rank 0: the version is committed, and servers are about to serve it."""
        assert self._lead is not None
        self._lead.rollouts.pool.announce(weight_version)

    def _commit(self, result: PublishResult) -> None:
        self._committed_version = result.weight_version
        if self._lead is not None:
            self._lead.rollouts.pool.commit(result.weight_version, result.verified)
            for server, why in result.failed.items():
                self._say(
                    f"warning  {server} does not hold weight version {result.weight_version} and gets no work until it"
                    f" does: {why}"
                )

    def _publish_again(self, servers: Sequence[HttpServerControl]) -> None:
        """Send the committed weights once more, to servers that came back (known on rank 0). Collective."""
        result = self._publisher.publish_again(self._committed_version, servers)
        self._commit(result)
        if result.failed:
            self._catch_up_after = time.monotonic() + CATCH_UP_PAUSE_SECONDS

    def _say(self, line: str) -> None:
        if self._lead is not None:
            self._lead.console(line)


def _generations(servers: Sequence[HttpServerControl]) -> set[tuple[str, int]]:
    return {(server.server_id, server.generation) for server in servers}


def local_address(server_host: str) -> str:
    """This machine's address as a server bound to `server_host` reaches it: the source address of a connection to
    there.
    """
    family, kind, _, _, there = socket.getaddrinfo(server_host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(there)  # a datagram socket sends nothing on connect
        return probe.getsockname()[0]
