"""What the precisions of a server need: bytes of its weights and of its cache, sides that blocks divide, and what
SGLang 0.5.23 can do with them on a GPU.

Owns the rules; what the keys mean is `config/server_precision.py`'s. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from gspo_mega.base.errors import Violation
from gspo_mega.config.schema import Config
from gspo_mega.config.server_precision import BLOCK, capability_problem, publishes, server_dtype
from gspo_mega.models.block_fp8 import is_quantizable
from gspo_mega.models.families import TensorEntry, hf_tensors
from gspo_mega.models.spec import ModelSpec
from gspo_mega.plan.gpus import GPUS
from gspo_mega.plan.server_parallel import attention_ranks, expert_ranks, ranks_that_share
from gspo_mega.plan.verification import is_on_gpu

DTYPE_BYTES = {"fp32": 4, "bf16": 2}
_SCALE_BYTES = 4
# Compute capability of Ada, the first with e4m3.
_FIRST_E4M3 = (8, 9)
# Without a GPU SGLang 0.5.23 pads the widths of MLPs to multiples of this, for each of a server's tensor ranks
# (`adjust_config_with_unaligned_cpu_tp`).
_CPU_WIDTH = 32
# Families whose output layer SGLang 0.5.23 never ties to the embedding, whatever config.json says (its `models/*.py`
# make a ParallelLMHead of its own): a folder without lm_head.weight leaves it at random values.
WITH_OWN_HEAD = ("qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe", "gpt_oss")


def weight_bytes(config: Config, spec: ModelSpec, total_parameters: int) -> int:
    """Bytes of one server's weights, all its ranks together: a byte for each quantized element, its scales, and the
    rest in the server's dtype.
    """
    size = DTYPE_BYTES[server_dtype(config)]
    if config.server.quantization == "none":
        return total_parameters * size
    quantized = [entry for entry in hf_tensors(spec) if is_quantizable(entry)]
    elements = sum(entry.num_elements for entry in quantized)
    scales = sum(_num_scales(config.server.quantization, entry) for entry in quantized)
    return (total_parameters - elements) * size + elements + scales * _SCALE_BYTES


def rank_weight_bytes(config: Config, spec: ModelSpec, total_parameters: int) -> int:
    """Bytes of the weights of one of a server's ranks."""
    server = config.server
    if server.attention_data == 1 and server.expert_dispatcher == "none":
        return weight_bytes(config, spec, total_parameters) // server.tensor
    size, found = DTYPE_BYTES[server_dtype(config)], 0.0
    for entry in hf_tensors(spec):
        quantized = server.quantization != "none" and is_quantizable(entry)
        scales = _num_scales(server.quantization, entry) * _SCALE_BYTES if quantized else 0
        found += (entry.num_elements * (1 if quantized else size) + scales) / ranks_that_share(config, entry)
    return round(found)


def cache_element_bytes(config: Config) -> int:
    """Bytes of one element of the cache."""
    return 1 if config.server.kv_cache == "fp8" else DTYPE_BYTES[server_dtype(config)]


