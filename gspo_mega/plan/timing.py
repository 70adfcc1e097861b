"""Estimated seconds of a step by phase, and what a step's data costs rank 0.

The first part divides the model's FLOPs and bytes by the rates of `gpus.py`: `step_time` has a step's phases, rollout,
training and publish. The assumptions are `gpus.ASSUMPTIONS`, which are shown with every figure. The estimate is for
comparing layouts and phases, not for absolute times. The last part counts the shards that rank 0 hands out and the
routed experts that pass through it. Lengths are not known beforehand, so its figures are upper bounds, as the journal's
are (`disk.py`): every prompt and response has its longest length. Bytes are counted from what travels; two rates, of
reading and of decoding routes, were measured (tests/benchmarks/RESULTS.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gspo_mega.config.derived import (
    critic_config,
    critic_of,
    episode_lengths,
    filters_groups,
    may_correct_in_training,
    mean_tokens,
    needs_old_log_prob_pass,
    penalises_kl,
    resolve_verification,
)
from gspo_mega.config.precision import publishes_adapters, server_dtype
from gspo_mega.config.schema import Config, Precision, Server
from gspo_mega.models.spec import ModelSpec
from gspo_mega.models.tensors import attended_positions, delta_rule_flops
from gspo_mega.plan.delta import copying_seconds, delta_cost
from gspo_mega.plan.gpus import (
    ATTENTION_SHARE,
    EXPERT_SHARE,
    LAYER_SECONDS,
    LINK_SHARE,
    MATRIX_SHARE,
    MEMORY_SHARE,
    NARROW_ELEMENTS,
    NETWORK_SUM_SECONDS,
    SHA256_BYTES_PER_SECOND,
    STORAGE_BYTES_PER_SECOND,
    Gpu,
)
from gspo_mega.plan.layout import Layout
from gspo_mega.plan.memory import GIB, server_memory
from gspo_mega.plan.server_buffers import num_owners, num_senders, on_one_node
from gspo_mega.plan.servers import (
    DTYPE_BYTES,
    rank_block_elements,
    rank_weight_bytes,
    version_bytes,
)
from gspo_mega.plan.sharing import step_positions
from gspo_mega.plan.state import GRADIENT_BYTES, MOMENT_BYTES, WEIGHT_BYTES, ModelShares, teacher_layout, teacher_shares

# The cost of a backward pass, in forward passes.
_BACKWARD = 2
# The cost of a backward pass's exchange, in exchanges of a forward pass. tensor: with sequence parallelism, inputs are
# gathered once more for the weights' gradients. context: keys and values are passed round again, with their gradients.
# expert, pipeline: gradients are sent back once.
_BACKWARD_EXCHANGE = {"tensor": 1.5, "context": 2.0, "expert": 1.0, "pipeline": 1.0}
# Bytes per element that the optimizer reads and writes, without moments: gradient, main weight twice, weight.
_OPTIMIZER_BYTES = 4 + 2 * 4 + 2
# Bytes per position of a pack: token, position, sequence and label (8 each), mask and log-prob (4 each).
POSITION_BYTES = 40
# More bytes per position for each of: advantages of turns, weights of tokens, rewards of tokens, its place in a pack
# that shares prefixes.
MORE_POSITION_BYTES = 8
# Bytes of the names and shapes of a pack's arrays.
PACK_BYTES = 3000
# Bytes of one route over HTTP: a server writes int32 in base64, four characters for three bytes.
HTTP_ROUTE_BYTES = 16 / 3
# Seconds to decode and check one route on one core. It was measured without waiting for memory that others use, and is
# doubled.
DECODE_SECONDS = 2e-9
# Seconds to read one byte of an answer on one core, which is the event loop's own work.
RECEIVE_SECONDS = 1e-9


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step. `samples_ahead`: the next batches are sampled while this one is trained
    (`rollout.max_staleness` above 0), so that a step takes the longer of the two.
    """

    rollout: float
    train: TrainTime
    publish: float
    samples_ahead: bool

    @property
    def phases(self) -> dict[str, float]:
        return {
            "rollout": self.rollout,
            "old pass": self.train.old_pass,
            **({"critic": self.train.critic} if self.train.critic else {}),
            "training": sum(self.train.training.values()),
            "publish": self.publish,
        }

    @property
    def total(self) -> float:
        both = max if self.samples_ahead else sum
        return both((self.rollout, self.train.total)) + self.publish

    @property
    def bottleneck(self) -> str:
        phases = self.phases
        if self.samples_ahead and self.rollout < self.train.total:
            del phases["rollout"]  # the trainer has the next batch before it asks for it
        return max(phases, key=lambda phase: phases[phase])

    @property
    def hidden_by_overlap(self) -> float:
        """Seconds per step that sampling ahead saves, or would save."""
        return min(self.rollout, self.train.total)


