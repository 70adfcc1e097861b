"""What a save takes besides: the parameters that a rank writes, on the host; a group of parameters on the GPU."""

import pytest

from gspo_mega.config.schema import Config
from gspo_mega.plan import estimate, plan_run, render_report
from gspo_mega.plan.memory import GIB, save_device_bytes, save_host_bytes
from gspo_mega.plan.state import BufferSize, ModelShares, State, StateBytes, pinned_bytes, state_bytes


class Stage:
    def __init__(self, *buffers: BufferSize) -> None:
        self.buffers = buffers
        self.largest = State(parameters=10**9, linear=0, padding=0, optimized=10**8)
        self.held = 10**8

    def held_in_save(self, rank: int | None = None) -> int:
        return self.held


def size(weights: int) -> StateBytes:
    zero = dict.fromkeys(StateBytes.__dataclass_fields__, 0)
    return StateBytes(**zero | {"weights": weights, "main": 5, "moments": 7})


def settings(load, *overrides: str) -> Config:
    return load("precision=bf16", *overrides).config


def test_on_the_host_a_rank_holds_what_it_writes(load):
    config, stage = settings(load), Stage(BufferSize(10**9, 10**6, 4), BufferSize(10**7, 10**7, 2))
    assert save_host_bytes(config.optimizer, stage, size(2 * 10**9)) == 2 * 10**9 + 12 * 10**8
    # Reading takes 2 GiB at a time where that is more.
    stage.held = 10**6
    assert save_host_bytes(config.optimizer, stage, size(0)) == 2 * GIB
    # Without the distributed optimizer a rank writes what it has.
    plain = settings(load, "optimizer.distributed=false")
    assert save_host_bytes(plain.optimizer, stage, size(9)) == 9 + 5 + 7


def test_on_the_gpu_some_parameters_at_a_time_go_out_and_come_in(load):
    """What comes in may be all that is exchanged; what goes out is a rank's own part of it."""
    config = settings(load)

    def taken(*buffers: BufferSize) -> int:
        return save_device_bytes(config.optimizer, Stage(*buffers))

    assert taken(BufferSize(10**9, 10**6, 4)) == 2 * 4 * 2**27
    assert taken(BufferSize(10**9, 3 * 10**8, 2)) == 2 * 4 * 3 * 10**8
    assert taken(BufferSize(10**9, 3 * 10**8, 16)) == 4 * (3 * 10**8 + 10**9 // 16)
    assert taken(BufferSize(10**6, 10**5, 1), BufferSize(10**5, 10**5, 1)) == 2 * 4 * 10**6
    plain = settings(load, "optimizer.distributed=false").optimizer
    assert save_device_bytes(plain, Stage(BufferSize(10**9, 1, 1))) == 0


def test_the_report_names_both(load, shape):
    loaded = load("precision=bf16", "cluster.gpu_memory_gib=24", "cluster.ranks_per_node=2")
    plan = plan_run(loaded, "gpu", shape("dense"))
    found = estimate(plan, loaded.where)
    report = render_report(plan, found)
    assert found.node_save_bytes > 0 and found.memory.phases["checkpoint"] >= found.memory.phases["optimizer"]
    assert "on the host while a checkpoint is saved or loaded: 4.0 MiB" in report
    assert 3.95 < found.node_save_bytes / 2**20 < 4.05
    assert "checkpoint " in report.split("phases: ")[1].splitlines()[0]


@pytest.mark.parametrize(
    ("size", "taken"),
    [
        (1, 1),
        (1000, 1024),
        (2**20, 2**20),
        (2**20 + 1, 2**21),
        (32 * 2**20, 32 * 2**20),
        (32 * 2**20 + 1, 32 * 2**20 + 1),
    ],
)
def test_page_locked_memory_is_rounded_while_it_is_small(size, taken):
    assert pinned_bytes(size) == taken


def test_copies_of_the_gpu_are_page_locked_and_rounded_in_every_save(load, shape):
    """The distributed optimizer's state is ordinary memory of the host: only weights count then."""
    found = {}
    sizes = dict(hidden_size=96, intermediate_size=192, num_hidden_layers=2)
    for device in ("gpu", "cpu"):
        for distributed in ("true", "false"):
            for kind in ("true", "false"):
                keys = ["precision=bf16", f"optimizer.distributed={distributed}", f"checkpoint.asynchronous={kind}"]
                keys += ["precision=fp32"] if device == "cpu" else []
                loaded = load(*keys)
                plan = plan_run(loaded, device, shape("dense", **sizes))
                held = ModelShares(plan.spec).state(plan.config, plan.layout, 0)
                size = state_bytes(plan.config, held.largest)
                plain = save_host_bytes(plan.config.optimizer, held, size)
                found[device, distributed, kind] = estimate(plan, loaded.where).node_save_bytes - plain
    weights = sum(pinned_bytes(2 * n) - 2 * n for b in held._buffers for n in b.sizes)
    whole = sum(pinned_bytes(4 * n) - 4 * n for b in held._buffers for n in b.sizes)
    assert weights > 0
    for kind in ("true", "false"):
        assert found["gpu", "true", kind] == weights and found["gpu", "false", kind] == weights + 3 * whole
        assert found["cpu", "true", kind] == found["cpu", "false", kind] == 0
