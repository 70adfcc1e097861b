"""When machines fail: independent failures with one mean time between them, drawn beforehand by a seed."""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple

import numpy as np

from gspo_mega.verify.simulate.job import Job


class Breakdown(NamedTuple):
    """`servers`: those that fail or come back; none where a node of the trainer fails."""

    seconds: float
    kind: str  # trainer, servers, back
    servers: tuple[int, ...] = ()


class Breakdowns:
    """`mtbf_seconds`: of one node; infinite for none."""

    def __init__(self, job: Job, mtbf_seconds: float, rng: np.random.Generator) -> None:
        self._job, self._mtbf, self._rng = job, mtbf_seconds, rng
        self._coming: list[Breakdown] = []
        if math.isfinite(mtbf_seconds):
            self._draw("trainer", 0.0)
            self._draw("servers", 0.0)

    def _draw(self, kind: str, now: float) -> None:
        nodes = self._job.trainer_nodes if kind == "trainer" else self._job.server_nodes
        if nodes:
            at = now + float(self._rng.exponential(self._mtbf / nodes))
            first = int(self._rng.integers(nodes)) // self._job.nodes_per_server * self._job.servers_of
            servers = range(first, min(first + self._job.servers_of, self._job.num_servers))
            heapq.heappush(self._coming, Breakdown(at, kind, tuple(servers) if kind == "servers" else ()))

    @property
    def next_seconds(self) -> float:
        return self._coming[0].seconds if self._coming else math.inf

    def take(self) -> Breakdown:
        """The next one, which has happened."""
        found = heapq.heappop(self._coming)
        if found.kind != "back":
            self._draw(found.kind, found.seconds)
        if found.kind == "servers":
            back = Breakdown(found.seconds + self._job.server_restart, "back", found.servers)
            heapq.heappush(self._coming, back)
        return found

    def pass_over(self, until: float) -> int:
        """Everything before `until` meets a job that is being started anyway. Returns how many nodes of the trainer
        failed in that time.
        """
        count = 0
        while self.next_seconds <= until:
            count += self.take().kind == "trainer"
        return count