@dataclass(frozen=True)
class TrainTime:
    """Seconds of a step on the trainer. `old_pass`: log-probs of the old policy, the reference and a teacher.
    `training`: seconds by part. `critic`: the critic's values and optimizer steps.
    """

    old_pass: float
    training: dict[str, float]
    critic: float = 0.0

    @property
    def total(self) -> float:
        return self.old_pass + self.critic + sum(self.training.values())


def step_time(config: Config, layout: Layout, shares: ModelShares, gpu: Gpu, total_parameters: int) -> StepTime:
    """Return the seconds of a step by phase."""
    return StepTime(
        rollout=rollout_seconds(config, shares.spec, gpu, total_parameters),
        train=train_time(config, layout, shares, gpu),
        publish=publish_seconds(config, shares.spec, layout, gpu, total_parameters),
        samples_ahead=config.rollout.max_staleness > 0,
    )


def rollout_seconds(config: Config, spec: ModelSpec, gpu: Gpu, total_parameters: int) -> float:
    """Return the seconds to decode all responses of a step: waves of as many requests as fit a server's cache, then the
    longest responses. `verify/simulate/servers.py` uses the same parts.

    A decode step reads every weight once (of experts, those that the batch goes to) and the cache of its sequences.
    """
    server, rollout = config.server, config.rollout
    prompt, response = mean_tokens(config)
    memory = server_memory(config, spec, total_parameters, int(gpu.memory_gib * 2**30))
    sequences = config.batch.prompts_per_step * config.batch.group_size / server.num_servers
    length = prompt + response
    batch = max(1.0, min(sequences, rollout.max_concurrent_requests, memory.cache_tokens / length))
    token_bytes = memory.cache / max(1, memory.cache_tokens)

    def decode_step(num_sequences: float) -> float:
        read = memory.weights * _share_read(spec, num_sequences) + num_sequences * length * token_bytes
        flops = 2 * _active_parameters(spec, total_parameters) * num_sequences / server.tensor
        own = max(read / (MEMORY_SHARE * gpu.memory_bytes_per_second), flops / (MATRIX_SHARE["bf16"] * gpu.bf16_flops))
        fixed, by_sequence = between_nodes(config.server, config.precision, spec, gpu)
        return own + fixed + by_sequence * num_sequences

    full = sequences / batch * response * decode_step(batch)
    tail = (episode_lengths(config).sampled - response) * decode_step(max(1.0, batch / 10))
    return full + tail


def between_nodes(server: Server, precision: Precision, spec: ModelSpec, gpu: Gpu) -> tuple[float, float]:
    """Return the seconds that a decode step spends between the nodes of one server: (fixed, per sequence). A layer has
    two sums over all the server's ranks; the GPUs of a node share what their node exchanges.
    """
    if server.num_nodes == 1:
        return 0.0, 0.0
    sums, per_node = 2 * spec.num_layers, server.tensor // server.num_nodes
    row = spec.hidden_size * DTYPE_BYTES[server_dtype(server, precision)]
    sent = 2 * (1 - 1 / server.num_nodes) * row / per_node
    return sums * NETWORK_SUM_SECONDS, sums * sent / (LINK_SHARE * gpu.network_bytes_per_second)


