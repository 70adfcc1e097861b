"""Measure one case on the recorded batch: log-probs, loss, gradient, optimizer steps, and the weights after them.

Runs on every rank of the case. Whole tensors are streamed one at a time, so that a large model's gradient is never held
twice; the caller's `take` writes them to disk as the reference, or compares them.

Also: packings that training would not choose and that must not matter (shuffled, all in one, one each, uneven shards);
the experts of every token of the recorded batch, gathered from all ranks; and routers with deliberate ties.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from gspo_mega.algorithm.diagnostics import POLICY_SUMS
from gspo_mega.algorithm.objective import ObjectiveSettings
from gspo_mega.algorithm.terms import LOG_S
from gspo_mega.base.episodes import RolloutBatch
from gspo_mega.base.records import MicroBatch
from gspo_mega.checkpoint.adapters import AdapterTensors
from gspo_mega.checkpoint.gather import PolicyTensors
from gspo_mega.config.derived import leaves_out_by_covariance
from gspo_mega.config.schema import Config
from gspo_mega.data.packing import ExpertRoutes, RankPlan, response_values
from gspo_mega.engine.critic import CriticEngine
from gspo_mega.engine.device_batch import held_rows
from gspo_mega.engine.losses import TeacherScores
from gspo_mega.engine.optimizer import StepResult
from gspo_mega.engine.policy import OldState, PassReport, PolicyEngine
from gspo_mega.engine.reference import Teachers
from gspo_mega.engine.routing import Routes, choice_margins, influential_positions
from gspo_mega.plan.layout import Layout
from gspo_mega.train.batches import MiniBatch, assemble, plan_batch
from gspo_mega.verify.certify.batch import set_old_log_probs
from gspo_mega.verify.certify.steps import CaseSteps, StepWatch, complete_gradients

_UNEVEN_PACK_SEQUENCES = 3


def packing(kind: str, num_trajectories: int, seed: int, layout: Layout, planned: list[RankPlan]) -> list[RankPlan]:
    """Return the plans of all data-parallel ranks for one mini-batch in the packing `kind` (`certify.cases[].packing`).

    `planned`: the plans of training; `seed`: for random orders. All ranks get equally many packs; if sequences run out,
    the rest are empty (filler).
    """
    rng = np.random.default_rng((seed, 9))
    if kind == "planned":
        return planned
    if kind == "shuffled":
        return [RankPlan([_shuffled(packs, rng) for packs in plan.mini_batches]) for plan in planned]
    if kind == "one_pack":
        return [RankPlan([[plan.rows]]) for plan in planned]
    if kind == "one_each":
        return _equal_counts([[[index] for index in plan.rows] for plan in planned])
    if kind == "uneven":
        order = rng.permutation(num_trajectories).tolist()
        # The first rank takes two thirds, the second two thirds of what is left, ...
        shards, rest = [], order
        for _ in range(layout.data - 1):
            taken = -(-2 * len(rest) // 3)
            shards.append(rest[:taken])
            rest = rest[taken:]
        shards.append(rest)
        step = _UNEVEN_PACK_SEQUENCES
        return _equal_counts([[shard[i : i + step] for i in range(0, len(shard), step)] for shard in shards])
    raise ValueError(f"packing {kind!r}; valid: planned, shuffled, one_pack, one_each, uneven")


def _shuffled(packs: list[list[int]], rng: np.random.Generator) -> list[list[int]]:
    return [rng.permutation(packs[k]).astype(int).tolist() for k in rng.permutation(len(packs))]


def _equal_counts(packs_of: list[list[list[int]]]) -> list[RankPlan]:
    """Return plans from packs of batch indices, with empty packs so that all ranks have equally many."""
    count = max(len(packs) for packs in packs_of)
    return [RankPlan([packs + [[] for _ in range(count - len(packs))]]) for packs in packs_of]


# Relative difference of tied rows: their scores then differ by about their rounding.
_TIE = 1e-7


def gather_routes(
    engine: PolicyEngine, batch: RolloutBatch, micro_batches: list[MicroBatch], routes: list[Routes]
) -> np.ndarray | None:
    """Return the experts of each token, sorted, [sum of prompt + response - 1, layers, k] int64; -1 for a token that no
    log-prob of the batch depends on. None for a model without experts, or if routes are replayed and so not recorded.
    Collective over all ranks.
    """
    if engine.spec.moe is None or engine.config.moe.routing_replay == "R3":
        return None
    lengths = [t.num_tokens - 1 for t in batch.trajectories]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    k = engine.spec.moe.experts_per_token
    # Each (token, layer) is on one rank; the other ranks contribute zero.
    whole = torch.zeros(int(starts[-1]), engine.spec.num_layers, k, dtype=torch.int64)
    for micro_batch, recorded in zip(micro_batches, routes, strict=True):
        positions, routed_at = engine.routers.all_rows(micro_batch)
        places = _places(micro_batch, starts)[positions]
        compared = influential_positions(micro_batch)[positions] & (places >= 0)
        rows = torch.from_numpy(routed_at[compared])
        for layer, experts in recorded.items():
            whole[torch.from_numpy(places[compared]), layer] = experts.long().cpu()[rows].sort(dim=1).values + 1
    dist.all_reduce(whole, group=engine.groups.host.group)
    return whole.numpy() - 1


def _places(micro_batch: MicroBatch, starts: np.ndarray) -> np.ndarray:
    """Return the index of each position of a pack among all tokens of the batch, [T]; -1 for padding and filler."""
    places = np.full(micro_batch.num_tokens, -1, np.int64)
    for s, row in enumerate(micro_batch.trajectory_index.tolist()):
        if row >= 0:
            begin, length = int(micro_batch.cu_seqlens[s]), int(starts[row + 1] - starts[row])
            places[begin : begin + length] = np.arange(length) + starts[row]
    return places


def num_route_flips(routes: np.ndarray | None, want: np.ndarray | None) -> int:
    """Count the (token, layer) pairs whose sets of experts differ. `routes`, `want`: sorted expert numbers,
    [tokens, layers, k] int, global; None without experts.
    """
    return 0 if routes is None or want is None else int((routes != want).any(axis=2).sum())


@torch.no_grad()
def tie_routers(engine: PolicyEngine) -> None:
    """Make the rows of each router equal, up to the rounding of a score, in groups of one row more than a token has
    experts. Rounding then decides which expert of the best group is left out.
    """
    if engine.spec.moe is None:
        return
    group = engine.spec.moe.experts_per_token + 1
    for layer, router in engine.routers.all():
        noise = torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(layer), dtype=torch.float64)
        first = torch.arange(router.weight.size(0)) // group * group
        router.weight.copy_(router.weight[first].double() * (1 + _TIE * noise.to(router.weight.device)))
        if router.expert_bias is not None:
            router.expert_bias.copy_(router.expert_bias[first])


class RouterMargins:
    """Each token's gap between the last expert chosen and the first one not chosen: the smallest over layers.

    Works on one rank that holds the whole model, for one pass over the micro-batches inside the `with`.
    """

    def __init__(self, engine: PolicyEngine) -> None:
        self._engine = engine
        self._gaps: list[np.ndarray] = []

    def __enter__(self) -> RouterMargins:
        self._hooks = [router.register_forward_hook(self._note) for _, router in self._engine.routers.all()]
        return self

    def __exit__(self, *exc: object) -> None:
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _note(self, router: torch.nn.Module, inputs: tuple[torch.Tensor, ...], _outputs: object) -> None:
        self._gaps.append(choice_margins(cast(Any, router), inputs[0]).cpu().numpy())

    def by_trajectory(self, batch: RolloutBatch, micro_batches: list[MicroBatch]) -> list[np.ndarray]:
        """Return the gaps, [prompt + response - 1] float64 per trajectory; infinite at tokens without influence."""
        lengths = [t.num_tokens - 1 for t in batch.trajectories]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        whole = np.full(int(starts[-1]), np.inf)
        layers = len(self._engine.routers.all())
        for k, micro_batch in enumerate(micro_batches if layers else []):
            places = _places(micro_batch, starts)
            counts = influential_positions(micro_batch) & (places >= 0)
            whole[places[counts]] = np.min(self._gaps[k * layers : (k + 1) * layers], axis=0)[counts]
        return np.split(whole, starts[1:-1])


Tensors = Iterator[tuple[str, torch.Tensor]]
Take = Callable[[Tensors], None]


@dataclass
class Numbers:
    """A case's numbers, the same on every rank. `log_probs` [sum R] float64 nats, 0 at masked tokens; `log_s` [n]
    float64 per trajectory; `sums`: POLICY_SUMS of the mini-batch by name; `grad_norms`: one per optimizer step;
    `routes`: from `gather_routes`.
    """

    log_probs: np.ndarray
    log_s: np.ndarray
    sums: dict[str, float]
    grad_norms: list[float]
    routes: np.ndarray | None


@dataclass
class Edges:
    """Numbers where rounding decides: `log_s` [n] float64, each on a clip edge; `routes`: from tied routers."""

    log_s: np.ndarray
    routes: np.ndarray | None


class Measurement:
    """Measures one engine on the recorded batch in one packing. All methods are collective over all ranks."""

    def __init__(
        self,
        engine: PolicyEngine,
        config: Config,
        layout: Layout,
        batch: RolloutBatch,
        kind: str,
        teacher: Teachers | None = None,
    ) -> None:
        self.engine, self.config, self.layout, self.batch, self.kind = engine, config, layout, batch, kind
        self.teacher = teacher
        # Token advantages from a critic, per micro-batch of `shard`, on last-stage ranks.
        self.token_advantages: list[np.ndarray | None] | None = None

    def shard(self) -> MiniBatch:
        """Return this rank's micro-batches of the only mini-batch, with the old log-probs that the batch holds now."""
        trajectories = self.batch.trajectories
        planned = plan_batch(self.batch, self.config, self.layout, 0)
        plans = packing(self.kind, len(trajectories), self.config.run.seed, self.layout, planned)
        mine = assemble(self.batch, self.config, self.layout, 0, plans)[self.engine.groups.data.rank][0]
        replays = self.config.moe.routing_replay == "R3"
        if (routes := ExpertRoutes.of(trajectories, self.engine.spec, replays)) is not None:
            routes.attach(mine.micro_batches)
        if self.token_advantages is not None:
            for pack, own in zip(mine.micro_batches, self.token_advantages, strict=True):
                pack.token_advantages = own
        return mine

    def log_probs(self) -> np.ndarray:
        """Return the log-probs of every response token of the batch, [sum R] float64, 0 at masked tokens."""
        mine = self.shard()
        return self._gather(mine.micro_batches, self.engine.old_pass(mine.micro_batches))

    def run(
        self,
        recorded: np.ndarray,
        settings: ObjectiveSettings,
        num_steps: int,
        take_gradient: Take,
        take_weights: Take | None,
    ) -> tuple[Numbers, CaseSteps]:
        """Return all numbers for the recorded old log-probs [sum R]. On rank 0, `take_gradient` gets every Hugging Face
        tensor of the gradient (with `lora`, only the adapters'), and `take_weights` every tensor of the weights after
        `num_steps` optimizer steps; on other ranks they get an empty stream.
        """
        engine = self.engine
        set_old_log_probs(self.batch, recorded)
        mine = self.shard()
        old = engine.old_pass(mine.micro_batches)
        scores = self._scores(mine.micro_batches)
        report = engine.policy_gradients(mine.micro_batches, settings, mine.denominator, old, teacher=scores)
        complete_gradients(engine)
        own = (engine.spec, engine.groups, engine.chunks, main_grad)
        lora = self.config.lora
        trained = PolicyTensors(*own) if lora is None else AdapterTensors(lora, *own)
        take_gradient(trained.stream(torch.float32))
        watch = StepWatch(engine, trained)
        for _ in range(num_steps):
            before = engine.old_pass(mine.micro_batches) if leaves_out_by_covariance(self.config.algorithm) else None
            watch.after(
                *_result(
                    engine.train_mini_batch(mine.micro_batches, settings, mine.denominator, before, teacher=scores)
                )
            )
        steps = watch.finish()
        if take_weights is not None:
            take_weights(PolicyTensors(engine.spec, engine.groups, engine.chunks).stream(torch.float32))
        numbers = Numbers(
            log_probs=self._gather(mine.micro_batches, old),
            log_s=self._sequence_log_ratios(report),
            sums=self._sums(report),
            grad_norms=steps.norms,
            routes=gather_routes(engine, self.batch, mine.micro_batches, old.routes),
        )
        return numbers, steps

    def on_edges(self, recorded: np.ndarray, settings: ObjectiveSettings) -> Edges:
        """Return the numbers of the loaded weights for old log-probs [sum R] that put every ratio on a clip edge."""
        engine = self.engine
        set_old_log_probs(self.batch, recorded)
        mine = self.shard()
        old = engine.old_pass(mine.micro_batches)
        scores = self._scores(mine.micro_batches)
        report = engine.policy_gradients(mine.micro_batches, settings, mine.denominator, old, teacher=scores)
        return Edges(
            self._sequence_log_ratios(report), gather_routes(engine, self.batch, mine.micro_batches, old.routes)
        )

    def _scores(self, micro_batches: list[MicroBatch]) -> list[TeacherScores] | None:
        return None if self.teacher is None else self.teacher.score(micro_batches)

    # --- from the ranks' parts to the whole -----------------------------------------------------------------

    def _gather(self, micro_batches: list[MicroBatch], old: OldState) -> np.ndarray:
        return gather_tokens(self.engine, self.batch, micro_batches, [part.log_probs for part in old.micro_batches])

    def _sequence_log_ratios(self, report: PassReport) -> np.ndarray:
        whole = torch.zeros(len(self.batch.trajectories), dtype=torch.float64)
        if report.columns:
            # Every context-parallel rank knows the whole sequence's ratio.
            shares = torch.from_numpy(report.columns[LOG_S.name] / self.engine.groups.context.size)
            whole.index_add_(0, torch.from_numpy(report.trajectory_index), shares)
        return self._sum(whole).numpy()

    def _sums(self, report: PassReport) -> dict[str, float]:
        whole = torch.zeros(len(POLICY_SUMS), dtype=torch.float64)
        if report.totals:
            whole += torch.from_numpy(report.totals["policy_sums"])
        return dict(zip(POLICY_SUMS, self._sum(whole).tolist(), strict=True))

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(values, group=self.engine.groups.host.group)
        return values


