"""A fluid model of servers with continuous batching: between two events every running request of a server advances at
the same rate, one token per decode step.

A server's clock counts decode steps. In that clock a schedule does not depend on how long a decode step takes: a
request starts when a slot is free, first come, first served, and ends as many steps later as it has tokens. Seconds
are the sum of what the decode steps between events cost, at their number of requests and cached tokens; the plan's
figures (bytes, FLOPs, shares of peak) give that cost. Nothing is simulated token by token.

Approximations: a fixed number of slots stands for the KV cache (no request is preempted when it fills); prefill stops
its server's decoding for as long as it takes; requests are assigned to a server when they arrive and stay there.
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
    """The cost of a decode step of one server: the time to read the weights that its requests need and the KV cache of
    its sequences, or the time to compute, whichever is longer, plus `fixed` seconds and the communication.

    `weights`: seconds to read all weights. `unread`: share of the experts that one token does not go to, 0 without
    experts. `cached`: seconds per cached token. `computed`: seconds of computation per request. `sent`: seconds per
    request of communication between the nodes of a server.
    """

    weights: float
    cached: float
    computed: float
    unread: float = 0.0
    fixed: float = 0.0
    sent: float = 0.0

    def seconds(self, num_requests: Array, num_tokens: Array) -> Array:
        """Return the seconds of one decode step with `num_requests` sequences that hold `num_tokens` tokens in all."""
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
    """`prefill`: seconds per token of prefill. `cache_tokens`: tokens that one server's cache holds. `most_requests`:
    requests that may be open on one server.
    """

    decode: DecodeCost
    prefill: float
    cache_tokens: float
    most_requests: int

    def slots(self, held_tokens: float) -> int:
        """Return how many requests run at once on one server if each holds `held_tokens` on average."""
        return max(1, min(self.most_requests, int(self.cache_tokens / max(1.0, held_tokens))))

    def scaled(self, factor: float) -> ServerCost:
        return ServerCost(self.decode.scaled(factor), self.prefill * factor, self.cache_tokens, self.most_requests)


def server_cost(config: Config, spec: ModelSpec, gpu: Gpu, counts: ParameterCounts) -> ServerCost:
    """Return the cost of one server of the configuration on GPUs of this kind."""
    tensor = config.server.tensor
    memory = server_memory(config, spec, counts.total, int(gpu.memory_gib * 2**30))
    bandwidth = MEMORY_SHARE * gpu.memory_bytes_per_second
    token = 2 * counts.active / tensor / (MATRIX_SHARE["bf16"] * gpu.bf16_flops)
    unread = 0.0 if spec.moe is None else 1 - spec.moe.experts_per_token / spec.moe.num_experts
    fixed, sent = between_nodes(config.server, config.precision, spec, gpu)
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
    """Requests in flight. `name`: the caller's number. `held`: tokens in the cache when the request starts. `start`,
    `finish`: in decode steps of its server's clock; their difference is the number of tokens to sample.
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
    """What happens from now on if nothing interferes. `finish`: seconds until each request ends. The other fields are
    the events, ordered by server and time: `seconds` from now, `decoding` the same after the event's prefill, `steps`
    the decode steps from now, and `first` the index of each server's first event.
    """

    finish: Array
    seconds: Array
    decoding: Array
    steps: Array
    first: Integers