def _active_parameters(spec: ModelSpec, total_parameters: int) -> float:
    if spec.moe is None:
        return total_parameters
    experts = 3 * spec.num_moe_layers * spec.moe.num_experts * spec.hidden_size * spec.moe.expert_intermediate_size
    return total_parameters - experts * (1 - spec.moe.experts_per_token / spec.moe.num_experts)


def _share_read(spec: ModelSpec, num_sequences: float) -> float:
    """Return the share of the weights that a decode step of `num_sequences` tokens reads."""
    if spec.moe is None:
        return 1.0
    return 1 - (1 - spec.moe.experts_per_token / spec.moe.num_experts) ** num_sequences


def train_time(config: Config, layout: Layout, shares: ModelShares, gpu: Gpu) -> TrainTime:
    """Return the seconds of the old pass and of all optimizer steps of one rollout batch, a critic's included, on the
    busiest rank.
    """
    forward_pass, training, num_micro = _model_time(config, layout, shares, gpu)
    has_old_pass = needs_old_log_prob_pass(config) and not (num_micro == 1 and may_correct_in_training(config))
    num_passes = has_old_pass + (config.kl.coefficient > 0 or penalises_kl(config.algorithm, config.critic))
    scored = sum(
        _model_time(own, teacher_layout(own.parallel, layout, its.spec), its, gpu)[0]
        for own, its in teacher_shares(config)
    )
    critic = 0.0
    if critic_of(config.algorithm, config.critic) is not None:
        values, steps, _ = _model_time(critic_config(config), layout, shares.critic, gpu)
        critic = values + sum(steps.values())
    return TrainTime(old_pass=forward_pass * num_passes + scored, training=training, critic=critic)


def _model_time(config: Config, layout: Layout, shares: ModelShares, gpu: Gpu) -> tuple[float, dict[str, float], int]:
    """Return (seconds of one model's forward pass over a rollout batch, seconds of all its optimizer steps by part,
    packs of one optimizer step).
    """
    spec, batch = shares.spec, config.batch
    step = step_positions(config, layout)
    tokens = step.computed.tokens / layout.data
    num_micro = max(1, math.ceil(tokens / batch.num_mini_batches / batch.micro_batch_tokens))
    micro_tokens = tokens / batch.num_mini_batches / num_micro
    layer = _Layer(config, layout, spec, gpu, micro_tokens / layout.context, step.computed.as_long_as)
    rows = micro_tokens / layout.context * step.num_trained / step.computed.tokens
    # A critic's head is one row.
    head = 0.0 if shares.is_critic else _head_seconds(config.precision, layout, spec, gpu, rows)

    # The stage that takes longest: the last one, which also has the head, or a fuller one.
    *others, layers = layout.stage_layers
    if max(others, default=0) * layer.total > layers * layer.total + head:
        layers, head = max(others), 0.0
    # Small packs wait for kernels to be launched: no layer takes less than LAYER_SECONDS.
    slower = layers * max(1.0, LAYER_SECONDS / layer.total)
    num_steps, passes = batch.num_mini_batches, num_micro * batch.num_mini_batches
    again = 1 if config.recompute.granularity == "full" else 0
    chunks = layout.virtual_pipeline or 1
    bubble = (layout.pipeline - 1) / (chunks * num_micro)
    # Frozen weights have no gradient, which leaves half of a backward pass. What adapters add is small.
    backward = _BACKWARD if config.lora is None else _BACKWARD / 2
    compute = passes * slower * layer.compute * (1 + again + backward)
    head_time = passes * head * (1 + 1 + backward)  # its logits are computed again in the backward pass
    exchange = (
        passes
        * slower
        * sum(seconds * (1 + again + _BACKWARD_EXCHANGE[kind]) for kind, seconds in layer.exchange.items())
    )
    forward_pass = passes * (slower * layer.total + head) * (1 + bubble)
    state = shares.state(config, layout, layout.fullest_stage).largest
    update = (
        state.optimized
        * (_OPTIMIZER_BYTES + 4 * MOMENT_BYTES[config.optimizer.moments_dtype])
        / (MEMORY_SHARE * gpu.memory_bytes_per_second)
    )
    training = {
        "layers": compute,
        "head": head_time,
        "exchange": exchange,
        "bubble": bubble * (compute + head_time + exchange),
        "gradients": num_steps * _gradient_seconds(config, layout, shares, gpu),
        "optimizer": num_steps * update,
    }
    return forward_pass, training, num_micro


