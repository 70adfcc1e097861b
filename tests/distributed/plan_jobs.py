"""What ranks run in the tests of the plan: an engine's elements and bytes, and what a forward pass saves."""

from __future__ import annotations

import numpy as np
import torch
from layout_jobs import layout_config, pack

from gspo_mega.algorithm.objective import ObjectiveSettings
from gspo_mega.config.schema import Config
from gspo_mega.engine.critic import CriticEngine
from gspo_mega.engine.optimizer import apply_gradients
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.engine.process_groups import create_groups, destroy_groups
from gspo_mega.engine.reference import ReferencePolicy
from gspo_mega.models.huggingface import read_model_spec


def count_state(cases: list[dict]) -> list[dict]:
    """For each case (a resolved configuration, `config`, as JSON values) this rank's elements and bytes."""
    return [_count(Config.model_validate_json(case["config"])) for case in cases]


def count_critic(cases: list[dict]) -> list[dict]:
    """`count_state` of the critic of each case."""
    return [_count(Config.model_validate_json(case["config"]), is_critic=True) for case in cases]


def _count(config: Config, *, is_critic: bool = False) -> dict:
    parallel = config.parallel
    groups = create_groups(
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        virtual_pipeline=parallel.virtual_pipeline,
        context=parallel.context,
        expert=parallel.expert,
        expert_tensor=parallel.expert_tensor,
    )
    try:
        make = CriticEngine if is_critic else PolicyEngine
        engine = make(config, read_model_spec(config.model.path), groups, num_optimizer_steps=1)
        for chunk in engine.wrapped:
            chunk.zero_grad_buffer()
        engine.optimizer.zero_grad()
        # Adam makes its moments in the first step.
        apply_gradients(engine.optimizer, engine.scheduler, config.optimizer.clip_grad, groups)
        parameters = [p for chunk in engine.chunks for p in chunk.parameters()]
        buffers = [b for chunk in engine.wrapped for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        moments: list[torch.Tensor] = []
        main: list[torch.Tensor] = []
        for part in engine.optimizer.chained_optimizers:
            for group in part.param_groups:
                main += group["params"]
            moments += [v for s in part.optimizer.state.values() for n, v in s.items() if n.startswith("exp_avg")]
        return dict(
            parameters=sum(p.numel() for p in parameters),
            gradients=sum(b.grad_data.numel() for b in buffers),
            optimized=sum(p.numel() for p in main),
            weight_bytes=_storage_bytes(parameters),
            gradient_bytes=_storage_bytes([b.grad_data for b in buffers]),
            # fp32 main parameters are views of the weights.
            main_bytes=_storage_bytes(main, _storages(parameters)),
            moment_bytes=_storage_bytes(moments),
            reference_bytes=_reference_bytes(config, engine, parameters) if isinstance(engine, PolicyEngine) else 0,
        )
    finally:
        destroy_groups()


def _reference_bytes(config: Config, engine: PolicyEngine, policy: list[torch.Tensor]) -> int:
    """Of whatever the reference holds, parameters and not, that the policy does not."""
    if config.kl.coefficient == 0 or config.lora is not None:  # adapters off: the model is there already
        return 0
    reference = ReferencePolicy(config, engine.spec, engine.groups)
    own = [
        *(p for chunk in reference.chunks for p in chunk.parameters()),
        *(p.grad for chunk in reference.chunks for p in chunk.parameters() if p.grad is not None),
    ]
    size = _storage_bytes(own, _storages(policy))
    assert size == reference.num_bytes
    return size


def _storages(tensors: list[torch.Tensor]) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors}


def _storage_bytes(tensors: list[torch.Tensor], without: set[int] = frozenset()) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}
    return sum(size for pointer, size in storages.items() if pointer not in without)


def saved_bytes(
    folder: str, parallel: dict, precision: str, num_tokens: int, num_sequences: int, **sections
) -> dict[str, float]:
    """Bytes a token that one forward pass saves for its backward pass, by the half of layer 2 that saves them.

    `outside`: by what is in no layer, such as a block that is recomputed, the final norm and the head. Storages count
    once, parameters not at all.
    """
    sequences = [
        dict(
            tokens=np.arange(3, 3 + num_tokens),
            prompt=1,
            mask=np.ones(num_tokens - 1, np.float32),
            rollout=np.zeros(num_tokens - 1, np.float32),
            advantage=1.0,
        )
    ] * num_sequences
    sizes = {name: parallel.get(name, 1) for name in ("tensor", "pipeline", "context", "expert", "expert_tensor")}
    groups = create_groups(**sizes)
    try:
        engine = PolicyEngine(
            layout_config(folder, parallel, precision=precision, **sections), read_model_spec(folder), groups, 1
        )
        batch = [pack(sequences, list(range(num_sequences)), 1)]
        storages, found = _storages(list(engine.chunks[0].parameters())), {}
        held, inside = [], [""]

        def save(tensor: torch.Tensor) -> torch.Tensor:
            pointer = tensor.untyped_storage().data_ptr()
            if pointer not in storages:
                storages.add(pointer)
                held.append(tensor)  # so that no other takes its place
                found[inside[-1]] = found.get(inside[-1], 0) + tensor.untyped_storage().nbytes()
            return tensor

        for index, layer in enumerate(engine.chunks[0].decoder.layers):
            for name, module in layer.named_children():
                half = "attention" if name in ("input_layernorm", "self_attention", "self_attn_bda") else "mlp"
                where = f"{index}.{half}"
                module.register_forward_pre_hook(lambda *_, where=where: inside.append(where))
                module.register_forward_hook(lambda *_: [inside.pop(), None][1])
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            engine.policy_gradients(batch, ObjectiveSettings(), float(num_sequences), None)
        tokens = num_tokens * num_sequences
        return dict(
            attention=found.get("2.attention", 0) / tokens,
            mlp=found.get("2.mlp", 0) / tokens,
            outside=found.get("", 0) / tokens,
        )
    finally:
        destroy_groups()
