"""The Megatron-Core policy: groups, model, log-probs, loss, optimizer step."""

from gspo_mega.engine import cpu as _cpu

_cpu.install()