class _Layer:
    """Seconds of one layer's forward pass over one micro-batch on one rank: `compute`, and `exchange` with other ranks
    by kind.
    """

    def __init__(self, config: Config, layout: Layout, spec: ModelSpec, gpu: Gpu, tokens: float, length: float) -> None:
        kind = config.precision
        peak = gpu.fp8_flops if kind == "fp8" else gpu.bf16_flops
        hidden, tensor = spec.hidden_size, layout.tensor
        rate = peak * MATRIX_SHARE[kind]
        # The mean over layers: some may have a gated delta net in place of attention.
        attention_share = spec.num_attention_layers / spec.num_layers
        projections = sum(
            share * 2 * tokens * rows * columns / (rate * _width(min(rows, columns)))
            for share, matrices in (
                (attention_share, _projections(spec, layout)),
                (1 - attention_share, _delta_projections(spec, layout)),
            )
            for rows, columns in matrices
        )
        scored = spec.num_heads * (spec.head_dim + attended_value_dim(spec)) / tensor
        attended = (
            2
            * tokens
            * scored
            * attended_positions(spec, length)  # the mean over layers
            / (gpu.bf16_flops * (ATTENTION_SHARE if kind != "fp32" else MATRIX_SHARE["fp32"]))
        )

        # At the rate of products no wider than a key: a guess, as no GPU has run it here.
        rule = tokens * delta_rule_flops(spec) / spec.num_layers / tensor
        attended += rule / (gpu.bf16_flops * MATRIX_SHARE["bf16"] * _width(spec.delta.key_dim if spec.delta else 1))

        def gated(width: float) -> float:
            return 6 * tokens * hidden * width / (rate * _width(width)) if width else 0.0

        mlp = gated(spec.intermediate_size / tensor)
        if spec.moe is not None:
            width = spec.moe.expert_intermediate_size / layout.expert_tensor
            # A rank's routed tokens spread over its experts: few tokens per expert make its products narrow too.
            own = tokens / (tensor if layout.sequence_parallel else 1)
            routed = own * spec.moe.experts_per_token * layout.expert_tensor
            an_expert = routed * layout.expert / spec.moe.num_experts
            experts = 6 * routed * hidden * width / (peak * EXPERT_SHARE[kind] * _width(width) * _width(an_expert))
            # The mean over layers: some may be dense.
            share = spec.num_moe_layers / spec.num_layers
            mlp = (1 - share) * mlp + share * (experts + gated(spec.moe.shared_intermediate_size / tensor))
        self.compute = projections + attended + mlp
        keys = attention_share * max(1, spec.num_kv_heads / tensor) * (spec.head_dim + spec.value_head_dim)
        self.exchange = self._exchange(config, layout, spec, gpu, tokens, keys, attended)
        self.total = self.compute + sum(self.exchange.values())

    def _exchange(
        self, config: Config, layout: Layout, spec: ModelSpec, gpu: Gpu, tokens: float, keys: float, attended: float
    ) -> dict[str, float]:
        size, node = WEIGHT_BYTES[config.precision], config.cluster.ranks_per_node
        row = tokens * spec.hidden_size * size
        seconds: dict[str, float] = {}
        if layout.tensor > 1:
            seconds["tensor"] = (
                tensor_rows(spec, layout) * row * (layout.tensor - 1) / layout.tensor / _link(gpu, layout.tensor, node)
            )
        if layout.context > 1:
            ring = tokens * keys * size * (layout.context - 1) / _link(gpu, layout.tensor * layout.context, node)
            seconds["context"] = max(0.0, ring - attended)
        if spec.moe is not None and layout.expert * layout.expert_tensor > 1:
            sent = (
                2
                * row
                / (layout.tensor if layout.sequence_parallel else 1)
                * spec.moe.experts_per_token
                * layout.expert_tensor
            )
            seconds["expert"] = _all_to_all(gpu, sent, layout.expert * layout.expert_tensor, node)
        if layout.pipeline > 1:
            sends = (layout.virtual_pipeline or 1) / (spec.num_layers / layout.pipeline)
            seconds["pipeline"] = (
                sends
                * row
                / (layout.tensor if layout.sequence_parallel else 1)
                / (LINK_SHARE * gpu.network_bytes_per_second)
            )
        return seconds


