"""GPUs by name, the rates that a plan counts on, and how a publish is verified with and without GPUs.

`GPUS` has memory, rates and links; the shares say which part of each rate is reached. They are the basis of all time
estimates. Peaks are the vendor's, dense, in one direction. Shares of FLOP/s come from published end-to-end figures,
named with each, and are raised by what those lose to communication and pipeline bubbles, which the estimate counts
separately. None was measured here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gspo_mega.config.derived import Verification, resolve_verification
from gspo_mega.config.schema import Cluster

# What the ranks of a run compute on.
Device = Literal["cpu", "gpu"]


@dataclass(frozen=True)
class Gpu:
    """`memory_gib`: what the driver leaves to a process. FLOP/s and bytes/s are peaks. `network_bytes_per_second`: one
    GPU's share of its node's InfiniBand, 400 Gb/s (A100: 200). `capability`: the compute capability.
    """

    memory_gib: float
    bf16_flops: float
    fp8_flops: float
    memory_bytes_per_second: float
    nvlink_bytes_per_second: float
    network_bytes_per_second: float
    capability: tuple[int, int]


# NVIDIA's data sheets: A100 80GB SXM, H100 SXM, H200 SXM, HGX B200. A100 has no FP8.
GPUS = {
    "A100": Gpu(79.0, 312e12, 312e12, 2.04e12, 300e9, 25e9, (8, 0)),
    "H100": Gpu(79.0, 989e12, 1979e12, 3.35e12, 450e9, 50e9, (9, 0)),
    "H200": Gpu(139.5, 989e12, 1979e12, 4.8e12, 450e9, 50e9, (9, 0)),
    "B200": Gpu(178.0, 2250e12, 4500e12, 7.7e12, 900e9, 50e9, (10, 0)),
}
DEFAULT_GPU = "H100"

# Large matrix products. Llama 3 (arXiv:2407.21783, table 4): 43 % of BF16's peak end to end on 8192 H100; NeMo 24.12's
# performance summary: 37 % of FP8's for Llama-3-70B on 64.
MATRIX_SHARE = {"fp32": 0.06, "bf16": 0.55, "fp8": 0.47}
# Grouped products of many experts. Qwen2-57B-A14B: 39 % end to end on H100 (arXiv:2504.14960).
EXPERT_SHARE = {"fp32": 0.05, "bf16": 0.47, "fp8": 0.35}
# Attention, forward and backward together (FlashAttention-2 on H100, arXiv:2407.08608, figures 5 and 6).
ATTENTION_SHARE = 0.40
# The shares and times below are rules of thumb, without a published end-to-end figure.
# A product whose narrowest side has n elements reaches n / (n + this) of the share.
NARROW_ELEMENTS = 128
# DeepEP's README says that its kernels reach .81 of NVLink (8 B200) and .9 of the network (2 nodes of H100); NCCL's
# reach less.
LINK_SHARE = 0.75
MEMORY_SHARE = 0.60
# The minimum time of one layer's forward pass, for launching its kernels.
LAYER_SECONDS = 150e-6
# The minimum time of one sum over the ranks of a server, if they are on several nodes.
NETWORK_SUM_SECONDS = 40e-6
# Bandwidth of a parallel file system, for the whole job.
STORAGE_BYTES_PER_SECOND = 10e9
# SHA-256 on one core: the trainer's hash of what it sends, and SGLang's on a CPU. Measured on a busy core with SHA
# instructions; an idle one did 2.0 GB/s. On a GPU SGLang hashes with a kernel of its own, which reads every weight
# once. Its time was not measured: it counts as MEMORY_SHARE of the GPU's memory bandwidth.
SHA256_BYTES_PER_SECOND = 1.1e9

ASSUMPTIONS = (
    "prompts, responses and episodes are half as long as their limits on average; experts evenly loaded; packs full",
    (
        f"share of peak: matrices {MATRIX_SHARE['bf16']:.0%} (FP8 {MATRIX_SHARE['fp8']:.0%}), experts"
        f" {EXPERT_SHARE['bf16']:.0%} (FP8 {EXPERT_SHARE['fp8']:.0%}), attention {ATTENTION_SHARE:.0%}, links"
        f" {LINK_SHARE:.0%}, memory {MEMORY_SHARE:.0%}"
    ),
    (
        "tensor and expert exchange is not hidden behind computation; context exchange is; storage "
        f"{STORAGE_BYTES_PER_SECOND / 1e9:.0f} GB/s; scoring, tools and agents, evaluation and start-up are left out"
    ),
    (
        "publishing: ranks send in turn, one copy per group of servers, and owners of tensors hash their next"
        f" ones meanwhile with SHA-256 on one core, {SHA256_BYTES_PER_SECOND / 1e9:g} GB/s; servers on GPUs hash there"
        " as fast as they read memory; copying weights to the host and what a server's start repeats are left out"
    ),
)


# What each way of verification proves.
MEANING: dict[Verification, str] = {
    "tensors": "every server tensor's checksum is that of what was sent",
    "replicas": (
        "all servers agree, exactly what changed in the trainer changed there, and once per server start a publish"
        " reaches every tensor"
    ),
}


def is_on_gpu(cluster: Cluster, device: Device | None) -> bool | None:
    """Return whether the run is on GPUs; None if that is not known before it starts. `device`: the ranks', if known."""
    if device is not None:
        return device == "gpu"
    return True if cluster.gpu is not None else None


def describe_verification(chosen: Verification | Literal["auto"], server_tensor: int, on_gpu: bool | None) -> str:
    """Return, for the plan's report, how a publish is verified, whether `auto` decided it, and what it means."""
    automatic = " (publish.verify: auto)" if chosen == "auto" else ""
    places = (True, False) if on_gpu is None else (on_gpu,)
    kinds: set[Verification] = {resolve_verification(chosen, server_tensor, place) for place in places}
    if len(kinds) == 1:
        (kind,) = kinds
        return f"verified by {kind}{automatic}: {MEANING[kind]}"
    return f"verified by tensors without GPUs, by replicas with them{automatic}"