class FluidServers:
    """`num_servers` equal servers, each of which runs up to `slots` requests at once.

    Attributes:
        busy: seconds in which a server had work, summed over servers.
        sampled: number of tokens sampled.
    """

    def __init__(self, num_servers: int, slots: int, cost: ServerCost) -> None:
        self.num, self.slots, self.cost = num_servers, slots, cost
        self.clock = np.zeros(num_servers)
        self.is_up = np.ones(num_servers, bool)
        self.open = Requests.none()
        self.busy = self.sampled = 0.0
        self._free: list[list[float]] = [[0.0] * slots for _ in range(num_servers)]
        self._stall = np.zeros(num_servers)  # seconds that go by before the next decode step
        self._homeless: list[tuple[Integers, Array, Array]] = []  # requests that arrived while no server was up

    def add(self, name: Integers, held: Array, tokens: Array) -> None:
        """Add requests that arrive in this order: each goes to a server with the fewest open ones."""
        if not self.is_up.any():
            self._homeless.append((name, held, tokens))
            return
        self._put(name, self._divide(len(name)), held, tokens)

    def _divide(self, number: int) -> Integers:
        """Return a server for each of `number` new requests, so that open requests are spread evenly where possible."""
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
        """Return when each open request ends if nothing interferes."""
        requests = self.open
        count = len(requests)
        offset = self.clock[requests.server]
        begun = requests.start - offset  # below 0: it is running
        where = np.concatenate([requests.server, requests.server])
        at = np.maximum(np.concatenate([requests.finish - offset, begun]), 0.0)
        change = np.ones(2 * count)
        change[:count] = -1.0
        base = np.tile(requests.held - begun, 2) * change
        # When one request takes over the slot of another, the end comes before the start.
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
        # Each server's seconds begin at 0; an event's time does not include what follows it.
        before = np.concatenate([[0.0], after[:-1]])[: 2 * count]
        seconds = before - np.repeat(before[first[:-1][has]], np.diff(first)[has])
        finish = np.empty(2 * count)
        finish[order] = seconds
        return Timeline(finish[:count], seconds, seconds + read, at, first)

    def advance(self, line: Timeline, seconds: float) -> tuple[Requests, Array, Requests]:
        """Let `seconds` pass. Returns the requests that were open, how many tokens each sampled in that time, and the
        requests that ended.
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
        # The clock of a server that has ended all its requests stops where the last one ended.
        np.maximum.at(clock, requests.server[ended], requests.finish[ended])
        self.clock = clock
        self.sampled += float(sampled.sum())
        self.open = requests.take(~ended)
        return requests, sampled, requests.take(ended)

    @property
    def is_idle(self) -> bool:
        return not len(self.open) and not self._homeless

    def read_again(self) -> None:
        """Interrupt running requests and continue them on the same servers, which read the tokens so far again."""
        requests = self.open
        now = self.clock[requests.server]
        running = requests.start <= now
        held = (requests.held + now - requests.start)[running]
        self._stall += np.bincount(requests.server[running], held * self.cost.prefill, minlength=self.num)

    def take_queued(self) -> Requests:
        """Remove and return the requests that have not started."""
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
        """Lose these servers. Their open requests continue on others, which first read the tokens so far."""
        self.is_up[servers] = False
        gone = np.isin(self.open.server, servers)
        moved, self.open = self.open.take(gone), self.open.take(~gone)
        sampled = np.clip(self.clock[moved.server] - moved.start, 0.0, None)
        for server in servers.tolist():
            self._set_slots(server)
        self._stall[servers] = 0.0
        self.add(moved.name, moved.held + sampled, moved.finish - moved.start - sampled)

    def come_back(self, servers: Integers) -> None:
        """Let these servers take requests again, and give out the requests that no server could take."""
        self.is_up[servers] = True
        waiting, self._homeless = self._homeless, []
        for name, held, tokens in waiting:
            self.add(name, held, tokens)

    def begin_again(self, held: float, tokens: Array) -> None:
        """Restart all servers and sample every open request anew, from its prompt of `held` tokens. `tokens`: of each
        response, indexed by name.
        """
        names = np.concatenate([self.open.name, *(name for name, _, _ in self._homeless)])
        self.open, self._homeless = Requests.none(), []
        self.is_up[:] = True
        self._stall[:] = 0.0
        self._free = [[float(now)] * self.slots for now in self.clock]
        if len(names):
            self.add(names, np.full(len(names), held), tokens[names])
