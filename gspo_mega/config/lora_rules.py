"""What contradicts adapters (`lora`) in every model. What follows from the model is `plan/adapter_shares.py`'s."""

from __future__ import annotations

from collections.abc import Iterator

from gspo_mega.base.errors import Violation
from gspo_mega.config.on_publish import on_publish
from gspo_mega.config.schema import Config
from gspo_mega.config.server_precision import publishes


def publishes_adapters(config: Config) -> bool:
    """Do servers get adapters alone, and hold the weights of `model.path` all the time?"""
    return config.lora is not None and config.publish.lora == "adapter" and publishes(config)


def _served_violations(config: Config) -> Iterator[Violation]:
    """What contradicts `publish.lora: adapter`."""
    if config.publish.lora != "adapter":
        return
    said = "with `publish.lora: adapter`"
    if config.lora is None:
        yield Violation("publish.lora", "adapter without `lora`: there are no adapters to publish; valid then: merged")
        return
    if config.publish.method != "disk":
        yield Violation(
            "publish.method", f"{config.publish.method} {said}: SGLang loads adapters from a folder; valid then: disk"
        )
    if config.model.weights is not None:
        yield Violation(
            "model.weights", f"set {said}: servers hold the weights of model.path; leave it out, or publish them merged"
        )
    if config.train is not None and config.train.rollouts_only:
        yield Violation(
            "publish.lora", "adapter with `train.rollouts_only`: nothing is trained or published; valid then: merged"
        )
    if config.server.quantization != "none":
        yield Violation(
            "server.quantization",
            f"{config.server.quantization} {said}: adapters beside quantized layers were not compared with the"
            " trainer's; valid then: none",
        )
    if config.server.speculative is not None:
        yield Violation(
            "server.speculative", f"set {said}: the draft would propose tokens of a policy without them; leave it out"
        )
    if config.server.attention_data > 1:
        yield Violation(
            "server.attention_data",
            f"{config.server.attention_data} {said}: SGLang then takes only adapters that stay loaded; valid then: 1",
        )
    if on_publish(config.rollout) == "continue_with_cache":
        yield Violation(
            "rollout.on_publish",
            f"continue_with_cache {said}: an open request keeps the adapter that it began with, and SGLang does not"
            " unload that before the request ends; valid then: wait, continue",
        )
    if config.eval is not None and not config.eval.blocking:
        yield Violation(
            "eval.blocking",
            f"false {said}: a server that is set aside loads a version as whole weights; valid then: true",
        )


def lora_violations(config: Config) -> Iterator[Violation]:
    yield from _served_violations(config)
    lora = config.lora
    if lora is None:
        return
    if config.precision == "fp8":
        yield Violation(
            "precision", "fp8 with `lora`: adapters lie beside Megatron's plain layers; valid then: bf16, fp32"
        )
    if config.engine.transformer_engine:
        yield Violation(
            "engine.transformer_engine",
            "true with `lora`: adapters lie beside Megatron's plain layers, because Transformer Engine's fuse a norm"
            " into the layer after it; valid then: false, or leave it out",
        )
    if lora.dropout > 0 and config.parallel.tensor > 1:
        yield Violation(
            "lora.dropout",
            f"{lora.dropout:g} with parallel.tensor {config.parallel.tensor}: tensor ranks would drop different inputs"
            " of one adapter; valid then: 0",
        )
    if config.cluster.colocated:
        yield Violation(
            "cluster.colocated",
            "true with `lora`: what ranks move off a GPU are the trained weights, and the frozen ones would stay there;"
            " valid then: false",
        )
    if config.moe.expert_bias_update_rate > 0:
        yield Violation(
            "moe.expert_bias_update_rate",
            f"{config.moe.expert_bias_update_rate:g} with `lora`: it moves the model's own bias, which no adapter and"
            " no checkpoint of one has; valid then: 0",
        )
    for name in {target for target in lora.targets if lora.targets.count(target) > 1}:
        yield Violation("lora.targets", f"{name!r} occurs {lora.targets.count(name)} times; list it once")
