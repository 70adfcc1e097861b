"""What ranks that have loaded Transformer Engine run beside the jobs of the layouts."""

from __future__ import annotations

from pathlib import Path

import torch
from layout_jobs import layout_config, recorded_sequences, shard

from gspo_mega.algorithm.objective import ObjectiveSettings
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.checkpoint.gather import PolicyTensors
from gspo_mega.checkpoint.hf_import import import_huggingface
from gspo_mega.checkpoint.load import TrainState, find_checkpoint, load_checkpoint, load_weights
from gspo_mega.checkpoint.quantized import is_fp8_parameter
from gspo_mega.checkpoint.save import Saver
from gspo_mega.config.schema import Checkpoint
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.engine.process_groups import create_groups, destroy_groups
from gspo_mega.engine.reference import ReferencePolicy
from gspo_mega.models.huggingface import read_model_spec


def _copies(engine: PolicyEngine):
    """(FP8 parameter, this rank's run of its numbers, the optimizer's fp32 numbers there), one by one."""
    for part in engine.optimizer.chained_optimizers:
        groups = part.model_float16_groups, part.shard_fp32_from_float16_groups, part.shard_float16_groups
        for group in zip(*groups, strict=True):
            for model, numbers, stored in zip(*group, strict=True):
                if is_fp8_parameter(model):
                    where = part._get_model_param_range_map(model)["param"]
                    # Where Transformer Engine's Adam owns them.
                    numbers = part.optimizer.state[stored]["master_param"] if numbers is None else numbers
                    yield model, slice(where.start, where.end), numbers


def fp32_copies(folder: str, parallel: dict, converted: str | None = None, **sections) -> tuple[int, int, float, int]:
    """Of this rank's FP8 parameters after import, from `converted` if it is given: (how many, how many of their fp32
    numbers are none of FP8's, the largest distance of one from the bf16 number of `folder`, how many loaded numbers are
    left behind on parameters, those of a frozen reference too).
    """
    spec = read_model_spec(folder)
    groups = create_groups(**parallel)
    try:
        config = layout_config(folder, parallel, **sections)
        engine = PolicyEngine(config, spec, groups, num_optimizer_steps=10)
        import_huggingface(folder, spec, groups, engine.chunks)
        imported = {
            id(p): vars(p).pop("exact_values")
            for chunk in engine.chunks
            for p in chunk.parameters()
            if hasattr(p, "exact_values")
        }
        if converted is None:
            import_huggingface(folder, spec, groups, engine.chunks)
        else:
            load_weights(Path(converted), engine)
        engine.after_weights_loaded()
        num, between, distance = 0, 0, 0.0
        for model, run, numbers in _copies(engine):
            num += 1
            want = imported[id(model)].view(-1)[run].float()
            stored = model.detach().dequantize().float().view(-1)[run]
            distance = max(distance, float((numbers - want).abs().max()))
            between += int((numbers != stored).sum())
        reference = ReferencePolicy(config, spec, groups)
        import_huggingface(folder, spec, groups, reference.chunks)
        chunks = [*engine.chunks, *reference.chunks]
        left = sum(hasattr(p, "exact_values") for chunk in chunks for p in chunk.parameters())
        assert all(
            torch.isfinite(value).all() for _, value in PolicyTensors(spec, groups, engine.chunks).stream(torch.float32)
        )
        return num, between, distance, left
    finally:
        destroy_groups()


def restored_copies(folder: str, other: str, run_dir: str, parallel: dict, **sections) -> dict[str, float]:
    """Two steps from `folder`, saved, and loaded into an engine that began with `other`. Of this rank's FP8 parameters:
    `num`; how many of their fp32 numbers are `between` FP8's; the largest relative distance of a stored part `from_fp32`
    ones; how many fp32 and how many stored numbers are `wrong` after loading. Also how many log-probs of a pass are
    `differing` then.
    """
    spec = read_model_spec(folder)
    groups = create_groups(**parallel)
    try:
        config = layout_config(folder, parallel, **sections)
        first = PolicyEngine(config, spec, groups, num_optimizer_steps=10)
        import_huggingface(folder, spec, groups, first.chunks)
        first.after_weights_loaded()
        align = 32 * groups.context.size * groups.tensor.size
        batch = shard(recorded_sequences(), groups.data.rank, groups.data.size, align)
        for _ in range(2):  # recipe `delayed` rounds with another scale in each
            first.train_mini_batch(batch, ObjectiveSettings(), 11.0, None)
        saver = Saver(RunFolder(run_dir), first, Checkpoint())
        saver.save(TrainState(step=2, num_optimizer_steps=2, prompts={"position": 2}))
        saver.finish()
        second = PolicyEngine(config, spec, groups, num_optimizer_steps=10)
        import_huggingface(other, spec, groups, second.chunks)
        second.after_weights_loaded()
        checkpoint, _ = find_checkpoint(RunFolder(run_dir), groups)
        assert checkpoint is not None
        load_checkpoint(checkpoint, second)
        seen = dict(num=0, between=0, from_fp32=0.0, wrong=0, stored_wrong=0)
        for (a, run, want), (b, _, got) in zip(_copies(first), _copies(second), strict=True):
            before, after = (p.detach().dequantize(dtype=torch.float32) for p in (a, b))
            mine = before.view(-1)[run]
            seen["num"] += 1
            seen["between"] += int((want != mine).sum())
            seen["from_fp32"] = max(seen["from_fp32"], float((mine - want).norm() / want.norm()))
            seen["wrong"] += int((want != got).sum())
            seen["stored_wrong"] += int((before != after).sum())
        passes = [engine.old_pass(batch).micro_batches for engine in (first, second)]
        seen["differing"] = sum(int((a.log_probs != b.log_probs).sum()) for a, b in zip(*passes, strict=True))
        return seen
    finally:
        destroy_groups()
