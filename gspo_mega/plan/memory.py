"""Memory of one GPU over a step, by part and by phase; memory of a GPU that serves rollouts; and what is kept on the
host.

State is exact (`state.py`), activations are formulas (`activations.py`), and what a process holds in every phase (a
CUDA context, libraries) is a rule of thumb. `trainer_memory` is for ranks with GPUs of their own, `server_memory` for
servers, and `run_memory` puts both together when they use GPUs in turns, as `train/servers.py` moves the state. A
critic adds its own state and passes. The functions about saving follow `checkpoint/optimizer_shards.py`: with the
distributed optimizer a rank puts the fp32 state of whole parameters together on the host before a save, about as much
as it owns. Ranks exchange some parameters at a time, on GPUs through their memory, and a load reads some at a time.
Nothing is allocated here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gspo_mega.config.derived import critic_config, critic_of
from gspo_mega.config.schema import Cluster, Config, Optimizer, Precision
from gspo_mega.models.spec import ModelSpec
from gspo_mega.models.tensors import count_parameters
from gspo_mega.plan.activations import HeadActivations, head_activations, layer_activations, value_head_activations
from gspo_mega.plan.gpus import GPUS
from gspo_mega.plan.layout import Layout, Sizes
from gspo_mega.plan.server_buffers import CONTEXT_BYTES, graph_bytes, publish_group_bytes
from gspo_mega.plan.servers import attention_ranks, cache_element_bytes, draft_memory, rank_weight_bytes, weight_bytes
from gspo_mega.plan.state import (
    MAIN_BYTES,
    MOMENT_BYTES,
    WEIGHT_BYTES,
    ModelShares,
    StageState,
    StateBytes,
    checkpoint_bytes,
    state_bytes,
    teacher_shares,
    trained_parameters,
    with_teacher,
)

GIB = 2**30
# CUDA context, NCCL's buffers and library workspaces of a rank.
RESERVE_BYTES = 4 * GIB
# The part of a server's memory that its CUDA graphs take.
GRAPHS = "server's CUDA graphs"
GROUPS = "publish groups"
# The allocator's fragmentation, as a share of activations.
FRAGMENTATION = 0.08
# Tokens that the busiest expert-parallel rank receives, as a multiple of the mean.
EXPERT_IMBALANCE = 1.3
# With `cluster.colocated`: the parts that a rank moves to the host while servers sample, and those of them that are on
# the GPU while it publishes.
_MOVED = ("weights", "padding", "gradients", "main weights", "moments", "reference")
_PUBLISHED = ("weights", "padding")
# What SGLang gives the states of gated delta nets, as a share of what the cache of the other layers gets.
_STATES_TO_CACHE = 0.9
# Bytes that a rank reads at a time, and elements that ranks exchange at a time, at least one parameter: `READ_BYTES`
# and `EXCHANGED_ELEMENTS` of `checkpoint/optimizer_shards.py`.
READ_BYTES, EXCHANGED_ELEMENTS = 2 * 2**30, 2**27
# Main weights and both moments, which are saved in fp32 no matter which precision they have in training.
_STATE_TENSORS, _FP32_BYTES = 3, 4


@dataclass(frozen=True)
class GpuMemory:
    """Bytes on the fullest rank. `parts`: by kind, at the peak. `phases`: totals by phase of a step. `stage`: the
    pipeline stage of that rank. `exact`: the part that involves no estimate. `offloaded`: optimizer state on the host.
    `always`: by kind, what is there in every phase. `by_phase`: by phase and kind, what is there in addition.
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
    of `weights` that is the draft's. Outside `server.memory_fraction`: `graphs`, what CUDA graphs take, and `groups`,
    NCCL's buffers of the groups of a publish.
    """

    weights: int
    cache: int
    cache_tokens: int
    draft: int = 0
    graphs: int = 0
    groups: int = 0

    @property
    def outside(self) -> dict[str, int]:
        """By kind, the bytes outside `server.memory_fraction`."""
        found = {"context and libraries": CONTEXT_BYTES, "CUDA graphs": self.graphs}
        return found | ({GROUPS: self.groups} if self.groups else {})


def run_memory(config: Config, layout: Layout, shares: ModelShares, total_parameters: int, limit: int) -> GpuMemory:
    """Return the memory of the rank that needs most, on GPUs of `limit` bytes. If ranks and servers share GPUs, the
    server's part is included, and in an additional phase `rollout` the server has the memory that
    `server.memory_fraction` gives it.
    """
    memory = trainer_memory(config, layout, shares)
    if not config.cluster.colocated:
        return memory
    server = server_memory(config, shares.spec, total_parameters, limit)
    stays = {kind: size for kind, size in memory.always.items() if kind not in _MOVED}
    published = {kind: memory.always[kind] for kind in _PUBLISHED}
    kept = {"server": CONTEXT_BYTES, GRAPHS: server.graphs}  # in every turn
    parts = {phase: {**memory.always, **own, **kept} for phase, own in memory.by_phase.items()}
    parts["publish"] = {
        **stays,
        **published,
        **memory.by_phase["publish"],
        **kept,
        "server": CONTEXT_BYTES + server.weights,
    }
    parts["rollout"] = {**stays, **kept, "server": CONTEXT_BYTES + round(limit * config.server.memory_fraction)}
    phases = {phase: sum(own.values()) for phase, own in parts.items()}
    return replace(memory, parts=parts[max(phases, key=lambda phase: phases[phase])], phases=phases)


def trainer_memory(config: Config, layout: Layout, shares: ModelShares) -> GpuMemory:
    """Return the memory of the trainer rank that needs most, on GPUs."""
    # Of stages with equally many layers the first holds the most micro-batches at once. Stage 0 also has the embedding,
    # and the last stage the head.
    sizes = {layout.stage_layers.index(count) for count in layout.stage_layers}
    stages = sorted({0, layout.pipeline - 1} | sizes)
    return max((stage_memory(config, layout, shares, stage) for stage in stages), key=lambda memory: memory.peak)


@dataclass
class _Parts:
    """Bytes by part, in each phase."""

    always: dict[str, int] = field(default_factory=dict)
    phases: dict[str, dict[str, int]] = field(default_factory=dict)

    def totals(self) -> dict[str, int]:
        return {phase: sum(self.always.values()) + sum(parts.values()) for phase, parts in self.phases.items()}


def stage_memory(config: Config, layout: Layout, shares: ModelShares, stage: int) -> GpuMemory:
    """Return the memory of the fullest trainer rank of one pipeline stage, on GPUs."""
    spec = shares.spec
    held = shares.state(config, layout, stage)
    size = with_teacher(state_bytes(config, held.largest), config, layout, stage)
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
        "teacher": size.teacher,
        "critic": critic[1].on_device if critic is not None else 0,
        GROUPS: publish_group_bytes(config, spec, layout)[1],
        "reserve": RESERVE_BYTES,
    }
    exact = sum(size for part, size in parts.always.items() if part not in (GROUPS, "reserve"))
    whole = _largest_tensor(spec) * WEIGHT_BYTES[config.precision]
    head, states = head_activations(config, spec, layout), 0
    if stage == layout.pipeline - 1:
        states, logits = teacher_head_bytes(config, layout, [shares.spec for _, shares in teacher_shares(config)])
        head = replace(head, chunk_backward=head.chunk_backward + logits)
    parts.phases["old pass"], parts.phases["training"] = _passes(config, spec, layout, stage, head)
    if states:
        parts.phases["training"]["teacher states"] = states
    gathered, offloaded = save_device_bytes(config.optimizer, held), size.offloaded
    if critic is not None:
        own = critic_config(config)
        _, parts.phases["critic"] = _passes(own, spec, layout, stage, value_head_activations(own, spec, layout))
        # A save puts together one model after the other.
        gathered, offloaded = (
            max(gathered, save_device_bytes(own.optimizer, critic[0])),
            offloaded + critic[1].offloaded,
        )
    in_fp32 = fp32_gradient_bytes(config.optimizer, held)
    if critic is not None:
        in_fp32 = max(in_fp32, fp32_gradient_bytes(critic_config(config).optimizer, critic[0]))
    parts.phases["optimizer"] = {"fp32 gradients": in_fp32} if in_fp32 else {}
    parts.phases["checkpoint"] = {"gathered state": gathered}
    bucket = config.publish.bucket_bytes if config.publish.method == "distributed" else 0
    # A whole tensor and, if ranks share it, their parts. A bucket that is being sent, the tensors of the next one, and
    # the bytes of all of these for one broadcast.
    parts.phases["publish"] = {"publish": (2 if layout.tensor > 1 else 1) * whole + 3 * bucket}
    totals = parts.totals()
    peak = max(totals, key=lambda phase: totals[phase])
    return GpuMemory(
        {**parts.always, **parts.phases[peak]}, totals, stage, exact, offloaded, parts.always, parts.phases
    )


def teacher_head_bytes(config: Config, layout: Layout, taught: Sequence[ModelSpec]) -> tuple[int, int]:
    """Return the bytes on the last stage if whole distributions are compared with those of teachers that the ranks
    load: (all states of a mini-batch, a teacher's logits beside the policy's, their difference and the chosen tokens).
    `taught`: these teachers.
    """
    if config.teacher is None or config.teacher.divergence == "sampled_token" or not taught:
        return 0, 0
    tokens = most_micro_batches(config, layout) * config.batch.micro_batch_tokens / layout.context
    chunk = config.batch.log_prob_chunk_tokens * (layout.padded_vocab_size // layout.tensor)
    width = sum(teacher.hidden_size for teacher in taught)
    return round(tokens * width * WEIGHT_BYTES[config.precision]), chunk * (4 + 4 + 1)


def _passes(
    config: Config, spec: ModelSpec, layout: Layout, stage: int, head: HeadActivations
) -> tuple[dict[str, int], dict[str, int]]:
    """Return bytes by part of (a stage's forward passes, its training passes), in addition to the state."""
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

    def bytes_of(kept: float, head_saved: float, logits: int) -> dict[str, int]:
        """Return the larger of two moments: a layer at work, and the head, while no layer works."""
        of_head = (logits + round(tokens * head.working)) * is_last
        if tokens * working >= tokens * head_saved + of_head:
            head_saved, of_head = working, 0
        saved = tokens * (kept + head_saved)
        return {
            "activations": round(saved),
            "fragmentation": round(FRAGMENTATION * saved),
            "logits": of_head,
            "pipeline buffers": buffers,
        }

    forward = bytes_of(0.0, 0.0, head.chunk_forward)
    return forward, bytes_of(chunks * a_chunk, head_saved, head.chunk_backward)


def in_flight(layout: Layout, stage: int, num_micro_batches: int) -> int:
    """Return the model chunks times micro-batches whose activations one stage keeps at once, under Megatron's
    schedules.
    """
    if layout.pipeline == 1:
        return 1
    if layout.virtual_pipeline is None:
        return min(layout.pipeline - stage, num_micro_batches)
    warm_up = (layout.pipeline - stage - 1) * 2 + (layout.virtual_pipeline - 1) * layout.pipeline
    return min(warm_up + 1, num_micro_batches * layout.virtual_pipeline)


def most_micro_batches(config: Config, layout: Layout) -> int:
    """Return the packs of one optimizer step on a data-parallel rank, if every trajectory has the longest length."""
    sequences = -(-layout.mini_batch_sequences[0] // layout.data)
    a_pack = max(1, config.batch.micro_batch_tokens // Sizes.of(config).longest_sequence)
    return -(-sequences // a_pack)


def _largest_tensor(spec: ModelSpec) -> int:
    """Return the elements of the largest tensor that a publish gathers whole: the embedding, or one side of an MLP."""
    width = spec.intermediate_size
    if spec.moe is not None and spec.has_experts(0):
        width = spec.moe.expert_intermediate_size
    return max(spec.vocab_size, width) * spec.hidden_size


def server_memory(config: Config, spec: ModelSpec, total_parameters: int, memory_bytes: int) -> ServerMemory:
    """Return the memory of one GPU of a server. SGLang takes `memory_fraction` for weights and KV cache. The ranks of
    each data-parallel group of the attention share the key-value heads.
    """
    server = config.server
    draft = draft_memory(config, spec)
    weights = rank_weight_bytes(config.server, config.precision, spec, total_parameters) + draft.weights
    # Every rank of a server keeps the whole latent.
    elements = (
        2 * spec.num_attention_layers * max(1, spec.num_kv_heads // attention_ranks(config.server)) * spec.head_dim
        if spec.latent is None
        else spec.cache_elements_per_token
    )
    token = elements * cache_element_bytes(config.server, config.precision) + draft.cached_token
    room = max(0, int(memory_bytes * server.memory_fraction) - weights)
    if spec.delta is not None:  # SGLang divides it into states and the cache of the other layers
        room = int(room / (1 + server.options.get("mamba_full_memory_ratio", _STATES_TO_CACHE)))
    tokens = room // token
    if server.max_total_tokens is not None:
        tokens = min(tokens, server.max_total_tokens)
    return ServerMemory(
        weights,
        tokens * token,
        tokens * server.attention_data,  # each data-parallel group of the attention has a cache of its own
        draft.weights,
        graph_bytes(config, spec, memory_bytes),
    )


def gpu_bytes(cluster: Cluster) -> int | None:
    """Return the bytes of one GPU as the configuration says; None if it names neither a GPU nor its memory."""
    if cluster.gpu_memory_gib is not None:
        return int(cluster.gpu_memory_gib * GIB)
    return int(GPUS[cluster.gpu].memory_gib * GIB) if cluster.gpu is not None else None


def critic_state(
    config: Config, layout: Layout, shares: ModelShares, stage: int
) -> tuple[StageState, StateBytes] | None:
    """Return what the ranks of a stage hold of the critic; None without one. `shares`: the policy's."""
    if critic_of(config.algorithm, config.critic) is None:
        return None
    own = critic_config(config)
    held = shares.critic.state(own, layout, stage)
    return held, state_bytes(own, held.largest, is_critic=True)


def critic_parameters(spec: ModelSpec) -> int:
    """Return the number of a critic's parameters: the policy's, with one row instead of the LM head."""
    counts = count_parameters(spec)
    head = 0 if spec.tie_word_embeddings else counts.embedding
    return counts.total - head + spec.hidden_size


def saved_bytes(config: Config, spec: ModelSpec, total_parameters: int) -> int:
    """Return the bytes of a checkpoint of the run: what it trains of the policy, and the critic."""
    trained = trained_parameters(config.lora, spec, total_parameters)
    size = checkpoint_bytes(config.precision, config.optimizer, trained)
    if critic_of(config.algorithm, config.critic) is None:
        return size
    critic = critic_config(config)
    return size + checkpoint_bytes(critic.precision, critic.optimizer, critic_parameters(spec))


def fp32_gradient_bytes(optimizer: Optimizer, state: StageState) -> int:
    """Return the bytes of the fp32 gradients that an optimizer step makes of bf16 ones, for the parameters that a rank
    steps. Adam with small or offloaded moments reads the bf16 ones.
    """
    reads = optimizer.moments_dtype != "fp32" or optimizer.cpu_offload_fraction > 0
    return 0 if optimizer.gradients_dtype == "fp32" or reads else MAIN_BYTES * state.largest.optimized


def save_device_bytes(optimizer: Optimizer, state: StageState) -> int:
    """Return the most bytes on a GPU during a save, of one kind of state: what a rank gets at a time, which may be all
    that is exchanged, and its own part of that.
    """
    if not optimizer.distributed:
        return 0
    most = 0
    for b in state.buffers:
        exchanged = min(b.bucket, max(EXCHANGED_ELEMENTS, b.parameter))
        most = max(most, exchanged + min(exchanged, -(-b.bucket // b.num_ranks)))
    return _FP32_BYTES * most


def save_rounding_bytes(precision: Precision, optimizer: Optimizer, state: StageState) -> int:
    """Return the bytes that rounding adds to a save's copies of a GPU's tensors. Megatron copies each to page-locked
    memory, no matter whether the save is asynchronous, and torch rounds. What the distributed optimizer saves is on the
    host already.
    """
    kinds = [WEIGHT_BYTES[precision]]
    if not optimizer.distributed:
        kinds += [_FP32_BYTES] * (precision != "fp32") + [MOMENT_BYTES[optimizer.moments_dtype]] * 2
    return sum(map(state.rounding_bytes, kinds))


def save_host_bytes(optimizer: Optimizer, state: StageState, size: StateBytes) -> int:
    """Return the most bytes on the host that one rank of the stage needs for a save or a load: what it writes, or what
    it reads at a time if that is more.
    """
    written = written_host_bytes(optimizer, state, size)
    if not optimizer.distributed:
        return written
    whole = _STATE_TENSORS * _FP32_BYTES
    read = max(READ_BYTES, whole * max(buffer.parameter for buffer in state.buffers))
    return max(written, min(read, whole * state.largest.parameters))


def written_host_bytes(optimizer: Optimizer, state: StageState, size: StateBytes, rank: int | None = None) -> int:
    """Return the bytes that a global rank of the stage writes in a save, which are on the host by then, without the
    rounding of page-locked memory (`save_rounding_bytes`). `rank`: None for the most that a rank writes.
    """
    # With adapters only these are written; the frozen parameters are in the folder that the run started from.
    largest = state.largest
    weights = size.weights * (largest.parameters - largest.frozen) // max(largest.parameters, 1)
    if not optimizer.distributed:
        return weights + size.main + size.moments
    return weights + _STATE_TENSORS * _FP32_BYTES * state.held_in_save(rank)


def rank_host_bytes(cluster: Cluster, size: StateBytes) -> int:
    """Return the bytes that one rank keeps on the host while servers sample: its state without the gradients, which
    need no copy. A part is one page-locked block, which is not rounded (`engine/memory.py`).
    """
    return size.weights + size.main + size.moments + size.reference + size.teacher if cluster.colocated else 0


def servers_host_bytes(config: Config, shares: ModelShares, total_parameters: int) -> int:
    """Return the bytes that the servers of one node keep on the host while ranks train: a copy of their weights."""
    if not config.cluster.colocated:
        return 0
    servers = -(-config.server.num_servers // config.cluster.num_nodes)
    return servers * weight_bytes(config.server, config.precision, shares.spec, total_parameters)
