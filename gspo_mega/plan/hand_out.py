"""What a step's data costs rank 0: shards that it hands out, and routed experts on their way through it.

Lengths are not known beforehand, so these are upper bounds, as the journal's are (`disk.py`): every prompt and response
has its longest length. Bytes are counted from what travels; two rates, of reading and decoding routes, were measured
(tests/benchmarks/RESULTS.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from gspo_mega.config.critic_config import critic_of
from gspo_mega.config.schema import Config
from gspo_mega.models.spec import ModelSpec
from gspo_mega.plan.layout import Layout
from gspo_mega.plan.memory import GIB

# Per position of a pack: token, position, sequence and label (8 each), mask and log-prob (4 each).
POSITION_BYTES = 40
# Where turns have advantages, or tokens weights or rewards of their own: each once more per position.
MORE_POSITION_BYTES = 8
# Names and shapes of a pack's arrays.
PACK_BYTES = 3000
# A server writes int32 in base64, four characters for three bytes.
HTTP_ROUTE_BYTES = 16 / 3
# Decoding and checking one of them on one core, without waiting for memory that others use, doubled.
DECODE_SECONDS = 2e-9
# Reading one byte of an answer, which is the event loop's own work, on one core.
RECEIVE_SECONDS = 1e-9


@dataclass(frozen=True)
class RouteCost:
    """Routed experts of one step, in bytes: as the servers send them, as the journal holds them, and as they leave
    rank 0. `memory`: of all batches that rank 0 has at a time. `receive_seconds`: of the event loop, which has one
    core; `decode_seconds`: beside it, of one core.
    """

    http: int
    held: int
    memory: int
    handed_out: int
    receive_seconds: float
    decode_seconds: float


@dataclass(frozen=True)
class HandOut:
    """Bytes of one step's shards that leave rank 0, without routes; and what the routes cost, None without any.
    `is_ahead`: they are ready to be sent, in rank 0's memory, while the step before trains.
    """

    shards: int
    routes: RouteCost | None
    is_ahead: bool = False

    @property
    def ahead_bytes(self) -> int:
        """What that takes."""
        return (self.shards + (self.routes.handed_out if self.routes is not None else 0)) * self.is_ahead


def hand_out(config: Config, spec: ModelSpec, layout: Layout) -> HandOut:
    """The most that one step takes."""
    batch, response = config.batch, config.rollout.max_new_tokens
    if config.rollout.episode.function != "one_turn":
        response = max(response, (config.episodes.max_tokens or 0) - config.data.max_prompt_tokens)
    length = config.data.max_prompt_tokens + response
    rows = batch.prompts_per_step * batch.group_size
    # Rank 0 keeps its own share where nobody else needs it.
    positions = rows * (length + -length % layout.sequence_multiple_tokens)
    away = 1 - (layout.tensor * layout.context * layout.pipeline == 1) / layout.data
    more = (config.advantage.turns == "return_to_go") + (config.rollout.max_staleness > 0)
    more += critic_of(config) is not None  # rewards of tokens
    packs = max(1, positions // batch.micro_batch_tokens)
    shards = positions * (POSITION_BYTES + more * MORE_POSITION_BYTES) + packs * PACK_BYTES
    recorded = config.train is not None and config.train.from_rollouts is not None
    num_ahead = 1 if recorded else config.rollout.max_staleness
    if spec.moe is None or not config.rollout.return_routed_experts:
        return HandOut(int(shards * away), None, num_ahead > 0)
    sampled = config.rollout.max_oversampling if config.rollout.filter_constant_groups else 1.0
    values = rows * (length - 1) * spec.num_layers * spec.moe.experts_per_token * sampled
    # Rank 0's own stage keeps its layers' where nobody else needs them.
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
    """The report's lines."""
    lines = []
    if cost.shards:
        lines.append(f"at most {_size(cost.shards)} per step leave rank 0, each data-parallel rank's share once")
    if (routes := cost.routes) is not None:
        lines.append(
            f"routed experts per step: at most {_size(routes.http)} over HTTP, {routes.receive_seconds:.2g} s of the"
            f" collector's event loop to read and {routes.decode_seconds:.2g} core-seconds beside it to decode,"
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
