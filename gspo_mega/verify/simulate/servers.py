"""Servers with continuous batching, as fluids: between two events every running request of a server advances at the
same rate, one token per decode step.

A server's clock counts decode steps. In that clock a schedule does not depend on how long a decode step takes: a
request starts when a slot is free, first come, first served, and ends as many steps later as it has tokens. Seconds
follow by adding up what the decode steps between events cost, at the number of requests and cached tokens they have;
the plan's figures (bytes, FLOPs, shares of peak) give that cost. Nothing is simulated token by token.

Approximations: a fixed number of slots stands for the cache (no request is put back when it fills); reading a prompt
stops its server's decoding for as long as it takes; requests are divided when they arrive and stay.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gspo_mega.config.schema import Config
from gspo_mega.models.spec import ModelSpec
from gspo_mega.models.tensors import ParameterCounts
from gspo_mega.plan.gpus import MATRIX_SHARE, MEMORY_SHARE, Gpu
from gspo_mega.plan.memory import server_memory
from gspo_mega.plan.timing import between_nodes

Array = NDArray[np.float64]


@dataclass(frozen=True)
class DecodeCost:
    """A decode step of one server: it reads the weights that its requests need and the cache of its sequences, or
    computes, whichever is longer; `fixed` seconds go to each step beside that.

    `weights`: seconds to read them all. `unread`: share of the experts that one token does not go to, 0 without
    experts.
    `cached`: seconds per cached token. `computed`: seconds of computation per request. `sent`: seconds per request
    between the nodes of a server.
    """

    weights: float
    cached: float
    computed: float
    unread: float = 0.0
    fixed: float = 0.0
    sent: float = 0.0

    def seconds(self, num_requests: Array, num_tokens: Array) -> Array:
        """Of one decode step with `num_requests` sequences that hold `num_tokens` tokens together."""
        read = self.weights * (1.0 - self.unread**num_requests) + self.cached * num_tokens
        return self.fixed + self.sent * num_requests + np.maximum(read, self.computed * num_requests)

    def scaled(self, factor: float) -> DecodeCost:
        return DecodeCost(
            self.weights * factor,
            self.cached * factor,
            self.computed * factor,
            self.unread,
            self.fixed * factor,
            self.sent * factor,
        )


@dataclass(frozen=True)
class ServerCost:
    """`prefill`: seconds per token that is read in. `cache_tokens`: that one server holds. `most_requests`: that may be
    open on one server.
    """

    decode: DecodeCost
    prefill: float
    cache_tokens: float
    most_requests: int

    def slots(self, held_tokens: float) -> int:
        """Requests that run at once on one server where each holds `held_tokens` on average."""
        return max(1, min(self.most_requests, int(self.cache_tokens / max(1.0, held_tokens))))

    def scaled(self, factor: float) -> ServerCost:
        return ServerCost(self.decode.scaled(factor), self.prefill * factor, self.cache_tokens, self.most_requests)


def server_cost(config: Config, spec: ModelSpec, gpu: Gpu, counts: ParameterCounts) -> ServerCost:
    """One server of the configuration on GPUs of this kind."""
    tensor = config.server.tensor
    memory = server_memory(config, spec, counts.total, int(gpu.memory_gib * 2**30))
    bandwidth = MEMORY_SHARE * gpu.memory_bytes_per_second
    token = 2 * counts.active / tensor / (MATRIX_SHARE["bf16"] * gpu.bf16_flops)
    unread = 0.0 if spec.moe is None else 1 - spec.moe.experts_per_token / spec.moe.num_experts
    fixed, sent = between_nodes(config, spec, gpu)
    decode = DecodeCost(
        weights=memory.weights / bandwidth,
        cached=memory.cache / max(1, memory.cache_tokens) / bandwidth,
        computed=token,
        unread=unread,
        fixed=fixed,
        sent=sent,
    )
    return ServerCost(decode, token, float(memory.cache_tokens), config.rollout.max_concurrent_requests)


Integers = NDArray[np.int64]
_END = 1e-9


@dataclass
class Requests:
    """Requests in flight. `name`: the caller's number. `held`: tokens in the cache when it starts. `start`, `finish`:
    in decode steps of its server's clock; what is between them is still to be sampled at the start.
    """

    name: Integers
    server: Integers
    held: Array
    start: Array
    finish: Array

    def __len__(self) -> int:
        return len(self.name)

    def take(self, which: NDArray[np.bool_]) -> Requests:
        return Requests(self.name[which], self.server[which], self.held[which], self.start[which], self.finish[which])

    @staticmethod
    def none() -> Requests:
        whole, real = np.zeros(0, np.int64), np.zeros(0)
        return Requests(whole, whole, real, real, real)

    def plus(self, other: Requests) -> Requests:
        return Requests(
            np.concatenate([self.name, other.name]),
            np.concatenate([self.server, other.server]),
            np.concatenate([self.held, other.held]),
            np.concatenate([self.start, other.start]),
            np.concatenate([self.finish, other.finish]),
        )


@dataclass(frozen=True)
class Timeline:
    """What happens from now on if nothing interferes. `finish`: seconds until each request ends. The rest are the
    events in order of server and time: seconds from now, the same when what the event makes the server read has been
    read, decode steps from now, and where each server's events begin.
    """

    finish: Array
    seconds: Array
    decoding: Array
    steps: Array
    first: Integers


class FluidServers:
    """`num_servers` equal servers with `slots` requests running at once on each.

    Attributes:
        busy: seconds in which a server had something to do, summed over servers.
        sampled: tokens sampled.
    """

    def __init__(self, num_servers: int, slots: int, cost: ServerCost) -> None:
        self.num, self.slots, self.cost = num_servers, slots, cost
        self.clock = np.zeros(num_servers)
        self.is_up = np.ones(num_servers, bool)
        self.open = Requests.none()
        self.busy = self.sampled = 0.0
        self._free: list[list[float]] = [[0.0] * slots for _ in range(num_servers)]
        self._stall = np.zeros(num_servers)  # seconds that go by before the next decode step
        self._homeless: list[tuple[Integers, Array, Array]] = []  # while no server is up

    def add(self, name: Integers, held: Array, tokens: Array) -> None:
        """Requests arrive, in this order: each goes to a server with the fewest open ones."""
        if not self.is_up.any():
            self._homeless.append((name, held, tokens))
            return
        self._put(name, self._divide(len(name)), held, tokens)

    def _divide(self, number: int) -> Integers:
        """The servers of `number` new requests: so that all servers have equally many open, as far as that goes."""
        up = np.flatnonzero(self.is_up)
        load = np.bincount(self.open.server, minlength=self.num)[up]
        order = np.argsort(load, kind="stable")
        ranked = load[order]
        # The first j servers, filled to the level of the next one, take this many.
        room = ranked * np.arange(1, len(up) + 1) - np.cumsum(ranked)
        used = int(np.searchsorted(room, number, side="right"))
        level, rest = divmod(number + int(ranked[:used].sum()), used)
        more = level + (np.arange(used) < rest) - ranked[:used]
        turn = np.arange(number) - np.repeat(np.cumsum(more) - more, more)
        return np.repeat(up[order[:used]], more)[np.argsort(turn, kind="stable")]

    def _put(self, name: Integers, server: Integers, held: Array, tokens: Array) -> None:
        start = np.empty(len(name))
        clock, free = self.clock.tolist(), self._free
        for index, (place, length) in enumerate(zip(server.tolist(), tokens.tolist())):
            slots, now = free[place], clock[place]
            begin = slots[0] if slots[0] > now else now
            heapq.heapreplace(slots, begin + length)
            start[index] = begin
        self.open = self.open.plus(Requests(name, server, held.astype(float), start, start + tokens))

    def timeline(self) -> Timeline:
        """When each open request ends if nothing interferes."""
        requests = self.open
        count = len(requests)
        offset = self.clock[requests.server]
        begun = requests.start - offset  # below 0: it runs
        where = np.concatenate([requests.server, requests.server])
        at = np.maximum(np.concatenate([requests.finish - offset, begun]), 0.0)
        change = np.ones(2 * count)
        change[:count] = -1.0
        base = np.tile(requests.held - begun, 2) * change
        # Where a slot is handed over, the end comes before the start.
        order = np.argsort(where * (at.max(initial=0.0) + 1.0) + at, kind="stable")
        where, at = where[order], at[order]
        running = np.maximum(np.cumsum(change[order]), 0.0)
        first = np.searchsorted(where, np.arange(self.num + 1))
        span = np.zeros(2 * count)
        span[:-1] = np.where(where[1:] == where[:-1], at[1:] - at[:-1], 0.0)
        cached = running * (at + span / 2) + np.cumsum(base[order])
        read = np.zeros(2 * count)
        read[count:] = np.where(begun >= 0, requests.held * self.cost.prefill, 0.0)
        read = read[order]
        has = first[:-1] < first[1:]
        read[first[:-1][has]] += self._stall[has]
        after = np.cumsum(read + span * self.cost.decode.seconds(running, cached))
        # A server's own seconds begin at 0; an event happens before what follows it takes.
        before = np.concatenate([[0.0], after[:-1]])[: 2 * count]
        seconds = before - np.repeat(before[first[:-1][has]], np.diff(first)[has])
        finish = np.empty(2 * count)
        finish[order] = seconds
        return Timeline(finish[:count], seconds, seconds + read, at, first)

    def advance(self, line: Timeline, seconds: float) -> tuple[Requests, Array, Requests]:
        """Let `seconds` pass. Returns the requests that were open, how many tokens each sampled in that time, and those
        of them that ended.
        """
        requests, first = self.open, line.first
        steps = np.zeros(self.num)
        times, reached = np.column_stack([line.seconds, line.decoding]).ravel(), np.repeat(line.steps, 2)
        for server in np.flatnonzero(first[:-1] < first[1:]):
            part = slice(2 * first[server], 2 * first[server + 1])
            steps[server] = np.interp(seconds, times[part], reached[part])
        last = np.zeros(self.num)
        some = first[:-1] < first[1:]
        last[some] = line.seconds[first[1:][some] - 1]
        self.busy += float(np.minimum(last, seconds).sum())
        self._stall = np.maximum(0.0, self._stall - seconds)
        clock = self.clock + steps
        now = clock[requests.server]
        sampled = np.clip(now - np.maximum(requests.start, self.clock[requests.server]), 0.0, None)
        ended = line.finish <= seconds
        sampled = np.where(ended, requests.finish - np.maximum(requests.start, self.clock[requests.server]), sampled)
        # A server that has ended all its requests is where the last one ended.
        np.maximum.at(clock, requests.server[ended], requests.finish[ended])
        self.clock = clock
        self.sampled += float(sampled.sum())
        self.open = requests.take(~ended)
        return requests, sampled, requests.take(ended)

    @property
    def is_idle(self) -> bool:
        return not len(self.open) and not self._homeless

    def read_again(self) -> None:
        """Running requests end with their tokens so far and go on where they are: these are read once more."""
        requests = self.open
        now = self.clock[requests.server]
        running = requests.start <= now
        held = (requests.held + now - requests.start)[running]
        self._stall += np.bincount(requests.server[running], held * self.cost.prefill, minlength=self.num)

    def take_queued(self) -> Requests:
        """Take away the requests that have not started."""
        queued = self.open.start > self.clock[self.open.server] + _END
        taken = self.open.take(queued)
        self.open = self.open.take(~queued)
        for server in np.unique(taken.server):
            self._set_slots(int(server))
        return taken

    def put_back(self, taken: Requests) -> None:
        self._put(taken.name, taken.server, taken.held, taken.finish - taken.start)

    def _set_slots(self, server: int) -> None:
        ends = self.open.finish[self.open.server == server].tolist()
        self._free[server] = ends + [float(self.clock[server])] * (self.slots - len(ends))
        heapq.heapify(self._free[server])

    def lose(self, servers: Integers) -> None:
        """Servers are gone: what was open there goes on elsewhere, where its tokens so far are read first."""
        self.is_up[servers] = False
        gone = np.isin(self.open.server, servers)
        moved, self.open = self.open.take(gone), self.open.take(~gone)
        sampled = np.clip(self.clock[moved.server] - moved.start, 0.0, None)
        for server in servers.tolist():
            self._set_slots(server)
        self._stall[servers] = 0.0
        self.add(moved.name, moved.held + sampled, moved.finish - moved.start - sampled)

    def come_back(self, servers: Integers) -> None:
        """Servers may take requests again."""
        self.is_up[servers] = True
        waiting, self._homeless = self._homeless, []
        for name, held, tokens in waiting:
            self.add(name, held, tokens)

    def begin_again(self, held: float, tokens: Array) -> None:
        """All servers are started anew: every open request is sampled from its prompt of `held` tokens on. `tokens`: of
        each response, by name.
        """
        names = np.concatenate([self.open.name, *(name for name, _, _ in self._homeless)])
        self.open, self._homeless = Requests.none(), []
        self.is_up[:] = True
        self._stall[:] = 0.0
        self._free = [[float(now)] * self.slots for now in self.clock]
        if len(names):
            self.add(names, np.full(len(names), held), tokens[names])
