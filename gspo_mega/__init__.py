"""gspo_mega: GSPO on Megatron-Core policies with SGLang rollouts."""

__version__ = "0.2.0"