def attended_value_dim(spec: ModelSpec) -> int:
    """Return the elements of a value as attention multiplies them: Megatron pads those of latent attention to a key's
    size in packed sequences, and cuts the result.
    """
    return spec.value_head_dim if spec.latent is None else spec.head_dim


def tensor_rows(spec: ModelSpec, layout: Layout) -> float:
    """Return how many hidden states a layer's forward pass exchanges per token between tensor ranks, the mean over
    layers: a gather before and a scatter after attention, and the same around a dense MLP or a shared expert. With
    sequence parallelism latent attention gathers its latents instead.
    """
    latent, moe = spec.latent, spec.moe
    gathered = 1.0
    if latent is not None and layout.sequence_parallel:
        numbers = latent.key_value_rank + latent.rotary_dim + (latent.query_rank or spec.hidden_size)
        gathered = numbers / spec.hidden_size
    dense = 1.0 if moe is None else 1 - spec.num_moe_layers / spec.num_layers
    shared = 1 - dense if moe is not None and moe.shared_intermediate_size else 0.0
    return gathered + 1 + 2 * (dense + shared)


def _projections(spec: ModelSpec, layout: Layout) -> list[tuple[float, float]]:
    """Return (rows, columns) of attention's matrices on one tensor rank. Products that read the same input count as one
    matrix.
    """
    hidden, heads, latent = spec.hidden_size, spec.num_heads / layout.tensor, spec.latent
    output = (hidden, heads * spec.value_head_dim)
    if latent is None:
        keys = max(1, spec.num_kv_heads / layout.tensor)
        return [(((1 + spec.output_gate) * heads + 2 * keys) * spec.head_dim, hidden), output]
    # Down-projections are whole on every tensor rank, and each does them for its own part of the tokens.
    own = layout.tensor if layout.sequence_parallel else 1
    down, up = (
        latent.key_value_rank + latent.rotary_dim + (latent.query_rank or 0),
        heads * (latent.content_dim + latent.value_dim),
    )
    query = (heads * spec.head_dim, latent.query_rank or hidden)
    return [(down / own, hidden), query, (up, latent.key_value_rank), output]


def _delta_projections(spec: ModelSpec, layout: Layout) -> list[tuple[float, float]]:
    """Return the same of a gated delta net."""
    if spec.delta is None:
        return []
    values = spec.delta.values / layout.tensor
    rows = 2 * spec.delta.keys / layout.tensor + 2 * values + 2 * spec.delta.value_heads / layout.tensor
    return [(rows, spec.hidden_size), (spec.hidden_size, values)]


def _head_seconds(precision: Precision, layout: Layout, spec: ModelSpec, gpu: Gpu, rows: float) -> float:
    """Return the seconds for the logits of one micro-batch's response tokens, computed in bf16 or fp32. The other
    stages wait for the last one.
    """
    kind = "fp32" if precision == "fp32" else "bf16"
    return (
        2 * rows * spec.hidden_size * layout.padded_vocab_size / layout.tensor / (gpu.bf16_flops * MATRIX_SHARE[kind])
    )


