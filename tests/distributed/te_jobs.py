"""What ranks that have loaded Transformer Engine run beside the jobs of the layouts."""

from __future__ import annotations

import torch
from layout_jobs import layout_config

from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.engine.process_groups import create_groups, destroy_groups
from gspo_mega.model.huggingface import read_model_spec
from gspo_mega.weights.gather import PolicyTensors
from gspo_mega.weights.hf_import import import_huggingface
from gspo_mega.weights.quantized import is_quantized


def fp32_copies(folder: str, parallel: dict, **sections) -> tuple[int, int, float, int]:
    """Of this rank's FP8 parameters after import: (how many, how many of their fp32 numbers are none of FP8's, the
    largest distance of one from the imported bf16 number, how many imported numbers are left behind on parameters).
    """
    spec = read_model_spec(folder)
    groups = create_groups(**parallel)
    try:
        engine = PolicyEngine(layout_config(folder, parallel, **sections), spec, groups, num_optimizer_steps=10)
        import_huggingface(folder, spec, groups, engine.chunks)
        imported = {
            id(p): p.exact_values.clone() for c in engine.chunks for p in c.parameters() if hasattr(p, "exact_values")
        }
        engine.after_weights_loaded()
        num, between, distance = 0, 0, 0.0
        for part in engine.optimizer.chained_optimizers:
            for models, shards in zip(part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True):
                for model, shard in zip(models, shards, strict=True):
                    if not is_quantized(model):
                        continue
                    num += 1
                    where = part._get_model_param_range_map(model)["param"]
                    want = imported[id(model)].view(-1)[where.start : where.end].float()
                    stored = model.detach().dequantize().float().view(-1)[where.start : where.end]
                    distance = max(distance, float((shard - want).abs().max()))
                    between += int((shard != stored).sum())
        left = sum(hasattr(p, "exact_values") for c in engine.chunks for p in c.parameters())
        assert all(
            torch.isfinite(value).all() for _, value in PolicyTensors(spec, groups, engine.chunks).stream(torch.float32)
        )
        return num, between, distance, left
    finally:
        destroy_groups()
