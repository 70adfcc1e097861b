"""Simulate a run as a sequence of events: ask, sample, train, publish, save, and the failures in between.

The `Admission` that real rollouts use decides which groups may start and which batch they form; `FluidServers` says how
fast servers sample. A failed trainer node ends the attempt: the run restarts from its last checkpoint, trains the steps
since then again on recorded rollouts, and samples open responses anew. Failed servers come back after a while, and
their open requests continue on other servers. Failures are independent, every node has the same mean time between
failures, and they are drawn from a random stream of their own.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from gspo_mega.rollout.admission import Admission
from gspo_mega.rollout.arrival_order import Freshness
from gspo_mega.verify.simulate.job import Job
from gspo_mega.verify.simulate.servers import Array, FluidServers, Integers, Timeline


class Breakdown(NamedTuple):
    """A node that fails or comes back. `servers`: the servers on it; empty if a trainer node fails."""

    seconds: float
    kind: str  # trainer, servers, back
    servers: tuple[int, ...] = ()


class Breakdowns:
    """The failures of a run, in order of time. `mtbf_seconds`: mean time between failures of one node; infinite for
    no failures.
    """

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
        """Remove and return the next breakdown, and draw the one that follows it."""
        found = heapq.heappop(self._coming)
        if found.kind != "back":
            self._draw(found.kind, found.seconds)
        if found.kind == "servers":
            back = Breakdown(found.seconds + self._job.server_restart, "back", found.servers)
            heapq.heappush(self._coming, back)
        return found


@dataclass
class Record:
    """What happened, in seconds. `steps`, `waits`: duration of each step and of its wait for rollouts, without saves,
    restarts and repeated steps. `redo`: duration of each step if it is trained again. `staleness`: number of trained
    tokens, indexed by how many versions they lagged behind.
    """

    steps: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    redo: list[float] = field(default_factory=list)
    tokens: float = 0.0
    staleness: Array = field(default_factory=lambda: np.zeros(1))
    elapsed: float = 0.0
    training: float = 0.0
    waiting: float = 0.0
    publishing: float = 0.0
    saving: float = 0.0
    repeated: float = 0.0
    restarting: float = 0.0
    trainer_failures: int = 0
    server_failures: int = 0
    servers_busy: float = 0.0
    sampled: float = 0.0


class RunEvents:
    """One simulated run. `mtbf_seconds`: mean time between failures of one node; infinite for no failures."""

    def __init__(self, job: Job, seed: int = 1, mtbf_seconds: float = math.inf) -> None:
        self.job, self._rng = job, np.random.default_rng(seed)
        self.record = Record(staleness=np.zeros(job.max_staleness + 1))
        self._breakdowns = Breakdowns(job, mtbf_seconds, np.random.default_rng([seed, 1]))
        self._servers = FluidServers(job.num_servers, job.slots, job.server)
        self._admission = Admission(job.groups, job.groups, Freshness(job.max_staleness), job.order)
        # A ring of rows, one per group, by its number modulo the capacity: more than can be outstanding at once.
        self._capacity = (2 * job.max_staleness + 3) * job.groups
        self._admitted = np.zeros(self._capacity, np.int64)  # the step last asked for when the group was admitted
        self._number = np.zeros(self._capacity, np.int64)
        self._open = np.zeros(self._capacity, np.int64)  # samples of the group that have not ended
        self._tokens = np.zeros((self._capacity, job.max_staleness + 1))  # by number of versions since admission
        self._length = np.zeros(self._capacity * job.group_size)
        self._now, self._saved = 0.0, 0
        self._version = self._num_ended = 0  # groups that have ended and are in no batch yet

    def run(self, seconds: float = math.inf, num_steps: int | None = None) -> Record:
        """Run until `seconds` have passed or `num_steps` are done. A step that has begun by then is completed."""
        record, step = self.record, 0
        while (num_steps is None or step < num_steps) and self._now < seconds:
            self._ask(step)
            before = (self._now, record.repeated, record.restarting)
            waited = record.waiting
            while not self._sample_and_train(step):
                self._start_again(step)
            self._publish(step)
            lost = record.repeated - before[1] + record.restarting - before[2]
            record.steps.append(self._now - before[0] - lost)
            record.waits.append(record.waiting - waited)
            step += 1
            if self.job.save_every and step % self.job.save_every == 0:
                self._pass(self.job.save, "saving")
                self._saved = step
        record.elapsed = self._now
        record.servers_busy, record.sampled = self._servers.busy, self._servers.sampled
        return record

    def _ask(self, step: int) -> None:
        job, admission = self.job, self._admission
        admission.ask(step)
        numbers = []
        while admission.may_admit():
            numbers.append(admission.admit())
        if not numbers:
            return
        if job.max_staleness == 0:
            numbers = [step * job.groups + number for number in numbers]
        rows = np.array(numbers) % self._capacity
        self._admitted[rows], self._number[rows], self._open[rows], self._tokens[rows] = (
            step,
            numbers,
            job.group_size,
            0,
        )
        samples = (rows[:, None] * job.group_size + np.arange(job.group_size)).ravel()
        self._length[samples] = job.lengths.sample(self._rng, len(samples))
        self._servers.add(samples, np.full(len(samples), float(job.prompt_tokens)), self._length[samples])

    def _sample_and_train(self, step: int) -> bool:
        """Wait for the batch and train on it. Returns False if a trainer node failed first."""
        record, left = self.record, math.inf
        batch: Integers | None = None
        while True:
            line = self._servers.timeline()
            limit = max(0.0, self._breakdowns.next_seconds - self._now)
            waited = 0.0
            if batch is None:
                batch, waited = self._form(line, limit)
                if batch is not None:
                    left = self.job.train_seconds(self._batch_tokens(batch))
            end = waited + left
            cut = min(end, limit)
            self._complete(line, cut, formed_at=waited if batch is not None else math.inf)
            self._advance(line, cut)
            record.waiting += min(cut, waited)
            record.training += cut - min(cut, waited)
            left -= cut - waited if batch is not None else 0.0
            self._now += cut
            if cut == end:
                if self.job.shared:
                    both = float(np.clip(line.finish.max(initial=0.0), waited, end)) - waited
                    self._now += both
                    record.training += both
                assert batch is not None
                self._consume(batch, step)
                return True
            if not self._meet():
                return False

    def _meet(self) -> bool:
        """Apply the breakdown that is due. Returns False if it ends the attempt."""
        found = self._breakdowns.take()
        if found.kind == "trainer":
            return False
        if found.kind == "servers":
            self.record.server_failures += 1
            self._servers.lose(np.array(found.servers))
        else:
            self._servers.come_back(np.array(found.servers))
        return True

    def _start_again(self, step: int) -> None:
        """Restart everything after a trainer node failed, and train the steps again that no checkpoint has."""
        record, job = self.record, self.job
        again = sum(record.redo[self._saved : step])
        while True:
            record.trainer_failures += 1
            begun = self._now + job.restart
            # If the trainer fails while it restarts or repeats steps, it restarts once more.
            failed = self._fails_before(begun + again)
            until = begun + again if failed is None else failed
            record.restarting += min(until, begun) - self._now
            record.repeated += max(0.0, until - begun)
            self._now = until
            if failed is None:
                break
        self._servers.begin_again(float(job.prompt_tokens), self._length)
        self._forget_open()

    def _fails_before(self, until: float) -> float | None:
        while self._breakdowns.next_seconds < until:
            found = self._breakdowns.take()
            if found.kind == "trainer":
                return found.seconds
        return None

    def _forget_open(self) -> None:
        """Keep only the tokens of ended responses, so that responses that are sampled anew are not counted twice."""
        rows = np.flatnonzero(self._open > 0)
        open_samples = self._servers.open.name
        ended = np.ones(self._capacity * self.job.group_size, bool)
        ended[open_samples] = False
        length = (self._length * ended).reshape(self._capacity, -1).sum(axis=1)
        total = self._tokens[rows].sum(axis=1)
        scale = np.divide(length[rows], total, out=np.zeros(len(rows)), where=total > 0)
        self._tokens[rows] *= scale[:, None]

    # --- a batch -----------------------------------------------------------------------------------------------

    def _form(self, line: Timeline, limit: float) -> tuple[Integers | None, float]:
        """Return (rows of the batch, seconds until it is complete); (None, `limit`) if it is not complete by then."""
        if (formed := self._admission.formed()) is not None:
            return self._rows_of(formed.kept), 0.0
        for seconds, row in self._endings(line):
            if seconds > limit:
                return None, limit
            self._end_group(row)
            # Do not ask while fewer groups than a batch have ended: asking is not free.
            if self._num_ended >= self.job.groups and (formed := self._admission.formed()) is not None:
                return self._rows_of(formed.kept), seconds
        return None, limit

    def _endings(self, line: Timeline) -> list[tuple[float, int]]:
        """Return (seconds, row) of the open groups, in the order in which they end if nothing interferes."""
        rows = self._servers.open.name // self.job.group_size
        last = np.full(self._capacity, -1.0)
        np.maximum.at(last, rows, line.finish)
        found = np.flatnonzero((last >= 0) & (self._open > 0))
        order = found[np.argsort(last[found], kind="stable")]
        return list(zip(last[order].tolist(), order.tolist()))

    def _complete(self, line: Timeline, cut: float, formed_at: float) -> None:
        """End the groups that end by `cut`, apart from those that `_form` has ended already."""
        for seconds, row in self._endings(line):
            if seconds > cut:
                return
            if self._open[row] > 0:
                self._end_group(row)

    def _end_group(self, row: int) -> None:
        self._open[row] = 0
        self._num_ended += 1
        self._admission.complete(self._name(row), True)

    def _name(self, row: int) -> int:
        number = int(self._number[row])
        return number % self.job.groups if self.job.max_staleness == 0 else number

    def _rows_of(self, numbers: tuple[int, ...]) -> Integers:
        found = np.array(numbers)
        if self.job.max_staleness == 0:
            found = found + self._admission.asked * self.job.groups
        return found % self._capacity

    def _batch_tokens(self, rows: Integers) -> float:
        """Return the number of tokens to train on, prompts included."""
        lengths = self._length.reshape(self._capacity, -1)[rows]
        return float(lengths.sum()) + lengths.size * self.job.prompt_tokens

    def _advance(self, line: Timeline, seconds: float) -> None:
        requests, sampled, _ = self._servers.advance(line, seconds)
        rows = requests.name // self.job.group_size
        np.add.at(self._tokens, (rows, self._version - self._admitted[rows]), sampled)

    def _consume(self, rows: Integers, step: int) -> None:
        formed = self._admission.formed()
        assert formed is not None
        self._admission.consume(formed)
        self._num_ended -= len(formed.kept)
        record = self.record
        record.tokens += self._batch_tokens(rows)
        record.redo.append(self.job.train_seconds(self._batch_tokens(rows)) + self.job.publish)
        for later in range(self.job.max_staleness + 1):
            lag = step - self._admitted[rows] - later
            np.add.at(record.staleness, np.maximum(lag, 0), self._tokens[rows, later])

    # --- between two steps -------------------------------------------------------------------------------------

    def _publish(self, step: int) -> None:
        queued = None
        if not self._servers.is_idle and self.job.on_publish == "wait":
            queued = self._servers.take_queued()
            line = self._servers.timeline()
            longest = float(line.finish.max(initial=0.0))
            self._complete(line, longest, math.inf)
            self._advance(line, longest)
            self._now += longest
            self.record.publishing += longest
        self._now += self.job.publish
        self.record.publishing += self.job.publish
        self._version = step + 1
        if queued is not None:
            self._servers.put_back(queued)
        elif self.job.on_publish == "continue":
            self._servers.read_again()

    def _pass(self, seconds: float, what: str) -> None:
        """Let `seconds` pass in which the trainer does something else and the servers go on; add them to `what`."""
        line = self._servers.timeline()
        self._complete(line, seconds, math.inf)
        self._advance(line, seconds)
        self._now += seconds
        setattr(self.record, what, getattr(self.record, what) + seconds)