def _gradient_seconds(config: Config, layout: Layout, shares: ModelShares, gpu: Gpu) -> float:
    """Return the seconds of reducing gradients and gathering weights in one optimizer step. With overlap, three
    quarters of them are hidden.
    """
    node, seconds = config.cluster.ranks_per_node, 0.0
    gradient = GRADIENT_BYTES[config.optimizer.gradients_dtype]
    groups = {False: layout.data * layout.context, True: layout.expert_data}
    stage = shares.state(config, layout, layout.fullest_stage)
    for is_expert, ranks in groups.items():
        elements = stage.reduced(is_expert)
        if ranks > 1:
            span = ranks * (layout.expert * layout.expert_tensor if is_expert else layout.tensor)
            volume = elements * (
                gradient + (WEIGHT_BYTES[config.precision] if config.optimizer.distributed else gradient)
            )
            seconds += volume * (ranks - 1) / ranks / _link(gpu, span, node)
    return seconds * (0.25 if config.optimizer.overlap else 1.0)


def _link(gpu: Gpu, span: int, ranks_per_node: int) -> float:
    """Return the bytes per second of a group that spans `span` consecutive ranks."""
    return LINK_SHARE * (gpu.nvlink_bytes_per_second if span <= ranks_per_node else gpu.network_bytes_per_second)


def _all_to_all(gpu: Gpu, sent: float, span: int, ranks_per_node: int) -> float:
    """Return the seconds in which each rank sends equal parts of `sent` bytes to all; parts for other nodes take the
    network.
    """
    inside = min(span, ranks_per_node)
    near, far = sent * (inside - 1) / span, sent * (span - inside) / span
    return max(near / (LINK_SHARE * gpu.nvlink_bytes_per_second), far / (LINK_SHARE * gpu.network_bytes_per_second))


def _width(elements: float) -> float:
    """Return the share of its rate that a product whose narrowest side has `elements` elements reaches."""
    return elements / (elements + NARROW_ELEMENTS)


@dataclass(frozen=True)
class HashCost:
    """What a publish hashes, the mean over `publish.verify_all_every` publishes: bytes and seconds of one of the ranks
    that own tensors (`num_owners`), and of one rank of a server. `server_seconds` is None if the servers' GPU is not
    known.
    """

    num_owners: int
    trainer_bytes: float
    trainer_seconds: float
    server_bytes: float
    server_seconds: float | None


def hash_cost(
    config: Config, spec: ModelSpec, layout: Layout, total_parameters: int, on_gpu: bool | None, gpu: Gpu | None
) -> HashCost:
    """Return what a publish hashes. `on_gpu`: whether the servers run on GPUs. `gpu` has their rates. Both are None if
    not known.

    On a GPU, SGLang 0.5.23 turns weights in FP8 blocks into bf16, hashes that, and does so whether it was told to skip
    them or not. Adapters are not hashed, and the frozen weights below them by the trainer only once.
    """
    # Replicas verify each tensor in two publishes in a row.
    turns = (
        2 if resolve_verification(config.publish.verify, config.server.tensor, on_gpu is not False) == "replicas" else 1
    )
    share = min(1.0, turns / config.publish.verify_all_every)
    trainer = 0.0
    if config.lora is None or not publishes_adapters(config):
        trainer = share * version_bytes(config, spec, total_parameters) / num_owners(layout)
    blocks = rank_block_elements(config.server, spec) if on_gpu else 0
    rest = share * (rank_weight_bytes(config.server, config.precision, spec, total_parameters) - blocks)
    server, seconds = rest + DTYPE_BYTES["bf16"] * blocks, None
    if on_gpu is False:
        seconds = server / SHA256_BYTES_PER_SECOND
    elif on_gpu and gpu is not None:  # a block's element is read, its bf16 written and read
        moved = rest + (1 + 2 * DTYPE_BYTES["bf16"]) * blocks
        seconds = moved / (MEMORY_SHARE * gpu.memory_bytes_per_second)
    return HashCost(num_owners(layout), trainer, trainer / SHA256_BYTES_PER_SECOND, server, seconds)


