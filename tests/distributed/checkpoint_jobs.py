"""What ranks run in the checkpoint tests."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from layout_jobs import layout_config, recorded_sequences, shard
from torch.utils._python_dispatch import TorchDispatchMode

from gspo_mega.algorithm.objective import ObjectiveSettings
from gspo_mega.base import failpoints
from gspo_mega.base.errors import GspoMegaError
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.checkpoint import load, memory_files, optimizer_shards, save
from gspo_mega.checkpoint.fp8_scales import by_tensor
from gspo_mega.checkpoint.gather import PolicyTensors
from gspo_mega.checkpoint.hf_import import import_huggingface
from gspo_mega.checkpoint.load import TrainState, find_checkpoint, load_checkpoint
from gspo_mega.checkpoint.peer_copies import PeerCopies
from gspo_mega.checkpoint.save import Saver
from gspo_mega.config.schema import Checkpoint
from gspo_mega.engine import optimizer
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.engine.process_groups import create_groups, destroy_groups
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.plan.layout import alignment_tokens


class _Clones(TorchDispatchMode):
    """Counts the bytes of this thread's copies of host tensors."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.clone.default:
            self.num_bytes += result.nbytes
        return result


def count_copies(saver: Saver, state: TrainState) -> dict[str, int]:
    """Save, and wait for the write. `staged`: bytes that this rank writes. `copied`: bytes of the clones on the way.
    `shared`: staged tensors that lie in memory which training changes.
    """
    staged, original, clones = [], save._copies, _Clones()

    def kept(*args):
        found = original(*args)
        staged.extend(tensor for _, _, (_, tensors) in found or () for _, tensor in tensors)
        return found

    with mock.patch.object(save, "_copies", kept), mock.patch.object(save, "random_state", dict), clones:
        saver.save(state)
    trained = {tensor.untyped_storage().data_ptr() for tensor in live_tensors(saver._engine)}
    shared = sum(tensor.untyped_storage().data_ptr() in trained for tensor in staged)
    saver.finish()
    return {"staged": sum(t.nbytes for t in staged), "copied": clones.num_bytes, "shared": shared}


@contextlib.contextmanager
def small_buckets(num_elements: int | None) -> Iterator[None]:
    """An engine that is made within it has overlapped buckets of so many elements; Megatron's own where None."""
    if num_elements is None:
        yield
        return
    small = functools.partial(optimizer.DistributedDataParallelConfig, bucket_size=num_elements)
    with mock.patch.object(optimizer, "DistributedDataParallelConfig", small):
        yield


@contextlib.contextmanager
def one_parameter_at_a_time() -> Iterator[list[int]]:
    """The optimizer's state is read in the smallest turns. The list gets the number of tensors of each."""
    turns, load = [], optimizer_shards.dist_checkpointing.load

    def counted(state, *args, **kwargs):
        if "turn" in state:
            turns.append(len(state["turn"]))
        return load(state, *args, **kwargs)

    with (
        mock.patch.object(optimizer_shards, "READ_BYTES", 1),
        mock.patch.object(optimizer_shards.dist_checkpointing, "load", counted),
    ):
        yield turns


