"""The Megatron-Core policy and critic: process groups, model, log-probs, losses, optimizer step."""

from gspo_mega.cpu import backend as _backend

_backend.install()
