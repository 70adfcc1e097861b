"""GPUs in turns: a server that records what it holds, and refuses what it cannot do then, beside the real pool."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from aiohttp import web
from collector_support import collector_config
from fake_server import FakeServer
from waiting import until

from gspo_mega.base.errors import RolloutError
from gspo_mega.rollout.registration import give_turn, read_registrations, server_may_start
from gspo_mega.rollout.server.supervise import ServerSupervisor
from gspo_mega.train import servers as shared_gpus
from gspo_mega.train.phases import Phases
from gspo_mega.train.servers import SharedGpus

# SGLang frees its CUDA graphs only with a variable that its default graphs of prefills refuse, so they stay.
ALL = {"weights", "kv_cache"}


class SharingServer(FakeServer):
    """Holds parts of GPU memory, in `log` beside what the ranks do. What it cannot do without them is in `wrong`."""

    def __init__(self, *args, log, **options):
        self.log, self.held, self.wrong, self.answers_release = log, set(ALL), [], True
        super().__init__(*args, **options)

    def start(self):
        self.held = set(ALL)
        super().start()

    def control(self, path, body):
        if path == "/release_memory_occupation":
            if not self.answers_release:
                return web.json_response({"error": {"message": "still busy"}}, status=500)
            self.log.append(("released", *sorted(body["tags"])))
            if self.num_open or not set(body["tags"]) <= self.held:
                self.wrong.append(f"released {body['tags']} with {self.num_open} requests, holding {self.held}")
            self.held -= set(body["tags"])
        elif path == "/resume_memory_occupation":
            self.log.append(("resumed", *sorted(body["tags"])))
            if set(body["tags"]) & self.held:
                self.wrong.append(f"resumed {body['tags']}, holding {self.held}")
            self.held |= set(body["tags"])
        elif path == "/update_weights_from_disk" and "weights" not in self.held:
            self.wrong.append("updated without weights")
        return super().control(path, body)

    async def _generate(self, request, body):
        if self.held != ALL:
            self.wrong.append(f"generated, holding {self.held}")
            return web.json_response({"error": {"message": "no cache"}}, status=500)
        return await super()._generate(request, body)


class Memory:
    """The ranks' side of the log."""

    def __init__(self, log):
        self.log = log

    def keep(self, parts):
        self.log.append(("ranks keep", *parts))
        return 1000

    def restore(self, parts):
        self.log.append(("ranks have", *parts))
        return 1000