def live_tensors(engine: PolicyEngine) -> list[torch.Tensor]:
    """Weights and optimizer state."""
    groups = engine.optimizer.param_groups
    found = [p for chunk in engine.chunks for p in chunk.parameters()] + [p for g in groups for p in g["params"]]
    for part in getattr(engine.optimizer, "chained_optimizers", [engine.optimizer]):
        states = part.optimizer.state.values() if part.optimizer is not None else ()
        found += [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    return found


def run(
    folder: str,
    run_dir: str,
    parallel: dict,
    plan: list[str],
    *,
    weights_from: str | None = None,
    checkpoint: dict | None = None,
    bucket_size: int | None = None,
    machines: str | None = None,
    **sections,
) -> dict:
    """Carry out `plan` ("start", "train", "save", "commit", "load", "copy", "go on from copies", "fault ...") and return
    the whole weights on rank 0, and each rank's FP8 scales.

    "restart" makes a new engine, as a new process would, with weights that are not those of the run. `bucket_size`:
    elements of an overlapped bucket. `machines`: a folder in which every rank has a machine's memory of its own.
    """
    parallel = {"expert_tensor": 1, **parallel}
    config = layout_config(folder, parallel, **sections)
    spec = read_model_spec(folder)
    sizes = {name: parallel.get(name, 1) for name in ("tensor", "pipeline", "context", "expert", "expert_tensor")}
    groups = create_groups(**sizes)
    run_folder = RunFolder(run_dir)
    reading, turns = contextlib.ExitStack(), []
    try:
        engine, state, warnings, lr, counts = None, TrainState(), [], 0.0, None
        if machines is not None:
            memory = Path(machines, f"machine_{groups.world.rank}")
            memory.mkdir(parents=True, exist_ok=True)
            reading.enter_context(mock.patch.object(memory_files, "ROOT", memory))
        for act in plan:
            if act == "start":
                with small_buckets(bucket_size):
                    engine = PolicyEngine(config, spec, groups, num_optimizer_steps=20)
                import_huggingface(weights_from or folder, spec, groups, engine.chunks)
                engine.after_weights_loaded()
                saver = Saver(run_folder, engine, Checkpoint(**(checkpoint or {})))
                copies = PeerCopies(run_folder, engine) if machines is not None else None
            elif act == "train":
                sequences = recorded_sequences(seed=state.step)
                align = math.lcm(
                    2 * groups.context.size * groups.tensor.size,
                    alignment_tokens(config.parallel, config.precision, config.fp8),
                )
                batch = shard(sequences, groups.data.rank, groups.data.size, align)
                result, _ = engine.train_mini_batch(batch, ObjectiveSettings(), 11.0, None)
                assert not result.skipped
                state.step, state.num_optimizer_steps = state.step + 1, state.num_optimizer_steps + 1
                lr = result.lr
            elif act == "save":
                state.prompts, state.weight_version = {"position": state.step}, state.step
                saver.save(state)
                saved_step = state.step
            elif act == "draw":  # so that random states are not those of a new process
                torch.rand(5)
            elif act == "copy":
                state.prompts, state.weight_version = {"position": state.step}, state.step
                warnings = [*warnings, *copies.keep(state)]
            elif act == "go on from copies":
                found, why = copies.restore(saved_step=0)
                warnings, state = [*warnings, why], found or TrainState()
                assert found is None or state.weight_version == state.step == copies.restored_step
            elif act == "save, copies counted":
                counts = count_copies(saver, state)
            elif act == "save without room":
                with mock.patch("shutil.disk_usage", return_value=SimpleNamespace(free=16 * 1024**2)):
                    saver.save(state)
            elif act.startswith("fault "):
                failpoints.arm(act.removeprefix("fault "), groups.world.rank)
            elif act == "commit":
                (report,) = saver.finish()
                assert (
                    report.folder.name == f"step_{saved_step:08d}" and 0 < report.pause_seconds <= report.write_seconds
                )
            elif act == "read one by one":
                turns = reading.enter_context(one_parameter_at_a_time())
            elif act == "scales of an earlier version":
                reading.enter_context(mock.patch.object(load, "read_scales", lambda *places, **sizes: {}))
            elif act == "load":
                folder_found, warnings = find_checkpoint(run_folder, groups)
                state = load_checkpoint(folder_found, engine)
                assert state.prompts == {"position": state.step} and state.weight_version == state.step
        if machines is not None:
            warnings = [*warnings, *copies.finish()]
        weights = {
            name: value.clone().numpy()
            for name, value in PolicyTensors(spec, groups, engine.chunks).stream(torch.float32)
        }
        random = torch.rand(3).tolist()
        num_experts = 0 if spec.moe is None else spec.moe.num_experts // groups.expert.size
        scales = dict(by_tensor(engine.scales.state(), expert_rank=groups.expert.rank, num_local_experts=num_experts))
        return (
            {"scales": scales}
            if groups.world.rank
            else {
                "scales": scales,
                "weights": weights,
                "lr": lr,
                "random": random,
                "step": state.step,
                "warnings": warnings,
                "copies": counts,
                "figures": None if machines is None else copies.take_metrics(),
                "turns": len(turns),
            }
        )
    finally:
        reading.close()
        failpoints.arm(None, groups.world.rank)
        destroy_groups()


def refused(**arguments) -> str:
    """The text of the error that `run` ends with."""
    try:
        run(**arguments)
    except GspoMegaError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"