def publish_seconds(config: Config, spec: ModelSpec, layout: Layout, gpu: Gpu, total_parameters: int) -> float:
    """Return the seconds of one publish, the mean over `publish.verify_all_every` and `publish.full_every` publishes.
    The ranks that own tensors
    gather them in their tensor-parallel groups and hash them, all at the same time, while one rank after the other
    sends a bucket, one copy per group of servers. Then the servers hash what they hold. With `publish.method: disk`
    weights are hashed, written once and read on every node of every server. The publish at a server's start is left
    out.
    """
    weight_bytes = version_bytes(config, spec, total_parameters)
    delta = delta_cost(config, spec, layout, total_parameters)
    moved_bytes = weight_bytes if delta is None else delta.mean_bytes
    servers, cluster = config.server.num_servers, config.cluster
    hashes = hash_cost(config, spec, layout, total_parameters, True, gpu)
    verifying = hashes.server_seconds or 0.0
    verifying += copying_seconds(
        config.publish.full_every, delta, rank_weight_bytes(config.server, config.precision, spec, total_parameters)
    )
    if config.publish.method == "disk":
        moving = (1 + servers * config.server.num_nodes) * moved_bytes / STORAGE_BYTES_PER_SECOND
        return hashes.trainer_seconds + moving + verifying
    # In each pipeline stage and expert rank, one rank gets each tensor whole, and sends it. It gathers plain tensors
    # and quantises what it sends.
    owners = num_owners(layout)
    tensor = max(layout.tensor, layout.expert_tensor)
    gathering = (
        total_parameters
        * WEIGHT_BYTES[config.precision]
        * (1 - 1 / tensor)
        / owners
        / _link(gpu, tensor, cluster.ranks_per_node)
    )
    link = LINK_SHARE * (gpu.nvlink_bytes_per_second if on_one_node(config) else gpu.network_bytes_per_second)
    # Owners that do not send bring their tensors to a sender first.
    senders = num_senders(config.publish, spec, layout)
    gathering += weight_bytes * (1 - senders / owners) / senders / link
    preparing = gathering + hashes.trainer_seconds
    # A sender's first bucket is gathered and hashed before any is sent.
    first = min(1.0, config.publish.bucket_bytes / weight_bytes * senders)
    # A server takes one bucket at a time, no matter which rank sends it.
    leaving = math.ceil(servers / (config.publish.servers_per_group or servers)) * moved_bytes / link
    return max(preparing, leaving) + first * min(preparing, leaving) + verifying


def save_seconds(num_bytes: int) -> float:
    """Return the seconds of writing a checkpoint to shared storage."""
    return num_bytes / STORAGE_BYTES_PER_SECOND


@dataclass(frozen=True)
class RouteCost:
    """The cost of one step's routed experts, in bytes: `http`, as the servers send them; `held`, as the journal holds
    them; `handed_out`, as they leave rank 0; `memory`, of all batches that rank 0 has at a time. `receive_seconds`:
    time of the event loop, which has one core. `decode_seconds`: time of another core.
    """

    http: int
    held: int
    memory: int
    handed_out: int
    receive_seconds: float
    decode_seconds: float


@dataclass(frozen=True)
class HandOut:
    """`shards`: bytes of one step that leave rank 0, without routes. `routes`: what the routes cost, None without any.
    `is_ahead`: all of it is ready to be sent, in rank 0's memory, while the step before trains.
    """

    shards: int
    routes: RouteCost | None
    is_ahead: bool = False

    @property
    def ahead_bytes(self) -> int:
        """Bytes of rank 0's memory that the next step's hand-out takes while a step trains."""
        return (self.shards + (self.routes.handed_out if self.routes is not None else 0)) * self.is_ahead


