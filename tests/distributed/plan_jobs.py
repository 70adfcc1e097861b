"""What ranks run in the tests of the plan: an engine is built, takes a step of zero gradients, and is counted."""

from __future__ import annotations

import torch

from gspo_mega.config.schema import Config
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.engine.process_groups import create_groups, destroy_groups
from gspo_mega.model.huggingface import read_model_spec


def count_state(cases: list[dict]) -> list[dict]:
    """For each case (a resolved configuration, `config`, as JSON values) this rank's elements and bytes."""
    return [_count(Config.model_validate_json(case["config"])) for case in cases]


def _count(config: Config) -> dict:
    parallel = config.parallel
    groups = create_groups(
        tensor=parallel.tensor, pipeline=parallel.pipeline, virtual_pipeline=parallel.virtual_pipeline,
        context=parallel.context, expert=parallel.expert, expert_tensor=parallel.expert_tensor,
    )  # fmt: skip
    try:
        engine = PolicyEngine(config, read_model_spec(config.model.path), groups, num_optimizer_steps=1)
        for chunk in engine.wrapped:
            chunk.zero_grad_buffer()
        engine.optimizer.zero_grad()
        engine._apply()  # Adam makes its moments in the first step
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
        )
    finally:
        destroy_groups()


def _storages(tensors: list[torch.Tensor]) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors}


def _storage_bytes(tensors: list[torch.Tensor], without: set[int] = frozenset()) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}
    return sum(size for pointer, size in storages.items() if pointer not in without)
