"""What a save takes besides: a rank's own part and one parameter, on the host; a group of parameters on the GPU."""

from gspo_mega.config.schema import Config
from gspo_mega.plan import estimate, plan_run, render_report
from gspo_mega.plan.memory import GIB, save_device_bytes, save_host_bytes
from gspo_mega.plan.state import BufferSize, State, StateBytes


class Stage:
    def __init__(self, *buffers: BufferSize) -> None:
        self.buffers = buffers
        self.largest = State(parameters=10**9, linear=0, padding=0, optimized=10**8)


def size(weights: int) -> StateBytes:
    zero = dict.fromkeys(StateBytes.__dataclass_fields__, 0)
    return StateBytes(**zero | {"weights": weights, "main": 5, "moments": 7})


def settings(load, *overrides: str) -> Config:
    return load("precision=bf16", *overrides).config


def test_on_the_host_a_rank_holds_its_part_and_one_parameter(load):
    config, stage = settings(load), Stage(BufferSize(10**9, 10**6), BufferSize(10**7, 10**7))
    assert save_host_bytes(config.optimizer, stage, size(2 * 10**9)) == 2 * 10**9 + 12 * (10**8 + 10**7)
    # Reading takes 2 GiB at a time where that is more.
    stage.largest = State(parameters=10**9, linear=0, padding=0, optimized=10**6)
    assert save_host_bytes(config.optimizer, stage, size(0)) == 2 * GIB
    # Without the distributed optimizer a rank writes what it has.
    plain = settings(load, "optimizer.distributed=false")
    assert save_host_bytes(plain.optimizer, stage, size(9)) == 9 + 5 + 7


def test_on_the_gpu_some_parameters_at_a_time_go_out_and_come_in(load):
    config = settings(load)
    assert save_device_bytes(config.optimizer, Stage(BufferSize(10**9, 10**6))) == 2 * 4 * 2**27
    assert save_device_bytes(config.optimizer, Stage(BufferSize(10**9, 3 * 10**8))) == 2 * 4 * 3 * 10**8
    assert (
        save_device_bytes(config.optimizer, Stage(BufferSize(10**6, 10**5), BufferSize(10**5, 10**5))) == 2 * 4 * 10**6
    )
    assert save_device_bytes(settings(load, "optimizer.distributed=false").optimizer, Stage(BufferSize(10**9, 1))) == 0


def test_the_report_names_both(load, shape):
    loaded = load("precision=bf16", "cluster.gpu_memory_gib=24", "cluster.ranks_per_node=2")
    plan = plan_run(loaded, "gpu", shape("dense"))
    found = estimate(plan, loaded.where)
    report = render_report(plan, found)
    assert found.node_save_bytes > 0 and found.memory.phases["checkpoint"] >= found.memory.phases["optimizer"]
    assert "on the host while a checkpoint is saved or loaded: 4.0 MiB" in report
    assert 3.95 < found.node_save_bytes / 2**20 < 4.05
    assert "checkpoint " in report.split("phases: ")[1].splitlines()[0]
