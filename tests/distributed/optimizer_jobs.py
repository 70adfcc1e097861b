"""What ranks run in the optimizer tests: optimizer steps on the recorded batch, and steps that must not happen."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from layout_jobs import layout_config, recorded_sequences, shard

from gspo_mega.algorithm.objective import ObjectiveSettings
from gspo_mega.checkpoint.gather import PolicyTensors
from gspo_mega.checkpoint.hf_import import import_huggingface
from gspo_mega.engine import optimizer as data_parallel
from gspo_mega.engine.optimizer import gradient_norm
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.engine.process_groups import create_groups, destroy_groups
from gspo_mega.models.huggingface import read_model_spec


class Run:
    """A policy on this rank, the recorded batch, and one optimizer step at a time."""

    def __init__(self, folder: str, groups, parallel: dict, **sections) -> None:
        self.groups, self.spec = groups, read_model_spec(folder)
        self.engine = PolicyEngine(
            layout_config(folder, parallel, **sections), self.spec, groups, num_optimizer_steps=10
        )
        import_huggingface(folder, self.spec, groups, self.engine.chunks)
        self.engine.after_weights_loaded()
        sequences = recorded_sequences()
        self.batch = shard(sequences, groups.data.rank, groups.data.size, 2 * groups.context.size * groups.tensor.size)
        if parallel.get(
            "virtual_pipeline"
        ):  # interleaved stages take as many micro-batches at a time as there are stages
            self.batch += self.batch[-1:] * (-len(self.batch) % parallel["pipeline"])
        self.denominator = float(sum(s["mask"].any() for s in sequences))

    def step(self):
        return self.engine.train_mini_batch(self.batch, ObjectiveSettings(), self.denominator, None)[0]

    def weights(self) -> dict:
        tensors = PolicyTensors(self.spec, self.groups, self.engine.chunks)
        return {name: value.clone().numpy() for name, value in tensors.stream(torch.float32)}

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return {f"{i}.{n}": p for i, chunk in enumerate(self.engine.chunks) for n, p in chunk.named_parameters()}

    def state(self) -> dict[str, object]:
        """A copy of all that an optimizer step may change on this rank."""
        for chunk in self.engine.chunks:
            chunk.await_parameters()
        found: dict[str, object] = {name: p.detach().clone() for name, p in self.parameters().items()}
        for k, part in enumerate(self.engine.optimizer.chained_optimizers):
            for g, group in enumerate(part.param_groups):
                found[f"{k}.{g}.lr"], found[f"{k}.{g}.weight_decay"] = group["lr"], group["weight_decay"]
                for i, main in enumerate(group["params"]):
                    found[f"{k}.{g}.{i}.main"] = main.detach().clone()
                    found |= {f"{k}.{g}.{i}.{n}": v.clone() for n, v in part.optimizer.state[main].items()}
        return found | {"schedule": self.engine.scheduler.num_steps}


@contextmanager
def layout(parallel: dict) -> Iterator:
    sizes = {name: parallel.get(name, 1) for name in ("tensor", "pipeline", "context", "expert", "expert_tensor")}
    groups = create_groups(virtual_pipeline=parallel.get("virtual_pipeline"), **sizes)
    try:
        yield groups
    finally:
        destroy_groups()


def changed(a: dict[str, object], b: dict[str, object]) -> list[str]:
    """The entries in which two states differ by as much as a bit."""
    assert a.keys() == b.keys()
    return [n for n in a if not (torch.equal(a[n], b[n]) if torch.is_tensor(a[n]) else a[n] == b[n])]


def overlapped(
    folder: str, parallel: dict, clip_grad: float = 1.0, distributed: bool = True, gradients: str = "fp32", **sections
) -> dict | None:
    """Three steps with and without overlap, in small buckets. Whole weights on rank 0, None elsewhere."""
    small = functools.partial(data_parallel.DistributedDataParallelConfig, bucket_size=20_000)
    with layout(parallel) as groups, mock.patch.object(data_parallel, "DistributedDataParallelConfig", small):
        result = {}
        for overlap in (False, True):
            run = Run(
                folder,
                groups,
                parallel,
                optimizer=dict(
                    lr=1e-3,
                    overlap=overlap,
                    clip_grad=clip_grad,
                    distributed=distributed,
                    gradients_dtype=gradients,
                ),
                **sections,
            )
            norms = [run.step().grad_norm for _ in range(3)]
            buckets = [len(w.bucket_groups) + len(w.expert_parallel_bucket_groups) for w in run.engine.wrapped]
            run.engine.old_pass(run.batch)
            result[overlap] = dict(weights=run.weights(), norms=norms, buckets=buckets)
        return result if groups.world.rank == 0 else None


def gradients(folder: str, parallel: dict) -> dict | None:
    """Three steps with gradients in fp32 and in bf16: dtypes of the buffers, norms, and whole weights; on rank 0."""
    with layout(parallel) as groups:
        result = {}
        for dtype in ("fp32", "bf16"):
            optimizer = dict(lr=1e-3, clip_grad=0.0, gradients_dtype=dtype)
            run = Run(folder, groups, parallel, precision="bf16", optimizer=optimizer)
            buffers = [b for w in run.engine.wrapped for b in (*w.buffers, *w.expert_parallel_buffers)]
            norms = [run.step().grad_norm for _ in range(3)]
            result[dtype] = dict(
                weights=run.weights(), norms=norms, dtypes=sorted({str(buffer.grad_data.dtype) for buffer in buffers})
            )
        return result if groups.world.rank == 0 else None


def one_bad_gradient(folder: str, parallel: dict, bad_rank: int, parameter: str, **sections) -> dict:
    """A step, one with an infinity in `bad_rank`'s gradient of `parameter`, a step; and two steps without the bad
    one.
    """
    with layout(parallel) as groups:
        run = Run(folder, groups, parallel, **sections)
        first = run.step()
        before = run.state()
        handle = None
        if groups.world.rank == bad_rank:
            (found,) = [p for name, p in run.parameters().items() if name.endswith(parameter)]
            handle = found.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([0]), float("inf")))
        bad = run.step()
        after = run.state()
        if handle is not None:
            handle.remove()
        last = run.step()
        plain = Run(folder, groups, parallel, **sections)
        plain.step(), plain.step()
        return dict(
            skipped=[first.skipped, bad.skipped, last.skipped],
            norm=bad.grad_norm,
            changed=changed(before, after),
            moved=len(changed(after, run.state())),
            differs_from_plain=changed(run.state(), plain.state()),
        )


def decayed(folder: str, **optimizer) -> dict:
    """One step of weight decay with gradients that are all zero: (before, after) of every parameter."""
    with layout({}) as groups:
        run = Run(folder, groups, {}, optimizer=optimizer)
        before = run.state()
        for chunk in run.engine.wrapped:
            chunk.zero_grad_buffer()
        run.engine.optimizer.zero_grad()
        result = run.engine._apply()
        assert not result.skipped and result.grad_norm == 0
        return {name: (before[name].numpy(), p.detach().numpy().copy()) for name, p in run.parameters().items()}


def host_reads(folder: str, parallel: dict, **optimizer) -> int:
    """How often `gradient_norm` asks the device for a number."""
    reads = []
    with layout(parallel) as groups:
        run = Run(folder, groups, parallel, optimizer=dict(lr=1e-3, **optimizer))
        run.engine.policy_gradients(run.batch, ObjectiveSettings(), run.denominator, None)
        run.engine.optimizer.prepare_grads()
        with counted_reads(reads):
            norm, finite = gradient_norm(run.engine.optimizer, groups)
        assert finite and norm > 0
        return len(reads)


@contextmanager
def counted_reads(reads: list) -> Iterator[None]:
    names = ("item", "tolist", "numpy", "cpu", "__float__", "__bool__", "__int__", "__index__")
    plain = {name: getattr(torch.Tensor, name) for name in names}

    def counting(name: str):
        def call(self, *args, **kwargs):
            reads.append(name)
            return plain[name](self, *args, **kwargs)

        return call

    try:
        for name in names:
            setattr(torch.Tensor, name, counting(name))
        yield
    finally:
        for name in names:
            setattr(torch.Tensor, name, plain[name])