def hand_out(config: Config, spec: ModelSpec, layout: Layout) -> HandOut:
    """Return the most that the hand-out of one step takes."""
    batch, response = config.batch, config.rollout.max_new_tokens
    if config.rollout.episode.function != "one_turn":
        response = max(response, (config.episodes.max_tokens or 0) - config.data.max_prompt_tokens)
    length = config.data.max_prompt_tokens + response
    rows = batch.prompts_per_step * batch.group_size
    # Rank 0 keeps its own share if no other rank needs it.
    positions = rows * (length + -length % layout.sequence_multiple_tokens)
    away = 1 - (layout.tensor * layout.context * layout.pipeline == 1) / layout.data
    more = (config.advantage.turns == "return_to_go") + (config.rollout.max_staleness > 0)
    more += critic_of(config.algorithm, config.critic) is not None  # rewards of tokens
    more += batch.share_prefixes != "off"  # where each position is computed
    packs = max(1, positions // batch.micro_batch_tokens)
    shards = positions * (POSITION_BYTES + more * MORE_POSITION_BYTES) + packs * PACK_BYTES
    recorded = config.train is not None and config.train.from_rollouts is not None
    num_ahead = 1 if recorded else config.rollout.max_staleness
    if spec.moe is None or not config.rollout.return_routed_experts:
        return HandOut(int(shards * away), None, num_ahead > 0)
    sampled = config.rollout.max_oversampling if filters_groups(config.rollout) else 1.0
    values = rows * (length - 1) * spec.num_layers * spec.moe.experts_per_token * sampled
    # Rank 0 keeps the routes of its own stage's layers if no other rank needs them.
    stages = [sum(map(spec.has_experts, layers)) for layers in _stage_layers(layout)]
    alone = layout.tensor * layout.context == 1
    sent = sum(stages) - (stages[0] / layout.data if alone else 0)
    return HandOut(
        int(shards * away),
        RouteCost(
            http=int(values * HTTP_ROUTE_BYTES),
            held=int(values * spec.moe.route_bytes),
            memory=int(values * spec.moe.route_bytes) * (1 + num_ahead),
            handed_out=int(positions * sent * spec.moe.experts_per_token * spec.moe.route_bytes),
            receive_seconds=values * HTTP_ROUTE_BYTES * RECEIVE_SECONDS,
            decode_seconds=values * DECODE_SECONDS,
        ),
        num_ahead > 0,
    )


def _stage_layers(layout: Layout) -> list[list[int]]:
    return [[layer for chunk in layout.chunk_layers(stage) for layer in chunk] for stage in range(layout.pipeline)]


def hand_out_lines(cost: HandOut) -> list[str]:
    """Return the report's lines about the hand-out."""
    lines = []
    if cost.shards:
        lines.append(f"at most {_size(cost.shards)} per step leave rank 0, each data-parallel rank's share once")
    if (routes := cost.routes) is not None:
        lines.append(
            f"routed experts per step: at most {_size(routes.http)} over HTTP, {routes.receive_seconds:.2g} s of the"
            f" collector's event loop to read and {routes.decode_seconds:.2g} core-seconds elsewhere to decode,"
            f" {_size(routes.held)} in the journal, {_size(routes.handed_out)} handed out;"
            f" {_size(routes.memory)} of rank 0's memory for the batches that it has at a time"
        )
    if cost.ahead_bytes:
        lines.append(
            f"while a step trains, the next one's hand-out waits in rank 0's memory: at most {_size(cost.ahead_bytes)}"
        )
    return lines


def _size(size: float) -> str:
    unit, factor = next(((u, f) for u, f in (("GiB", GIB), ("MiB", 2**20)) if size >= 0.1 * f), ("KiB", 1024))
    return f"{size / factor:.1f} {unit}"
