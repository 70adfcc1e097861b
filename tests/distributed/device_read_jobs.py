"""What a rank runs in the tests of device reads: passes over few and over many micro-batches."""

from __future__ import annotations

import traceback

import torch
from correction_jobs import mini_batches
from device_reads import DeviceReads
from layout_jobs import layout_config

from gspo_mega.algorithm.objective import ObjectiveSettings
from gspo_mega.base.errors import NumericsError
from gspo_mega.checkpoint.hf_import import import_huggingface
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.engine.process_groups import create_groups, destroy_groups
from gspo_mega.models.huggingface import read_model_spec

# Of these lines' reads none makes a GPU wait between micro-batches.
_ELSEWHERE = {
    "engine/device_batch.py": "of host arrays, before they are sent to the device",
    "embeddings/rope_utils.py": "Megatron's plain rotary embedding; on a GPU it is fused",
    "cpu/packed_sdpa.py": "the attention of a CPU",
}
# Functions of other files: which rows a rank holds, of host arrays; the report, when the pass is over.
_IN = [("algorithm/terms.py", ("local_rows", "local_positions")), ("engine/policy.py", ("collect", "_token_gaps"))]


class Placed(DeviceReads):
    """Says for each read which lines asked for it, without those that are _ELSEWHERE."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        before = len(self.names)
        result = super().__torch_function__(func, types, args, kwargs)
        if len(self.names) > before:
            frames = [f for f in traceback.extract_stack()[:-1] if "/torch/" not in f.filename]
            if any(f.filename.endswith(file) and f.name in names for f in frames[-3:] for file, names in _IN) or frames[
                -1
            ].filename.endswith(tuple(_ELSEWHERE)):
                self.names.pop()
            else:
                places = [f"{'/'.join(f.filename.split('/')[-2:])}:{f.lineno}" for f in frames[-3:]]
                self.names[-1] += " at " + " < ".join(reversed(places))
        return result


def reads(folder: str) -> dict:
    """The reads of an old pass and of a training pass, over one micro-batch and over three. What a log-prob that is
    not finite raises, and the weights' change then.
    """
    groups = create_groups()
    try:
        config = layout_config(folder, {"expert_tensor": 1})
        engine = PolicyEngine(config, read_model_spec(folder), groups, num_optimizer_steps=10)
        import_huggingface(folder, engine.spec, groups, engine.chunks)
        engine.after_weights_loaded()
        packs = mini_batches(0, 1, 2, 2)[0]
        engine.policy_gradients(packs, ObjectiveSettings(), 11.0, engine.old_pass(packs))  # what is made once
        found = {}
        for num in (1, 3):
            with Placed() as old_reads:
                old = engine.old_pass(packs[:num])
            engine.correct([old])
            with Placed() as train_reads:
                engine.policy_gradients(packs[:num], ObjectiveSettings(), 11.0, old)
            found[num] = {"old": old_reads.names, "train": train_reads.names}
        before = [p.detach().clone() for chunk in engine.chunks for p in chunk.parameters()]
        spoilt = engine.old_pass(packs)
        engine.correct([spoilt])
        spoilt.micro_batches[1].log_probs[3] = torch.nan
        try:
            engine.train_mini_batch(packs, ObjectiveSettings(), 11.0, spoilt)
            found["error"] = "nothing was refused"
        except NumericsError as error:
            found["error"] = str(error)
        after = [p.detach() for chunk in engine.chunks for p in chunk.parameters()]
        found["same"] = all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        return found
    finally:
        destroy_groups()
