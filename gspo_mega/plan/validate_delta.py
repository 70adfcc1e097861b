"""What a model with gated delta nets (Qwen3-Next, Qwen3.5), or the text part of a vision-language class, cannot be used
with: what Megatron or SGLang cannot do, and what has not been tried. Each text says which.
"""

from __future__ import annotations

from collections.abc import Iterator

from gspo_mega.base.errors import Violation
from gspo_mega.config.derived import critic_of
from gspo_mega.config.precision import publishes
from gspo_mega.config.schema import Config
from gspo_mega.models.delta_net import attention_interval
from gspo_mega.models.families import FAMILIES
from gspo_mega.models.spec import ModelSpec

# Why servers cannot be sent adapters. tests/unit/models/test_not_computed.py asks whether it is still true.
ADAPTERS_NOT_SERVED = (
    "gated delta nets: SGLang's classes do not say how wide their layers are with adapters (get_hidden_dim), and what"
    " it takes instead does not know out_proj and the gates in q_proj"
)
# Families with gated delta nets whose servers ran with FP8 weights.
_WITH_QUANTISED_SERVERS = ("qwen3_5", "qwen3_5_moe")


def validate_delta_nets(config: Config, spec: ModelSpec) -> Iterator[Violation]:
    """Yield what this model or its layout does not have; nothing for a model without gated delta nets."""
    if spec.zero_centred_norms and config.publish.verify_all_every > 1:
        yield Violation(
            "publish.verify_all_every",
            f"{config.publish.verify_all_every}: servers also hold 1 + the weight of each norm, which is verified"
            " together with the weight only if all tensors are",
            "1",
        )
    if spec.delta is None:
        return
    parallel = config.parallel
    if parallel.tensor > 1 and not parallel.sequence:
        yield Violation(
            "parallel.sequence",
            f"false with tensor {parallel.tensor}: Megatron does not add up the gradient of the norm in a gated delta"
            " net, of which every tensor rank sees its own heads",
            "true",
        )
    heads = spec.delta.key_heads // parallel.tensor
    if spec.delta.key_heads % parallel.tensor == 0 and heads % parallel.context:
        yield Violation(
            "parallel.context",
            f"{parallel.context} does not divide the {heads} key heads of gated delta nets on a tensor rank; context"
            " ranks exchange positions for heads",
            ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0),
        )
    if config.server.quantization != "none" and _has_servers(config):
        yield from _validate_quantised_servers(config, spec)
    if attention_interval(spec.delta.layers) is None and _has_servers(config):
        yield Violation(
            "model.path",
            "layer_types: SGLang can have attention only in every n-th layer (full_attention_interval)",
            "a model with attention in every n-th layer",
        )


def validate_text_part(config: Config, spec: ModelSpec) -> Iterator[Violation]:
    """Yield what has not been tried with the text part of a vision-language class; nothing for another model."""
    if not FAMILIES[spec.family].text_part:
        return
    if config.server.quantization != "none" and _has_servers(config):
        yield Violation(
            "server.quantization",
            f"{config.server.quantization} with {spec.family}: quantised servers of vision-language classes have not"
            " been tried",
            "none",
        )
    if critic_of(config.algorithm, config.critic) is not None:
        yield Violation(
            "algorithm",
            f"{config.algorithm} with {spec.family}: a critic is saved as a classifier, and transformers has none of a"
            " vision-language class",
            "an algorithm without a critic, such as gspo",
        )


def _has_servers(config: Config) -> bool:
    replays = config.train is not None and config.train.from_rollouts is not None
    return (publishes(config.train, config.sft) or config.eval is not None) and not replays


def _validate_quantised_servers(config: Config, spec: ModelSpec) -> Iterator[Violation]:
    quantization = config.server.quantization
    if spec.stacks_experts:
        yield Violation(
            "server.quantization",
            f"{quantization}, and {config.model.path} has a layer's experts in stacks, which the trainer can only send"
            " plain",
            "none, or a folder with experts one by one, as published FP8 folders have them",
        )
    elif spec.family not in _WITH_QUANTISED_SERVERS or quantization not in ("fp8", "fp8_block"):
        yield Violation(
            "server.quantization",
            f"{quantization} with {spec.family}: of models with gated delta nets, quantised servers were tried with"
            f" {' and '.join(_WITH_QUANTISED_SERVERS)}, in fp8 and fp8_block",
            "none",
        )