def gather_tokens(
    engine: PolicyEngine | CriticEngine,
    batch: RolloutBatch,
    micro_batches: list[MicroBatch],
    values: Sequence[torch.Tensor],
) -> np.ndarray:
    """Return one value per response token of `batch`, [sum R] float64, on every rank; 0 at masked tokens. Collective.

    `values`: on last-stage ranks, the values of this rank's active tokens for each micro-batch, [N] of any float dtype.
    """
    lengths = [t.num_response_tokens for t in batch.trajectories]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    whole = torch.zeros(int(starts[-1]), dtype=torch.float64)
    groups = engine.groups
    if groups.reports:
        for micro_batch, part in zip(micro_batches, values, strict=True):
            held, active = held_rows(micro_batch, groups)
            spread = np.zeros(micro_batch.num_tokens)
            spread[held[active].numpy()] = part.double().cpu().numpy()
            for row, tokens in response_values(micro_batch, spread).items():
                whole[starts[row] : starts[row + 1]] += torch.from_numpy(tokens)
    dist.all_reduce(whole, group=groups.host.group)
    return whole.numpy()


def _result(done: tuple[StepResult, PassReport]) -> tuple[StepResult, dict[str, float]]:
    return done[0], done[1].routing


def main_grad(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the parameter's gradient, of its local shape."""
    return cast(Any, parameter).main_grad  # Megatron's data parallelism adds the attribute
