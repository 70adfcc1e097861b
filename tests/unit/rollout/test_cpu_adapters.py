"""Adapters (LoRA) of SGLang on a CPU: its modules make tensors that are not page-locked."""

from __future__ import annotations

import subprocess
import sys

# It changes torch for the whole process, as in a server's.
CHECK = """
import types, torch
from gspo_mega.rollout.server.sglang_cpu_adapters import use_plain_host_memory
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
