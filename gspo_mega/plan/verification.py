"""How a publish is verified: what `publish.verify` comes to on a machine with GPUs, and without.

Owns the choice alone; the verification is `weights/verify.py`. SGLang's checksums are SHA-256 on a CPU, where the
trainer can foretell them for a server of one rank. On a GPU, and for shares of a tensor, it cannot.
"""

from __future__ import annotations

from typing import Literal

from gspo_mega.config.schema import Config

Verification = Literal["tensors", "replicas"]

MEANING: dict[Verification, str] = {
    "tensors": "every server tensor's checksum is that of what was sent",
    "replicas": (
        "all servers agree, exactly what changed in the trainer changed there, and once per server start a publish"
        " reaches every tensor"
    ),
}


def resolve_verification(config: Config, on_gpu: bool) -> Verification:
    """`on_gpu`: trainer and servers run on GPUs."""
    chosen = config.publish.verify
    if chosen != "auto":
        return chosen
    return "replicas" if on_gpu or config.server.tensor > 1 else "tensors"


def is_on_gpu(config: Config, device: Literal["cpu", "gpu"] | None) -> bool | None:
    """What is known before anything runs. `device`: that of the ranks, where it is known; None where the configuration
    names no GPU either.
    """
    if device is not None:
        return device == "gpu"
    return True if config.cluster.gpu is not None else None


def describe_verification(config: Config, on_gpu: bool | None) -> str:
    """For the plan: the choice, who made it, and what it means."""
    said = " (publish.verify: auto)" if config.publish.verify == "auto" else ""
    places = (True, False) if on_gpu is None else (on_gpu,)
    kinds: set[Verification] = {resolve_verification(config, place) for place in places}
    if len(kinds) == 1:
        (kind,) = kinds
        return f"verified by {kind}{said}: {MEANING[kind]}"
    return f"verified by tensors without GPUs, by replicas with them{said}"
