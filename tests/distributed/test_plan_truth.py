"""What the plan says a rank holds is what the engine holds, to the element and the byte, on every layout of the matrices."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from gspo_mega.certify.cases import case_config
from gspo_mega.config import load_config
from gspo_mega.model.huggingface import read_model_spec
from gspo_mega.plan import resolve_layout
from gspo_mega.plan.shares import ModelShares, state_bytes

CONFIGS = Path(__file__).parents[2] / "configs"
# What does not change the state: one of each would be enough, and each costs ranks' time.
SAME_STATE = ("recompute.", "batch.", "moe.", "rollout.")


def cases():
    """(name, number of ranks, configuration) of every layout in the matrices, each state once."""
    seen = set()
    for kind in ("dense", "moe"):
        file = CONFIGS / f"certify_{kind}.yaml"
        certify = load_config(file, (), "certify").config.certify
        for case in certify.cases:
            state = (kind, case.ranks, str(sorted((k, str(v)) for k, v in case.set.items() if not k.startswith(SAME_STATE))))
            if case.refused or state in seen:
                continue
            seen.add(state)
            model = CONFIGS.parent / case.set.get("model.path", f"configs/models/certify_{kind}.json")
            config = case_config(file, case, [f"model.path={model}"]).config
            config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(model)})})
            yield f"{kind} {case.name}", case.ranks, config


def test_parameters_gradients_and_optimizer_state_are_those_of_the_engine(rank_pools):
    """Elements exact, bytes exact, padding its own number."""
    by_ranks = defaultdict(list)
    for name, ranks, config in cases():
        by_ranks[ranks].append((name, config))
        if config.optimizer.distributed:  # and in bf16, where main parameters are copies
            by_ranks[ranks].append((f"{name} bf16", config.model_copy(update={"precision": "bf16"})))
    assert sum(map(len, by_ranks.values())) > 50
    padded = 0
    for ranks, group in sorted(by_ranks.items()):
        found = rank_pools(ranks).run("plan_jobs:count_state", cases=[{"config": config.model_dump_json()} for _, config in group])
        for index, (name, config) in enumerate(group):
            layout = resolve_layout(config, spec := read_model_spec(config.model.path))
            shares = ModelShares(spec)
            for rank in range(ranks):
                stage = shares.state(config, layout, layout.coordinates(rank).pipeline)
                state, real = stage.of_rank(rank), found[rank][index]
                size = state_bytes(config, state)
                padded += state.padding > 0
                assert dict(
                    parameters=state.parameters, gradients=state.gradients, optimized=state.optimized,
                    weight_bytes=size.weights + size.padding - state.padding * 4, gradient_bytes=state.gradients * 4,
                    main_bytes=size.main, moment_bytes=size.moments,
                ) == real, f"{name}, rank {rank}"  # fmt: skip
                assert stage.largest.optimized >= state.optimized
    assert padded > 0  # else the padding's arithmetic was not tried
