"""What ranks run in the tests of moving their state to the host and back between steps."""

from __future__ import annotations

import weakref
from typing import Any, cast

import torch
from optimizer_jobs import Run, changed, layout

from gspo_mega.checkpoint.hf_import import import_huggingface
from gspo_mega.engine.memory import PARTS, DeviceMemory
from gspo_mega.engine.reference import ReferencePolicy


def moved(folder: str, parallel: dict, **sections) -> dict:
    """Three steps, and three with all state away after each; a publish reads the weights with the rest away."""
    with layout(parallel) as groups:
        plain = Run(folder, groups, parallel, **sections)
        for _ in range(3):
            plain.step()
        published = plain.weights()
        run = Run(folder, groups, parallel, **sections)
        reference = ReferencePolicy(run.engine.config, run.spec, groups)
        import_huggingface(folder, run.spec, groups, reference.chunks)
        before = reference.log_probs(run.batch)
        memory = DeviceMemory(run.engine, reference)
        freed, taken, left, weights = [], [], [], {}
        for _ in range(3):
            run.step()
            steps = [memory.keep(("parameters",))]
            weights = run.weights()
            steps += [memory.keep(()), memory.keep(())]
            left.append(held_bytes(run))
            back = [memory.restore(("parameters",)), memory.restore(PARTS), memory.restore(PARTS)]
            freed.append(steps)
            taken.append(back)
        after = reference.log_probs(run.batch)
        return dict(
            changed=changed(plain.state(), run.state()),
            published=[name for name, value in published.items() if (value != weights[name]).any()],
            freed=freed,
            taken=taken,
            left=left,
            blocks=len({copy.untyped_storage().data_ptr() for copy in memory._host.values()}),
            copies=len(memory._host),
            reference=[torch.equal(a, b) for a, b in zip(before, after, strict=True)],
        )


def kept_between_passes(folder: str, parallel: dict, **sections) -> dict:
    """Inputs of layers, [t, 1, H] with gradients, that are there in the passes of two steps, and that are left after.
    `noted`: what dispatchers of tokens still hold of the last pass.
    """
    inputs: list[weakref.ref[torch.Tensor]] = []

    def note(layer: Any, given: tuple, named: dict) -> None:
        hidden = named.get("hidden_states", given[0] if given else None)
        if hidden is not None and hidden.requires_grad:
            inputs.append(weakref.ref(hidden))

    with layout(parallel) as groups:
        run = Run(folder, groups, parallel, **sections)
        for chunk in run.engine.chunks:
            for layer in cast(Any, chunk).decoder.layers:
                layer.register_forward_pre_hook(note, with_kwargs=True)
        lasting = {id(value) for _, value in _of_dispatchers(run)}
        for _ in range(2):
            run.step()
        noted = sorted({name for name, value in _of_dispatchers(run) if id(value) not in lasting})
        left = [hidden for one in inputs if (hidden := one()) is not None]
        gradients = sum(hidden.grad is not None for hidden in left)
        return dict(seen=len(inputs), left=len(left), gradients=gradients, noted=noted)


def _of_dispatchers(run: Run) -> list[tuple[str, torch.Tensor]]:
    """The tensors in the attributes of all dispatchers, by name."""
    dispatchers = [
        cast(Any, module).token_dispatcher
        for chunk in run.engine.chunks
        for module in chunk.modules()
        if hasattr(module, "token_dispatcher")
    ]
    assert dispatchers
    return [(name, v) for one in dispatchers for name, v in vars(one).items() if isinstance(v, torch.Tensor)]


def held_bytes(run: Run) -> int:
    """Of parameters, gradients and moments."""
    tensors = [*run.parameters().values()]
    for chunk in run.engine.wrapped:
        wrapped: Any = chunk
        for buffer in (*wrapped.buffers, *wrapped.expert_parallel_buffers):
            tensors += [buffer.grad_data] + ([] if buffer.param_data is None else [buffer.param_data])
    for part in run.engine.optimizer.chained_optimizers:
        tensors += [main for group in part.param_groups for main in group["params"]]
        tensors += [value for state in part.optimizer.state.values() for value in state.values() if value.ndim]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
