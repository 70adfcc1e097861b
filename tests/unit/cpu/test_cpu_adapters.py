"""Adapters (LoRA) of SGLang on a CPU: its modules make tensors that are not page-locked; experts are plain products."""

from __future__ import annotations

import subprocess
import sys

import torch

from gspo_mega.cpu.sglang_adapters import experts_with_adapters

# It changes torch for the whole process, as in a server's.
CHECK = """
import types, torch
from gspo_mega.cpu.sglang_adapters import use_plain_host_memory
module = types.ModuleType("of_sglang")
module.torch = torch
use_plain_host_memory(module)
made = module.torch.tensor([1, 2], dtype=torch.int32, pin_memory=True, device="cpu")
assert made.tolist() == [1, 2] and made.dtype == torch.int32 and made.pin_memory() is made
assert module.torch.zeros((3,), dtype=torch.int32, pin_memory=True).tolist() == [0, 0, 0]
assert module.torch.cumsum is torch.cumsum
"""


def test_host_buffers_are_plain():
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_experts_with_adapters_are_the_merged_experts():
    """Two adapters and none in one batch, of another rank than the room for it; gate before up in every pair."""
    draw = torch.Generator().manual_seed(0)
    tokens, hidden, width, experts, room, slots = 9, 6, 5, 3, 4, 2

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    weights = random(experts, 2 * width, hidden), random(experts, hidden, width)
    gate_up = random(slots, experts, 2 * room, hidden), random(slots, experts, 2 * width, room)
    down = random(slots, experts, room, width), random(slots, experts, hidden, room)
    inputs, scores = random(tokens, hidden), random(tokens, 2)
    chosen = torch.tensor([[0, 1], [1, 2], [2, 0], [-1, 1], [0, 2], [1, 0], [2, 1], [0, 1], [1, -1]])
    own = torch.tensor([0, 1, -1, 0, 0, 1, 1, -1, 1])
    found = experts_with_adapters(inputs, (scores, chosen), weights, own, gate_up, down)
    want = torch.zeros_like(inputs)
    for token, slot in enumerate(own.tolist()):
        for place, expert in enumerate(chosen[token].tolist()):
            if expert < 0:
                continue  # another rank's
            into, out_of = weights[0][expert].clone(), weights[1][expert].clone()
            if slot >= 0:
                (a, b), (c, d) = ((half[slot, expert] for half in pair) for pair in (gate_up, down))
                into[:width] += b[:width] @ a[:room]
                into[width:] += b[width:] @ a[room:]
                out_of += d @ c
            gate, up = (into @ inputs[token]).chunk(2)
            want[token] += scores[token, place] * (out_of @ (torch.sigmoid(gate) * gate * up))
    assert (found - want).abs().max() < 1e-12 * want.abs().max()
