"""Memory of one GPU over a step, by part and by phase; and memory of a GPU that serves rollouts.

State is exact (`shares.py`); activations are formulas (`activations.py`); the reserve is a rule of thumb. Trainer and
servers have GPUs of their own, or use the same in turns (`colocated_memory.py`). Knows no framework and allocates
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gspo_mega.config.critic_config import critic_config
from gspo_mega.config.schema import Config
from gspo_mega.models.spec import ModelSpec
from gspo_mega.plan.activations import HeadActivations, head_activations, layer_activations, value_head_activations
from gspo_mega.plan.critic_needs import critic_state
from gspo_mega.plan.draft_needs import draft_needs
from gspo_mega.plan.gpus import GPUS
from gspo_mega.plan.layout import Layout
from gspo_mega.plan.layout_sizes import Sizes
from gspo_mega.plan.save_memory import save_device_bytes
from gspo_mega.plan.server_needs import cache_element_bytes, rank_weight_bytes
from gspo_mega.plan.server_parallel import attention_ranks
from gspo_mega.plan.shares import ModelShares
from gspo_mega.plan.state_bytes import WEIGHT_BYTES, state_bytes

GIB = 2**30
# Context, NCCL's buffers and library workspaces; and the allocator's fragmentation, as a share of activations.
RESERVE_BYTES = 4 * GIB
FRAGMENTATION = 0.08
# Tokens that the busiest expert-parallel rank receives, as a multiple of the mean.
EXPERT_IMBALANCE = 1.3


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank. `parts`: by kind, at the peak. `phases`: totals by phase of a step. `stage`: the
    pipeline stage of that rank. `exact`: the part that involves no estimate. `offloaded`: optimizer state on the host.
    `always`: by kind, in every phase; `by_phase`: besides these.
    """

    parts: dict[str, int]
    phases: dict[str, int]
    stage: int
    exact: int
    offloaded: int
    always: dict[str, int]
    by_phase: dict[str, dict[str, int]]

    @property
    def peak(self) -> int:
        return max(self.phases.values())

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: self.phases[phase])


@dataclass(frozen=True)
class ServerMemory:
    """Bytes on one GPU of a server. `cache_tokens`: tokens that fit in the cache of one whole server. `draft`: the part
    of `weights` that only drafts.
    """

    weights: int
    cache: int
    cache_tokens: int
    draft: int = 0


def gpu_bytes(config: Config) -> int | None:
    """Bytes of one GPU, by the configuration; None where it names neither a GPU nor its memory."""
    cluster = config.cluster
    if cluster.gpu_memory_gib is not None:
        return int(cluster.gpu_memory_gib * GIB)
    return int(GPUS[cluster.gpu].memory_gib * GIB) if cluster.gpu is not None else None


def trainer_memory(config: Config, layout: Layout, shares: ModelShares) -> Memory:
    """The memory of the trainer rank that needs most, on GPUs."""
    # The first of each size holds the most micro-batches at once, the very first the embedding, the last the head.
    sizes = {layout.stage_layers.index(count) for count in layout.stage_layers}
    stages = sorted({0, layout.pipeline - 1} | sizes)
    return max((_stage(config, layout, shares, stage) for stage in stages), key=lambda memory: memory.peak)


def in_flight(layout: Layout, stage: int, num_micro_batches: int) -> int:
    """Model chunks times micro-batches whose activations one stage keeps at once, under Megatron's schedules."""
    if layout.pipeline == 1:
        return 1
    if layout.virtual_pipeline is None:
        return min(layout.pipeline - stage, num_micro_batches)
    warm_up = (layout.pipeline - stage - 1) * 2 + (layout.virtual_pipeline - 1) * layout.pipeline
    return min(warm_up + 1, num_micro_batches * layout.virtual_pipeline)


