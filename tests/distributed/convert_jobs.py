"""What ranks run in the conversion tests: load a converted checkpoint in each layout and bring its tensors out."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from family_jobs import SIZES
from layout_jobs import layout_config
from safetensors.torch import load_file

from gspo_mega.base.errors import CheckpointError
from gspo_mega.checkpoint.gather import PolicyTensors
from gspo_mega.checkpoint.load import load_weights
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.engine.process_groups import create_groups, destroy_groups
from gspo_mega.models.huggingface import read_model_spec


def loaded(source: str, converted: str, layouts: dict[str, dict], precision: str = "fp32") -> dict | None:
    """For each layout, the tensors of `source` that the engine does not hold bit for bit after loading `converted`.
    Rank 0.
    """
    seen = {}
    want = load_file(Path(source) / "model.safetensors")
    for name, parallel in layouts.items():
        parallel = {"expert_tensor": 1, **parallel}
        spec = read_model_spec(converted)
        groups = create_groups(**{size: parallel.get(size, 1) for size in SIZES})
        try:
            engine = PolicyEngine(
                layout_config(source, parallel, precision=precision), spec, groups, num_optimizer_steps=1
            )
            load_weights(Path(converted), engine)
            engine.after_weights_loaded()
            dtype = next(iter(want.values())).dtype
            found = {n: t.clone() for n, t in PolicyTensors(spec, groups, engine.chunks).stream(dtype)}
            seen[name] = sorted(n for n in want if found and not torch.equal(found[n], want[n]))
        finally:
            destroy_groups()
    return seen if dist.get_rank() == 0 else None


def refused(converted: str, shape: str) -> str:
    """The error that loading `converted` into a model of `shape` ends with."""
    groups = create_groups(tensor=1, pipeline=1, context=1, expert=1, expert_tensor=1)
    try:
        engine = PolicyEngine(
            layout_config(shape, {"expert_tensor": 1}), read_model_spec(shape), groups, num_optimizer_steps=1
        )
        load_weights(Path(converted), engine)
    except CheckpointError as error:
        return str(error)
    finally:
        destroy_groups()
    return "nothing was refused"
