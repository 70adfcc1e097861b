"""gspo_mega: GSPO on Megatron-Core policies with SGLang rollouts."""

__version__ = "0.1.0"