def _num_scales(quantization: str, entry: TensorEntry) -> int:
    rows, columns = entry.shape
    if quantization == "fp8_block":
        return -(-rows // BLOCK[0]) * -(-columns // BLOCK[1])
    return 1 if quantization == "fp8" and entry.expert is not None else rows


def check_served_model(
    config: Config, spec: ModelSpec, device: Literal["cpu", "gpu"] | None = None
) -> Iterator[Violation]:
    """What SGLang would serve as another model than the folder holds. Only for a run that samples. `device`: the
    ranks', where it is known.
    """
    samples = publishes(config) or config.eval is not None
    replays = config.train is not None and config.train.from_rollouts is not None
    width = _CPU_WIDTH * config.server.tensor
    padded = [f"{name} {size}" for name, size in _widths(spec) if size % width]
    if publishes(config) and not replays and padded and is_on_gpu(config, device) is False:
        yield Violation(
            "model.path",
            f"{' and '.join(padded)}: without a GPU SGLang 0.5.23 pads such widths to multiples of {_CPU_WIDTH} x"
            f" server.tensor {config.server.tensor} = {width}, and no update of the weights can be verified",
            f"a model whose widths {width} divides, or GPUs",
        )
    if samples and not replays and spec.tie_word_embeddings and spec.family in WITH_OWN_HEAD:
        yield Violation(
            "model.path",
            f"tie_word_embeddings is true in its config.json, and SGLang 0.5.23 does not tie them in {spec.family}: its"
            " servers would sample from an output layer of random values",
            "a folder with `tie_word_embeddings: false` and a copy of model.embed_tokens.weight as lm_head.weight",
        )


def _widths(spec: ModelSpec) -> Iterator[tuple[str, int]]:
    """(name, width) of the MLPs that a model has."""
    moe = spec.moe
    if moe is None or moe.num_dense_layers:
        yield "intermediate_size", spec.intermediate_size
    if moe is not None:
        yield "the experts' width", moe.expert_intermediate_size
        if moe.shared_intermediate_size:
            yield "the shared experts' width", moe.shared_intermediate_size


def check_server_precision(
    config: Config, spec: ModelSpec, device: Literal["cpu", "gpu"] | None
) -> Iterator[Violation]:
    """What SGLang would refuse at a server's start, or at the first publish. `device`: the ranks', None if unknown."""
    server = config.server
    gpu = config.cluster.gpu if device != "cpu" else None
    lacks_e4m3 = gpu is not None and GPUS[gpu].capability < _FIRST_E4M3
    # Where no backend is named, SGLang takes Triton for latent attention, and FlashInfer, which reads e4m3, else.
    by_triton = server.attention_backend == "triton" or (server.attention_backend is None and spec.latent is not None)
    if server.kv_cache == "fp8" and lacks_e4m3 and by_triton:
        yield Violation(
            "server.kv_cache",
            f"fp8 on {gpu}: Triton, which computes this attention there, has no e4m3 before compute capability 8.9",
            "auto" if spec.latent is not None else "auto, or `server.attention_backend: flashinfer`",
        )
    if server.quantization == "none":
        return
    if server.quantization == "fp8_block" and (sides := list(_undivided(config, spec))):
        yield Violation(
            "server.quantization",
            f"fp8_block needs these sides of a linear layer on one of a server's {server.tensor} ranks to be multiples"
            f" of {BLOCK[0]}: {', '.join(sides)}",
            "none, or a smaller server.tensor" if server.tensor > 1 else "none, fp8, int8",
        )
    if not is_on_gpu(config, device):
        return
    if server_dtype(config) != "bf16":
        yield Violation(
            "server.quantization",
            f"{server.quantization} with activations in {server_dtype(config)}: on a GPU SGLang's products of quantized"
            " operands take bf16",
            "`server.dtype: bf16`",
        )
    if server.quantization == "int8":
        yield Violation(
            "server.quantization",
            "int8: on a GPU SGLang takes INT8 weights from a checkpoint only, and cannot load others into a running"
            " server",
            "fp8_block, or none",
        )
    elif server.quantization == "fp8" and publishes(config):
        yield Violation(
            "server.quantization",
            "fp8: on a GPU SGLang cannot load new weights into layers that it quantized while loading, so that every"
            " publish would fail; without `train` and `sft` (`gspo-mega eval`) it can be used",
            "fp8_block, or none",
        )
    gpu = config.cluster.gpu
    if gpu is not None and (
        problem := capability_problem(server.quantization, GPUS[gpu].capability, publishes(config))
    ):
        yield Violation("server.quantization", f"cluster.gpu {gpu}: {problem}", "none")


def _undivided(config: Config, spec: ModelSpec) -> Iterator[str]:
    """Sides of one rank's linear layers that blocks do not divide. SGLang wants whole blocks in every part of a layer
    that has parts (query, key, value; gate, up) or is cut over ranks, and in every input: 128 values of a token share a
    scale.
    """
    tensor, attention, heads = config.server.tensor, attention_ranks(config), spec.num_heads
    sides = {
        "hidden size": (spec.hidden_size, 1),
        "attention output (heads x head size)": (heads * spec.value_head_dim, attention),
    }
    if spec.latent is None:
        sides["query size (heads x head size)"] = (heads * spec.head_dim, attention)
        sides["key size and value size (heads x head size)"] = (
            spec.num_kv_heads * spec.head_dim,
            min(attention, spec.num_kv_heads),  # above that, ranks keep copies of a head
        )
    else:
        latent = spec.latent
        sides["kv_lora_rank"] = (latent.key_value_rank, 1)
        if latent.query_rank is not None:
            sides["q_lora_rank"] = (latent.query_rank, 1)
        if attention > 1:
            both = heads * (latent.content_dim + latent.value_dim)
            sides["query size (heads x head size)"] = (heads * spec.head_dim, attention)
            sides["keys' and values' size (heads x both)"] = (both, attention)
    if not spec.has_experts(0):
        sides["intermediate size"] = (spec.intermediate_size, tensor)
    if spec.moe is not None:
        sides["experts' intermediate size"] = (spec.moe.expert_intermediate_size, expert_ranks(config))
        if spec.moe.shared_intermediate_size:
            sides["shared experts' intermediate size"] = (spec.moe.shared_intermediate_size, tensor)
    for name, (size, ranks) in sides.items():
        if size % ranks == 0 and size // ranks % BLOCK[0]:
            yield f"{name} {size}" + (f" / {ranks} ranks" if ranks > 1 else "")