@pytest.fixture(scope="module")
def host_group(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def shared(attempt, pools, host_group):
    """A sharing server, the pool, the ranks' side, and the log of both."""
    made = []

    def make(num_servers=1):
        log = []
        give_turn(attempt, "ranks")
        servers = [SharingServer(f"server-{i}", attempt.servers_dir, log=log) for i in range(num_servers)]
        made.extend(servers)
        pool = pools()
        lead = SimpleNamespace(rollouts=SimpleNamespace(pool=pool), attempt=attempt)
        ranks = SimpleNamespace(agree=lambda value: value)
        config = collector_config()
        gpus = SharedGpus(config.server, config.rollout, config.publish, Memory(log), ranks, host_group, lead, Phases())
        pool.wait_ready(num_servers, 60)
        return SimpleNamespace(gpus=gpus, pool=pool, servers=servers, server=servers[0], log=log, attempt=attempt)

    yield make
    for server in made:
        server.close()


def test_whoever_gives_memory_does_so_before_anyone_takes(shared):
    """A run of two steps with an evaluation, a checkpoint and an export between."""
    one = shared()
    turns = ["sample", "publish", "sample", "train", "publish", "sample", "train", "publish", "train", "sample"]
    steps = {}
    for index, turn in enumerate(turns):
        del one.log[:]
        one.gpus.switch_to(turn)
        one.gpus.switch_to(turn)  # nothing more to do
        steps[index, turn] = list(one.log)
        want = {"sample": ALL, "publish": {"weights"}, "train": set()}[turn]
        assert one.server.held == want and server_may_start(one.attempt) == (turn == "sample") == (not one.pool.is_held)
    everything = ("parameters", "gradients", "optimizer", "reference")
    assert steps[0, "sample"] == [("ranks keep",), ("ranks have",)]
    assert steps[1, "publish"] == [
        ("ranks keep", "parameters"),
        ("released", "kv_cache"),
        ("ranks have", "parameters"),
    ]
    assert steps[2, "sample"] == [("ranks keep",), ("ranks have",), ("resumed", "kv_cache")]
    assert steps[3, "train"] == [
        ("ranks keep", *everything),
        ("released", "kv_cache", "weights"),
        ("ranks have", *everything),
    ]
    assert steps[4, "publish"] == [("ranks keep", "parameters"), ("ranks have", "parameters"), ("resumed", "weights")]
    assert steps[7, "publish"] == steps[4, "publish"]
    assert steps[8, "train"][1] == ("released", "weights")
    assert steps[9, "sample"] == [("ranks keep",), ("ranks have",), ("resumed", "kv_cache", "weights")]
    assert not one.server.wrong


def test_its_metrics_show_that_it_acted(shared):
    one = shared()
    one.gpus.switch_to("sample")
    one.gpus.switch_to("train")
    metrics = one.gpus.take_metrics()
    assert metrics["colocated/offloaded_bytes"] == 2000 and metrics["colocated/release_seconds"] > 0
    assert set(one.gpus.take_metrics().values()) == {0.0}, "each is told once"


def test_requests_wait_while_a_server_has_no_cache(shared):
    one = shared()
    one.gpus.switch_to("sample")
    one.gpus.switch_to("train")
    waiting = one.pool.loop.submit(one.pool.acquire())
    one.gpus.switch_to("publish")
    one.pool.hold(True)
    one.pool.hold(False)  # as a publish does
    time.sleep(0.05)
    assert not waiting.done()
    one.gpus.switch_to("sample")
    assert waiting.result(timeout=60).server_id == "server-0"
    assert not one.server.wrong


def test_a_server_that_starts_is_waited_for_before_the_ranks_take_its_gpu(shared):
    one = shared(2)
    one.gpus.switch_to("sample")
    second = one.servers[1]
    second.die()
    second.register("starting")
    until(lambda: len(one.pool.ready_servers()) == 1, 5)
    threading.Timer(0.3, second.start).start()
    one.gpus.switch_to("train")
    assert second.generation == 2 and second.held == one.server.held == set()


def test_a_server_that_died_while_ranks_trained_starts_before_the_publish(shared):
    """It waits for its turn; with no other server left, it gets one."""
    one = shared()
    one.gpus.switch_to("sample")
    one.gpus.switch_to("train")
    one.server.die()
    one.server.register("waiting")
    until(lambda: not one.pool.ready_servers(), 5)

    def start():
        until(lambda: server_may_start(one.attempt), 5)
        one.server.start()

    starter = threading.Thread(target=start)
    starter.start()
    del one.log[:]
    one.gpus.switch_to("publish")
    starter.join()
    assert one.log[:2] == [("ranks keep",), ("ranks have",)], "it starts on an empty GPU"
    assert one.log[-2:] == [("released", "kv_cache"), ("ranks have", "parameters")]
    assert one.server.held == {"weights"} and not one.server.wrong


def test_a_server_that_keeps_its_memory_ends_the_run(shared, monkeypatch):
    monkeypatch.setattr(shared_gpus, "_END_SECONDS", 0.2)
    one = shared()
    one.gpus.switch_to("sample")
    one.server.answers_release = False
    with pytest.raises(RolloutError, match="server-0 does not give its GPU memory to the ranks: .*still busy"):
        one.gpus.switch_to("train")


def test_a_server_that_dies_instead_of_giving_its_memory_has_given_it(shared):
    one = shared(2)
    one.gpus.switch_to("sample")
    one.server.answers_release = False
    threading.Timer(0.2, lambda: one.server.register("waiting")).start()
    one.gpus.switch_to("train")
    assert one.servers[1].held == set()


def test_a_server_that_never_becomes_ready_does_not_hold_the_ranks_for_ever(shared, monkeypatch):
    one = shared(2)
    one.gpus.switch_to("sample")
    hasty = {"start_deadline_seconds": 0.2, "drain_seconds": 0.0}
    one.gpus._server = one.gpus._server.model_copy(update=hasty)
    monkeypatch.setattr(shared_gpus, "_END_SECONDS", 0.2)
    one.servers[1].register("draining")
    with pytest.raises(RolloutError, match="cannot get their GPUs back: server-1 is draining"):
        one.gpus.switch_to("train")


def test_a_server_that_waits_for_a_copy_does_not_hold_the_ranks(shared, monkeypatch):
    """It has no memory, and asks whose turn it is before it takes any."""
    one = shared(2)
    one.gpus.switch_to("sample")
    hasty = {"start_deadline_seconds": 0.2, "drain_seconds": 0.0}
    one.gpus._server = one.gpus._server.model_copy(update=hasty)
    monkeypatch.setattr(shared_gpus, "_END_SECONDS", 0.2)
    one.servers[1].register("starting", waits_for="the copy")
    one.gpus.switch_to("train")
    assert one.server.held == set()


def test_serve_starts_nothing_while_the_ranks_have_the_gpus(attempt):
    config = collector_config()
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"colocated": True})})
    attempt.servers_dir.mkdir(parents=True, exist_ok=True)
    supervisor = ServerSupervisor(config, attempt, 0)
    give_turn(attempt, "ranks")
    waits = threading.Thread(target=supervisor._wait_for_turn)
    waits.start()

    def state():
        return [r.state for r in read_registrations(attempt.servers_dir)]

    until(lambda: state() == ["waiting"], 60)
    give_turn(attempt, "servers")
    waits.join(timeout=60)
    assert not waits.is_alive() and state() == ["starting"]


def test_without_the_file_it_is_the_servers_turn(attempt):
    assert server_may_start(attempt)
