"""How the collector's own work grows with the batch: trajectories per second, and what a token costs in memory.

    python tests/benchmarks/rollout_collector.py [NUM_TRAJECTORIES ...] [--tokens 48] [--http] [--journal] [--admission]

By default there is no HTTP: what is measured is asyncio, groups, ids, counts, and records. `--http`: the client reads
answers in the server's streamed form from a process that does nothing but send them, `--report` tokens in each report.
`--journal`: every episode is written down. `--admission`: admission and the forming of batches alone. "core" is the
CPU seconds of this process for each trajectory: what the machine does beside it changes them little.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("unit/rollout", "support")]

import numpy as np
from collector_support import Stream, collector_of
from fast_answers import sampled

from gspo_mega.data.journal.episode_log import EpisodeLog, FileBegin
from gspo_mega.data.journal.journal import Journal
from gspo_mega.rollout.admission import Admission
from gspo_mega.rollout.arrival_order import Freshness
from gspo_mega.rollout.client.completion import Completion
from gspo_mega.rollout.client.server_client import ServerClient
from gspo_mega.rollout.pooled_server import Load, LoopThread, PooledServer
from gspo_mega.rollout.registration import Registration

VOCAB = 150_000


class FixedLoad(Load):
    """Reports of one size, whatever the machine's speed."""

    size = 512

    def report_tokens(self, progress_deadline_seconds: float) -> int:
        return self.size


class Local:
    """Answers with the same tokens at once, as lists of its own."""

    def __init__(self, num_tokens: int) -> None:
        self._ids, self._log_probs = sampled(num_tokens, VOCAB)

    async def generate(self, *args, **kwargs) -> Completion:
        await asyncio.sleep(0)
        return completion([*self._ids], np.array(self._log_probs).tolist())

    async def close(self) -> None:
        pass


def completion(ids: list[int], log_probs: list[float]) -> Completion:
    return Completion(ids, log_probs, [0] * len(ids), "length")


class Pool:
    """A pool of one server that has room for so many requests."""

    committed_version = 0
    freshness = Freshness(0)
    num_registration_errors = 0
    returns_routed_experts = False

    def __init__(self, client, capacity: int) -> None:
        self.loop = LoopThread("rollout")
        self.capacity = capacity
        self._free = capacity
        self._waiting: list[asyncio.Future[None]] = []
        self.server = PooledServer(Registration("server-0", "http://none", 1, "ready", 1, 0, 0.0), client)
        self.server.load = FixedLoad()

    def check(self):
        pass

    def take_idle_seconds(self):
        return 0.0

    async def acquire(self, avoid=(), num_tokens=0, prefer=None):
        if not self._free:
            self._waiting.append(asyncio.get_running_loop().create_future())
            await self._waiting[-1]
        else:
            self._free -= 1
        self.server.open_request(num_tokens)
        return self.server

    async def release(self, server, error=None, num_tokens=0):
        if error is not None:
            raise error
        server.close_request(num_tokens)
        if self._waiting:
            self._waiting.pop().set_result(None)
        else:
            self._free += 1


async def score(episode):
    episode.reward = float(len(episode.episode_id) % 2)


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def collect(size: int, args: argparse.Namespace, client, folder: Path) -> None:
    pool = Pool(client, args.capacity)
    collector = collector_of(
        pool,
        score,
        Stream(),
        prompts_per_step=size // 4,
        group_size=4,
        max_new_tokens=args.tokens,
        progress_deadline_seconds=600.0,
    )
    marks = {}
    log = EpisodeLog(Journal(folder), 4)
    if args.journal:
        log.begin(FileBegin(0, 0, {}), {}, {})
        marks = {"keep": log.complete, "admit": log.admit}
    before = resident_bytes()
    started, cpu = time.monotonic(), time.process_time()
    collector.start(0, **marks)
    batch = collector.take(0)
    seconds, cpu = time.monotonic() - started, time.process_time() - cpu
    assert sum(row.num_response_tokens for row in batch.trajectories) == size * args.tokens
    held = (resident_bytes() - before) / size
    print(
        f"{size:>8} x {args.tokens} tokens{', HTTP' * args.http}{', journal' * args.journal}: {size / seconds:.0f} per"
        f" second, {size / cpu:.0f} per second of core, {held:.0f} bytes each, {held / args.tokens:.1f} per token",
        flush=True,
    )
    log.close()
    pool.loop.run(collector_closed(collector, client))
    pool.loop.close()


async def collector_closed(collector, client) -> None:
    await collector._scheduler.close()
    await client.close()


def admission(size: int) -> None:
    """A batch of `size` groups, every third dropped, 256 at a time, in each order."""
    for order in ("admission", "completion"):
        groups = Admission(size, 2 * size, Freshness(1), order)
        groups.ask(0)
        started, running, num = time.process_time(), [], 0
        while (formed := groups.formed()) is None:
            while len(running) < 256 and groups.may_admit():
                running.append(groups.admit())
            groups.waits_for()
            num += 1
            groups.complete(running.pop(num * 7919 % len(running)), num % 3 > 0)
        groups.consume(formed)
        print(f"{size:>8} groups, order {order}: {(time.process_time() - started) / num * 1e6:.1f} us each", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("sizes", type=int, nargs="*", default=[1_000, 10_000, 100_000])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--report", type=int, default=512)
    parser.add_argument("--capacity", type=int, default=1024)
    for name in ("--http", "--journal", "--admission"):
        parser.add_argument(name, action="store_true")
    args = parser.parse_args()
    FixedLoad.size = args.report
    for size in args.sizes:
        if args.admission:
            admission(size)
            continue
        server = None
        client = Local(args.tokens)
        if args.http:
            words = [sys.executable, str(Path(__file__).with_name("fast_answers.py"))]
            words += [str(args.tokens), str(args.report), str(VOCAB)]
            server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
            assert server.stdout is not None
            client = ServerClient(
                "server-0", f"http://127.0.0.1:{server.stdout.readline().strip()}", "key", vocab_size=VOCAB
            )
        try:
            with tempfile.TemporaryDirectory() as folder:
                collect(size, args, client, Path(folder))
        finally:
            if server is not None:
                server.kill()
                server.wait()


if __name__ == "__main__":
    main()