def most_micro_batches(config: Config, layout: Layout) -> int:
    """Packs of one optimizer step on a data-parallel rank, if every trajectory has the longest length allowed."""
    sequences = -(-layout.mini_batch_sequences[0] // layout.data)
    a_pack = max(1, config.batch.micro_batch_tokens // Sizes.of(config).longest_sequence)
    return -(-sequences // a_pack)


@dataclass
class _Parts:
    """Bytes by part, in each phase."""

    always: dict[str, int] = field(default_factory=dict)
    phases: dict[str, dict[str, int]] = field(default_factory=dict)

    def totals(self) -> dict[str, int]:
        return {phase: sum(self.always.values()) + sum(parts.values()) for phase, parts in self.phases.items()}


def _stage(config: Config, layout: Layout, shares: ModelShares, stage: int) -> Memory:
    spec = shares.spec
    held = shares.state(config, layout, stage)
    size = state_bytes(config, held.largest)
    critic = critic_state(config, layout, shares, stage)
    parts = _Parts()
    parts.always = {
        "weights": size.weights,
        "gradients": size.gradients,
        "padding": size.padding,
        "main weights": size.main,
        "moments": size.moments,
        "FP8 copies": size.fp8_copies,
        "reference": size.reference,
        "critic": critic[1].on_device if critic is not None else 0,
        "reserve": RESERVE_BYTES,
    }
    exact = sum(parts.always.values()) - RESERVE_BYTES
    whole = _largest_tensor(spec) * WEIGHT_BYTES[config.precision]
    head = head_activations(config, spec, layout)
    parts.phases["old pass"], parts.phases["training"] = _passes(config, spec, layout, stage, head)
    gathered, offloaded = save_device_bytes(config, held), size.offloaded
    if critic is not None:
        own = critic_config(config)
        _, parts.phases["critic"] = _passes(own, spec, layout, stage, value_head_activations(own, spec, layout))
        # One model after the other is put together.
        gathered, offloaded = max(gathered, save_device_bytes(own, critic[0])), offloaded + critic[1].offloaded
    parts.phases["optimizer"] = {}
    parts.phases["checkpoint"] = {"gathered state": gathered}
    bucket = config.publish.bucket_bytes if config.publish.method == "distributed" else 0
    # A bucket on its way, and meanwhile the next one's tensors, and the bytes of all of these for one broadcast.
    parts.phases["publish"] = {"publish": 2 * whole + 3 * bucket}
    totals = parts.totals()
    peak = max(totals, key=lambda phase: totals[phase])
    return Memory({**parts.always, **parts.phases[peak]}, totals, stage, exact, offloaded, parts.always, parts.phases)


def _passes(
    config: Config, spec: ModelSpec, layout: Layout, stage: int, head: HeadActivations
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes by part of a stage's forward passes and of its training passes, besides the state."""
    tokens = config.batch.micro_batch_tokens / layout.context
    layer = layer_activations(config, spec, layout, "gpu")
    dense = layer_activations(config, spec, layout, "gpu", has_experts=False)
    uneven = EXPERT_IMBALANCE if spec.moe is not None and layout.expert > 1 else 1.0
    by_layer = {True: layer.attention + layer.mlp * uneven, False: dense.attention + dense.mlp}
    kinds = {spec.has_experts(index) for chunk in layout.chunk_layers(stage) for index in chunk}
    kept, blocks = max(by_layer[kind] for kind in kinds), len(layout.chunk_layers(stage)[0])
    a_chunk = max(sum(by_layer[spec.has_experts(index)] for index in chunk) for chunk in layout.chunk_layers(stage))
    working = max(layer.working * uneven if kind else dense.working for kind in kinds)
    if config.recompute.granularity == "full":
        a_chunk = blocks / config.recompute.num_layers * layer.layer_input
        working += config.recompute.num_layers * kept  # the block that is being recomputed
    is_last = stage == layout.pipeline - 1
    chunks = in_flight(layout, stage, most_micro_batches(config, layout))
    buffers = round(4 * tokens * layer.layer_input) if layout.pipeline > 1 else 0
    head_saved = (head.row + head.token) if is_last else 0.0

    def bytes_of(saved: float, logits: int) -> dict[str, int]:
        return {
            "activations": round(tokens * saved),
            "fragmentation": round(FRAGMENTATION * tokens * saved),
            "logits": (logits + round(tokens * head.working)) * is_last,
            "pipeline buffers": buffers,
        }

    forward = bytes_of(working, head.chunk_forward)
    return forward, bytes_of(chunks * a_chunk + working + head_saved, head.chunk_backward)


def _largest_tensor(spec: ModelSpec) -> int:
    """Elements of the largest tensor that a publish gathers whole: the embedding, or one side of an MLP."""
    width = spec.intermediate_size
    if spec.moe is not None and spec.has_experts(0):
        width = spec.moe.expert_intermediate_size
    return max(spec.vocab_size, width) * spec.hidden_size


def server_memory(config: Config, spec: ModelSpec, total_parameters: int, memory_bytes: int) -> ServerMemory:
    """The memory of one GPU of a server. SGLang takes `memory_fraction` for weights and KV cache; a server's ranks
    share the key-value heads, those of each data-parallel group of the attention.
    """
    server = config.server
    draft = draft_needs(config, spec)
    weights = rank_weight_bytes(config, spec, total_parameters) + draft.weights
    # Every rank of a server keeps the whole latent.
    elements = (
        2 * spec.num_layers * max(1, spec.num_kv_heads // attention_ranks(config)) * spec.head_dim
        if spec.latent is None
        else spec.cache_elements_per_token
    )
    token = elements * cache_element_bytes(config) + draft.cached_token
    room = max(0, int(memory_bytes * server.memory_fraction) - weights)
    tokens = room // token
    if server.max_total_tokens is not None:
        tokens = min(tokens, server.max_total_tokens)
    # Each data-parallel group of the attention has a cache of its own.
    return ServerMemory(weights, tokens * token, tokens * server.attention_data, draft.weights)
