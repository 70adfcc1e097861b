"""A run as events: ask, sample, train, publish, save, and what fails in between.

The rollouts' own `Admission` decides which groups may start and which batch they form; `FluidServers` says how fast
servers sample. A trainer node that fails ends the attempt: the run starts again from its last checkpoint, trains the
steps since then once more on recorded rollouts, and samples anew what was open. Servers that fail come back after a
while, and their open requests go on elsewhere. Failures are independent, with one mean time between them, and are drawn
in advance from a seed.
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


@dataclass
class Record:
    """What happened, in seconds. `steps`, `waits`: of each step, without saves and failures. `redo`: what a step takes
    when it is trained again. `staleness`: trained tokens by the number of versions that they lagged behind.
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
    """One run. `mtbf_seconds`: of a node, infinite for a run without failures."""

    def __init__(self, job: Job, seed: int = 1, mtbf_seconds: float = math.inf) -> None:
        self.job, self._rng = job, np.random.default_rng(seed)
        self.record = Record(staleness=np.zeros(job.max_staleness + 1))
        self._breakdowns = Breakdowns(job, mtbf_seconds, np.random.default_rng([seed, 1]))
        self._servers = FluidServers(job.num_servers, job.slots, job.server)
        self._admission = Admission(job.groups, job.groups, Freshness(job.max_staleness), job.order)
        # Rows of groups by number, used again: more than can be outstanding at once.
        self._capacity = (2 * job.max_staleness + 3) * job.groups
        self._admitted = np.zeros(self._capacity, np.int64)  # the step that was asked for then
        self._number = np.zeros(self._capacity, np.int64)
        self._open = np.zeros(self._capacity, np.int64)  # samples that have not ended
        self._tokens = np.zeros((self._capacity, job.max_staleness + 1))  # by versions since admission
        self._length = np.zeros(self._capacity * job.group_size)
        self._now, self._saved = 0.0, 0
        self._version = self._num_ended = 0  # of groups that have ended and are in no batch yet

    def run(self, seconds: float = math.inf, num_steps: int | None = None) -> Record:
        """Run for so long, or for so many steps. The last step is one that ended in time."""
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
        """Wait for the batch and train it. False where a node of the trainer failed before that was done."""
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
        """The breakdown that is due. False where it ends the attempt."""
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
        """A node of the trainer failed: everything is started anew and trains what no checkpoint has."""
        record, job = self.record, self.job
        again = sum(record.redo[self._saved : step])
        while True:
            record.trainer_failures += 1
            begun = self._now + job.restart
            # A failure of the trainer while it starts or repeats begins that anew.
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
        """Tokens of responses that are sampled anew are not counted twice: what is kept is what has ended."""
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
        """(rows of the batch, seconds until it is complete); (None, `limit`) where something fails before."""
        if (formed := self._admission.formed()) is not None:
            return self._rows_of(formed.kept), 0.0
        for seconds, row in self._endings(line):
            if seconds > limit:
                return None, limit
            self._end_group(row)
            # Fewer than a batch cannot be one; asking is not free.
            if self._num_ended >= self.job.groups and (formed := self._admission.formed()) is not None:
                return self._rows_of(formed.kept), seconds
        return None, limit

    def _endings(self, line: Timeline) -> list[tuple[float, int]]:
        """(seconds, row) of the groups that end, in their order, if nothing interferes."""
        rows = self._servers.open.name // self.job.group_size
        last = np.full(self._capacity, -1.0)
        np.maximum.at(last, rows, line.finish)
        found = np.flatnonzero((last >= 0) & (self._open > 0))
        order = found[np.argsort(last[found], kind="stable")]
        return list(zip(last[order].tolist(), order.tolist()))

    def _complete(self, line: Timeline, cut: float, formed_at: float) -> None:
        """Groups that end until `cut`, behind those that formed the batch."""
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
        """Tokens to train on, prompts included."""
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
        """The trainer does something else; servers go on."""
        line = self._servers.timeline()
        self._complete(line, seconds, math.inf)
        self._advance(line, seconds)
        self._now += seconds
        setattr(self.record, what, getattr(self.record, what) + seconds)
