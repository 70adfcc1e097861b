"""Record what TRL's own loss code computes, for `test_trl.py`: `python tests/numerics/record_trl.py OUT.json`.

Runs `GRPOTrainer._compute_loss` of an installed TRL (recorded with 1.16.0), which neither the product nor its tests
need, on random log-probs given in place of a model's. Install it apart, for instance in a folder of its own:
`pip install trl==1.16.0`. The trainer object is made without its constructor, which would want a model and a
dataset; every attribute that `_compute_loss` reads is set below, and nothing of its arithmetic is replaced.
"""

from __future__ import annotations

import json
import sys
import types
from collections import defaultdict
from pathlib import Path

import torch
import trl
from accelerate import Accelerator
from trl import GRPOTrainer

SETTINGS = [
    # importance_sampling_level, loss_type, epsilon_low, epsilon_high, delta
    ("sequence", "grpo", 3e-4, 4e-4, None),
    ("sequence", "grpo", 3e-3, 4e-3, None),
    ("sequence", "grpo", 0.2, 0.27, 1.5),
    ("sequence", "luspo", 3e-4, 4e-4, None),
    ("token", "grpo", 0.2, 0.27, None),
    ("token", "grpo", 0.2, 0.27, 1.5),
    ("token", "bnpo", 0.2, 0.27, None),
    ("token", "dr_grpo", 0.2, 0.27, None),
]
SCALES = (3e-4, 3e-3, 0.3)
MAX_COMPLETION_LENGTH = 12


def trainer_for(level, loss_type, epsilon_low, epsilon_high, delta, log_probs):
    trainer = object.__new__(GRPOTrainer)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (log_probs, torch.zeros_like(log_probs), None)
    trainer.importance_sampling_level, trainer.loss_type = level, loss_type
    trainer.epsilon_low, trainer.epsilon_high = epsilon_low, epsilon_high
    trainer.args = types.SimpleNamespace(delta=delta)
    trainer.model = types.SimpleNamespace(training=True)
    trainer.accelerator = Accelerator(cpu=True)
    trainer._metrics = {"train": defaultdict(list)}
    trainer.aux_loss_enabled = trainer.use_vllm = trainer._entropy_bonus_enabled = False
    trainer.top_entropy_quantile, trainer.beta, trainer.off_policy_mask_threshold = 1.0, 0.0, None
    trainer.current_gradient_accumulation_steps = 1
    trainer.max_completion_length = MAX_COMPLETION_LENGTH
    return trainer


def record(settings, scale, generator):
    lengths = [int(torch.randint(1, MAX_COMPLETION_LENGTH + 1, (), generator=generator)) for _ in range(6)]
    mask = torch.tensor([[float(t < n) for t in range(MAX_COMPLETION_LENGTH)] for n in lengths], dtype=torch.float64)
    old = -torch.rand(mask.shape, generator=generator, dtype=torch.float64) * 3
    # A drift a sequence beside the noise a token, so that every clip is met from both sides.
    drift = torch.randn(len(lengths), 1, generator=generator, dtype=torch.float64) * scale
    log_probs = (
        old + drift + torch.randn(mask.shape, generator=generator, dtype=torch.float64) * scale
    ).requires_grad_()
    advantages = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    trainer = trainer_for(*settings, log_probs)
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": mask,
        "old_per_token_logps": old,
        "advantages": advantages,
    }
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    metrics = {
        key: values[0]
        for key, values in trainer._metrics["train"].items()
        if key in ("clip_ratio/low_mean", "clip_ratio/high_mean")
    }
    names = ("importance_sampling_level", "loss_type", "epsilon_low", "epsilon_high", "delta")
    return {
        "settings": dict(zip(names, settings, strict=True)) | {"max_completion_length": MAX_COMPLETION_LENGTH},
        "log_probs": log_probs.tolist(),
        "old_log_probs": old.tolist(),
        "mask": mask.tolist(),
        "advantages": advantages.tolist(),
        "loss": loss.item(),
        "gradient": log_probs.grad.tolist(),
        "metrics": metrics,
    }


def main() -> None:
    generator = torch.Generator().manual_seed(20250718)
    cases = [record(settings, scale, generator) for settings in SETTINGS for scale in SCALES]
    content = {
        "trl": trl.__version__,
        "torch": torch.__version__,
        "function": "trl.GRPOTrainer._compute_loss",
        "cases": cases,
    }
    Path(sys.argv[1]).write_text(json.dumps(content) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
