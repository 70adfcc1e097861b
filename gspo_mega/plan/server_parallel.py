"""How a server's weights and cache are divided over its GPUs: tensor, expert, and data-parallel attention.

Owns the rules, which are SGLang 0.5.23's (`moe_ep_setup.py`, `parallel_hook.py`, the `_A2A_EP_SPANNING_BACKENDS` of
`overrides.py`), and how many ranks share each part of the model. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from gspo_mega.base.errors import Violation
from gspo_mega.config.schema import Config
from gspo_mega.config.server_precision import server_dtype
from gspo_mega.models.families import TensorEntry
from gspo_mega.models.spec import ModelSpec
from gspo_mega.plan.model_division import divisors, nearest
from gspo_mega.plan.verification import is_on_gpu

# Families whose attention SGLang divides over a group of its own; the others' takes the whole tensor group.
WITH_DATA_PARALLEL_ATTENTION = ("qwen3", "qwen3_moe", "deepseek_v3")


def attention_ranks(config: Config) -> int:
    """Ranks that divide the heads among them: those of one data-parallel group of the attention."""
    return max(1, config.server.tensor // config.server.attention_data)


def expert_ranks(config: Config) -> int:
    """Ranks that share one expert."""
    return max(1, config.server.tensor // config.server.expert)


def ranks_that_share(config: Config, entry: TensorEntry) -> int:
    """Over how many of a server's ranks one tensor is divided. Norms and the router, on every rank, count as divided:
    they are small.
    """
    server = config.server
    if entry.expert is not None:
        return server.tensor
    if server.attention_data > 1 and (".self_attn." in entry.name or entry.stage == "first"):
        return 1 if entry.stage == "first" else attention_ranks(config)
    if server.expert_dispatcher == "deepep" and "shared_expert" in entry.name:
        return 1
    return server.tensor


def divides_attention(config: Config, spec: ModelSpec, tensor: int) -> bool:
    """Can `tensor` ranks hold the attention? SGLang copies a key-value head where there are more ranks than heads."""
    if tensor % config.server.attention_data:
        return False
    ranks, kv_heads = tensor // config.server.attention_data, spec.num_kv_heads
    return spec.num_heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def check_server_parallel(config: Config, spec: ModelSpec, device: Literal["cpu", "gpu"] | None) -> Iterator[Violation]:
    """What SGLang would refuse at a server's start, or change without a word."""
    server = config.server
    if server.tensor % server.attention_data:
        yield Violation(
            "server.attention_data",
            f"{server.attention_data} does not divide server.tensor {server.tensor}",
            nearest(server.attention_data, divisors(server.tensor)),
        )
    if server.attention_data > 1 and spec.family not in WITH_DATA_PARALLEL_ATTENTION:
        yield Violation(
            "server.attention_data",
            f"{server.attention_data}: SGLang divides the attention of {spec.family} over all of a server's ranks;"
            f" it can do otherwise with {', '.join(WITH_DATA_PARALLEL_ATTENTION)}",
            "1",
        )
    if spec.moe is None:
        if server.expert > 1 or server.expert_dispatcher != "none":
            yield Violation("server.expert", f"{server.expert}, but the model ({spec.family}) has no experts", "1")
        return
    both = [size for size in divisors(server.tensor) if spec.moe.num_experts % size == 0]
    if server.expert not in both:
        yield Violation(
            "server.expert",
            f"{server.expert} does not divide both server.tensor {server.tensor} and the model's"
            f" {spec.moe.num_experts} experts",
            nearest(server.expert, both),
        )
    if server.expert_dispatcher != "none":
        if server.expert != server.tensor or server.expert == 1:
            yield Violation(
                "server.expert_dispatcher",
                f"{server.expert_dispatcher} exchanges tokens between all ranks of a server: SGLang would set"
                f" server.expert from {server.expert} to server.tensor {server.tensor}",
                f"none, or `server.expert: {server.tensor}`" if server.tensor > 1 else "none",
            )
        if is_on_gpu(config, device) is False:
            yield Violation(
                "server.expert_dispatcher",
                f"{server.expert_dispatcher} without GPUs: it is made of their kernels",
                "none",
            )
    on_cpu = is_on_gpu(config, device) is False
    if on_cpu and server.expert > 1 and (server_dtype(config) != "fp32" or server.quantization != "none"):
        yield Violation(
            "server.expert",
            f"{server.expert} without GPUs: SGLang computes experts of other ranks there in fp32 alone, not quantized",
            "1, or `server.dtype: fp32` with `server.quantization: none`",
        )
