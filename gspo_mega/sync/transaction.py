"""One publish as rank 0 leads it: pause -> send -> prove -> verify -> commit -> resume.

A server that fails one step takes no further part, while the others go on. `publish.py` handles ranks and collectives,
and passes in how weights are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from gspo_mega.base import failpoints
from gspo_mega.sync.hashes import skipped
from gspo_mega.sync.servers import Deadline, Fleet, ServerControl
from gspo_mega.sync.verify import (
    Baseline,
    ServerTensors,
    check_replicas,
    check_tensors,
    read_reports,
    verified_only,
)

Send = Callable[[Fleet, list[ServerControl]], None]


@dataclass
class PublishContent:
    """The content of a publish.

    With `verify: tensors`, `expected` has the checksums that a server must report, by the server's tensor names. With
    `verify: replicas`, `digests` has the trainer's checksums, by checkpoint name. The other one is None. A publish that
    hashes what it sends fills them in after its first send.

    `chosen` has the names of the server's tensors that are verified; None for all.
    """

    weight_version: int
    expected: dict[str, str] | None = None
    digests: dict[str, str] | None = None
    chosen: frozenset[str] | None = None


@dataclass
class PublishMemory:
    """Rank 0's state between publishes.

    `proved` has the generation of each server for which an update is known to reach every tensor. `current` has
    (server_id, generation) of the servers that hold the committed version, as far as it was verified. `committed` and
    `baseline` are those of the last verified publish.
    """

    proved: dict[str, int] = field(default_factory=dict)
    current: set[tuple[str, int]] = field(default_factory=set)
    committed: PublishContent | None = None
    baseline: Baseline = field(default_factory=Baseline)


class Transaction:
    """Brings servers to `content`.

    `tensors` are the tensors that a server holds. `send` updates servers in full; servers that fail leave the fleet.
    """

    def __init__(
        self,
        tensors: ServerTensors,
        memory: PublishMemory,
        content: PublishContent,
        deadline: Deadline,
        send: Send,
        keeps_requests: bool = False,
    ) -> None:
        """`keeps_requests`: open requests stand still during the publish and then go on over their cache."""
        self._tensors = tensors
        self._memory = memory
        self._content = content
        self._deadline = deadline
        self._send = send
        self._keeps_requests = keeps_requests
        self.phase_seconds = {"prepare": deadline.passed()}

    def run(
        self, servers: Sequence[ServerControl], commit: Callable[[], None]
    ) -> tuple[tuple[tuple[str, int], ...], dict[str, str]]:
        """Publish to `servers`. Returns (server_id, generation) of those that serve the verified content, and the
        reasons why the others do not.

        `commit` is called once, when some server holds the verified content and before any serves it. Servers that fail
        stay paused. Raises the errors of `commit`.
        """
        fleet = Fleet(servers, self._deadline)
        generations = {s.server_id: s.generation for s in servers}
        try:
            with self._phase("pause"):
                if self._keeps_requests:
                    fleet.each(lambda s, left: s.pause_in_place(deadline_seconds=left))
                else:
                    fleet.each(lambda s, left: s.pause(deadline_seconds=left))
            with self._phase("send"):
                self._update(fleet, fleet.active)
            with self._phase("prove"):
                self._prove(fleet, generations)
            with self._phase("verify"):
                baseline = self._verify(fleet)
            with self._phase("commit"):
                if fleet.active:
                    commit()
                    failpoints.reached("publish.committed")
                    self._memory.committed, self._memory.baseline = self._content, baseline
            with self._phase("resume"):
                fleet.each(lambda s, left: s.resume(deadline_seconds=left))
        finally:
            fleet.close()
        return tuple((s.server_id, generations[s.server_id]) for s in fleet.active), fleet.failed

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Measure a phase from the end of the one before it to its own end."""
        yield
        self.phase_seconds[name] = self._deadline.passed() - sum(self.phase_seconds.values())

    def _update(self, fleet: Fleet, servers: list[ServerControl]) -> None:
        if servers:
            self._send(fleet, servers)
            if not self._keeps_requests:
                # The new weights must not continue from the old weights' cache.
                fleet.each(lambda s, left: s.flush_cache(deadline_seconds=left), servers)

    def _prove(self, fleet: Fleet, generations: dict[str, int]) -> None:
        """Once per server start, destroy every tensor, send the same weights again, and compare with before.

        A tensor that updates do not reach stays random, so this check does not need to know the server's checksums.
        """
        new = [s for s in fleet.active if self._memory.proved.get(s.server_id) != generations[s.server_id]]
        fleet.each(lambda s, left: s.snapshot(deadline_seconds=left), new)
        fleet.each(lambda s, left: s.reset_tensors(deadline_seconds=left), new)
        self._update(fleet, [s for s in new if s in fleet.active])
        for server_id in fleet.each(lambda s, left: s.compare(deadline_seconds=left), new):
            self._memory.proved[server_id] = generations[server_id]

    def _verify(self, fleet: Fleet) -> Baseline:
        content, chosen = self._content, self._content.chosen
        skip = [] if chosen is None else skipped(self._tensors.expected, chosen)
        reports = read_reports(fleet, content.weight_version, skip)
        if chosen is not None:
            reports = verified_only(reports, self._tensors, chosen)
        if content.expected is not None:
            expected = {n: value for n, value in content.expected.items() if chosen is None or n in chosen}
            check_tensors(fleet, reports, expected)
            return self._memory.baseline
        return check_replicas(fleet, self._tensors, reports, content.digests or {}, self._memory.baseline, chosen)
