"""What ranks run in the tests of gradient norms: the norm that clips, the norm of whole gradients, every mark."""

from __future__ import annotations

from typing import Any

import torch
from layout_jobs import layout_config, recorded_sequences, shard
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from optimizer_jobs import layout

from gspo_mega.algorithm.objective import ObjectiveSettings
from gspo_mega.checkpoint.adapters import AdapterTensors, init_adapters
from gspo_mega.checkpoint.gather import PolicyTensors
from gspo_mega.checkpoint.hf_import import import_huggingface
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.verify.certify.steps import complete_gradients

STEPS = 2


def norms(folder: str, layouts: dict[str, dict], **sections) -> dict:
    """By layout: `clipped`, the norm of each optimizer step by which gradients are clipped; `whole`, that of the whole
    tensors of its gradient (on rank 0; elsewhere of none); `marks`: where a parameter's mark contradicts how Megatron's
    own checkpoint says that it is cut on this rank.
    """
    return {name: _norms(folder, {"expert_tensor": 1, **parallel}, sections) for name, parallel in layouts.items()}


def _norms(folder: str, parallel: dict, sections: dict) -> dict[str, list]:
    optimizer = dict(lr=1e-3, clip_grad=0.1, eps=1e-6) | sections.pop("optimizer", {})
    config = layout_config(folder, parallel, optimizer=optimizer, **sections)
    spec = read_model_spec(folder)
    with layout(parallel) as groups:
        engine = PolicyEngine(config, spec, groups, num_optimizer_steps=STEPS)
        import_huggingface(folder, spec, groups, engine.chunks)
        init_adapters(engine)
        engine.after_weights_loaded()
        sequences = recorded_sequences()
        batch = shard(sequences, groups.data.rank, groups.data.size, 2 * groups.context.size * groups.tensor.size)
        denominator = float(sum(s["mask"].any() for s in sequences))
        own: Any = (spec, groups, engine.chunks, lambda parameter: parameter.main_grad)
        trained = PolicyTensors(*own) if config.lora is None else AdapterTensors(config.lora, *own)
        clipped, whole = [], []
        for _ in range(STEPS):
            report = engine.policy_gradients(batch, ObjectiveSettings(), denominator, None)
            squares = sum(float(tensor.double().square().sum()) for _, tensor in _completed(engine, trained))
            whole.append(squares**0.5)
            clipped.append(engine._apply(report).grad_norm)
        marks = [] if config.lora else [text for chunk in engine.chunks for text in _contradictions(chunk, groups)]
        return dict(clipped=clipped, whole=whole, marks=marks)


def _completed(engine: PolicyEngine, tensors: Any):
    if engine.config.optimizer.distributed:
        complete_gradients(engine)
    return tensors.stream(torch.float32)


def _contradictions(chunk, groups) -> list[str]:
    parameters = dict(chunk.named_parameters())
    wrong = []
    for name, sharded in chunk.sharded_state_dict().items():
        parameter: Any = parameters.get(name)
        if parameter is None:
            continue
        parts = [sharded] if isinstance(sharded, ShardedTensor) else _sharded_parts(sharded.build())
        cut = any(n > 1 for part in parts for n in part.axis_fragmentations[part.prepend_axis_num :])
        group = groups.expert_tensor if ".experts." in name else groups.tensor
        if group.size > 1 and cut != bool(getattr(parameter, "tensor_model_parallel", False)):
            wrong.append(f"{name}: {'cut' if cut else 'whole'} on every rank of its group, marked otherwise")
        summed = chunk.config.sequence_parallel and ".experts." not in name and not cut
        if summed != bool(chunk.config.sequence_parallel and getattr(parameter, "sequence_parallel", False)):
            wrong.append(f"{name}: its gradient {'is not' if summed else 'is'} summed over the tensor group")
        is_experts_own = ".experts." in name and groups.expert.size > 1
        if getattr(parameter, "allreduce", True) == is_experts_own:
            wrong.append(f"{name}: reduced {'with everything' if is_experts_own else 'as an expert'}")
    return wrong


def _sharded_parts(built: object) -> list[ShardedTensor]:
    if isinstance(built, ShardedTensor):
        return [built]
    parts: Any = built.values() if isinstance(built, dict) else built
    return [found for part in parts for found in _sharded_parts(part)]
