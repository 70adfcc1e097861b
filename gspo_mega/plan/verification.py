"""How a publish is verified: what `publish.verify` means on machines with and without GPUs.

Owns only the choice; the verification is `sync/verify.py`. On a CPU, SGLang's checksums are SHA-256, and the trainer
can compute them for a server of one rank. On a GPU, and for shares of a tensor, it cannot.
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
    """Whether the run is on GPUs, as far as that is known before it starts; None where it is not. `device`: the ranks',
    where it is known.
    """
    if device is not None:
        return device == "gpu"
    return True if config.cluster.gpu is not None else None


def describe_verification(config: Config, on_gpu: bool | None) -> str:
    """For the plan: the choice, whether the configuration left it open, and what it means."""
    automatic = " (publish.verify: auto)" if config.publish.verify == "auto" else ""
    places = (True, False) if on_gpu is None else (on_gpu,)
    kinds: set[Verification] = {resolve_verification(config, place) for place in places}
    if len(kinds) == 1:
        (kind,) = kinds
        return f"verified by {kind}{automatic}: {MEANING[kind]}"
    return f"verified by tensors without GPUs, by replicas with them{automatic}"
