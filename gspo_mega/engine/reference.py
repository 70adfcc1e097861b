"""Other weights than the current ones: the frozen reference of a KL term, a teacher, and the policy's earlier versions.

`ReferencePolicy` is the same model in the same layout, never trained and never saved; the layer above loads its
weights. Its log-probs come from the same function, packs and precision as the policy's. `FrozenBase` takes its place
where adapters are trained. `TeacherModel` is a frozen model of its own size in the same layout, and `Teachers` are all
that a run has, those on servers too. `Snapshots` keeps the policy's weights of earlier versions on the host, and
measures with them how far the policy has moved since stale tokens were sampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from gspo_mega.algorithm.objective import segment_sum
from gspo_mega.algorithm.terms import STALENESS_SUMS
from gspo_mega.base.records import MicroBatch
from gspo_mega.config.derived import num_served_top, teacher_config, teacher_folders, teachers
from gspo_mega.config.schema import Config
from gspo_mega.engine.adapters import without_adapters
from gspo_mega.engine.device_batch import DeviceBatch, held_rows, to_device
from gspo_mega.engine.forward_backward import Pipeline
from gspo_mega.engine.log_probs import head_rows
from gspo_mega.engine.losses import PassOutput, TaughtStates, TaughtTokens, TeacherScores, require_finite_tokens
from gspo_mega.engine.model import build_chunks, transformer_config
from gspo_mega.engine.policy import OldState, PolicyEngine
from gspo_mega.engine.process_groups import ParallelGroups, device, dismantle_with_groups
from gspo_mega.engine.routing import Routers, RoutingPass
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.spec import ModelSpec


class ReferencePolicy:
    """This rank's part of the reference. `chunks` have no gradients, no data parallelism and no optimizer; they are
    untrained until loaded. Its routers never replay routes, even if the policy does.

    Constructing it is collective over all ranks.
    """

    def __init__(
        self, config: Config, spec: ModelSpec, groups: ParallelGroups, pipeline: type[Pipeline] = Pipeline
    ) -> None:
        megatron_config = transformer_config(config, spec)
        self.chunks = build_chunks(megatron_config, spec, groups)
        for chunk in self.chunks:
            chunk.requires_grad_(False)
            dismantle_with_groups(chunk)
        self._pipeline: Any = pipeline(
            spec,
            groups,
            megatron_config,
            self.chunks,
            self.chunks,
            temperature=config.rollout.temperature,
            log_prob_chunk_tokens=config.batch.log_prob_chunk_tokens,
        )
        self._routers = Routers(
            self.chunks, spec.moe, groups, sequence_parallel=megatron_config.sequence_parallel, recompute=False
        )

    @property
    def num_bytes(self) -> int:
        """Memory of the parameters on this rank."""
        return sum(p.numel() * p.element_size() for chunk in self.chunks for p in chunk.parameters())

    def log_probs(self, micro_batches: list[MicroBatch]) -> list[torch.Tensor]:
        """The log-probs of this rank's active tokens, [N] float32 nats per micro-batch; empty except on last-stage
        ranks.

        Raises NumericsError naming the trajectory with a non-finite log-prob. Collective.
        """
        routing = RoutingPass(self._routers, len(micro_batches))
        outputs = self._pipeline.run(micro_batches, _collect, forward_only=True, routing=routing)
        return [output.columns["reference_log_probs"] for output in outputs]


class TeacherModel(ReferencePolicy):
    """This rank's part of a teacher with a `path`, frozen as a reference is. `spec`: the teacher's. It takes the
    policy's packs, whose token ids mean the same to it. `keeps_states`: its scores have states, because whole
    distributions are compared.

    Constructing it is collective over all ranks.
    """

    def __init__(self, config: Config, spec: ModelSpec, groups: ParallelGroups) -> None:
        super().__init__(teacher_config(config, spec.moe is not None), spec, groups, _StatePipeline)
        self.keeps_states = config.teacher is not None and config.teacher.divergence != "sampled_token"

    def score(self, micro_batches: list[MicroBatch]) -> list[TeacherScores]:
        """What the teacher says of this rank's active tokens, one item per micro-batch; empty except on last-stage
        ranks. Raises NumericsError naming the trajectory with a non-finite log-prob. Collective.
        """
        states: list[torch.Tensor] = []
        self._pipeline.states = states if self.keeps_states else None
        log_probs = self.log_probs(micro_batches)
        self._pipeline.states = None
        if not states:
            return [TeacherScores(values) for values in log_probs]
        weight = self.chunks[-1].head_weight()
        return [
            TeacherScores(values, distributions=(TaughtStates(None, own, weight),))
            for values, own in zip(log_probs, states, strict=True)
        ]


class Teachers:
    """All teachers of a run (`teacher`). `models`: this rank's part of each that the ranks load, by folder; untrained
    until loaded. The scores of the others, which are servers, come with the packs.

    A teacher of one source scores its rows only. Each model still reads all packs, because their layout is the
    policy's, and its scores of the other rows are left out.
    """

    def __init__(self, config: Config, groups: ParallelGroups) -> None:
        """Collective over all ranks."""
        self._named, self._groups, self._has_top = teachers(config.teacher), groups, num_served_top(config.teacher) > 0
        self.models: dict[str, TeacherModel] = {}
        for folder in teacher_folders(config.teacher):
            self.models[folder] = TeacherModel(config, read_model_spec(folder), groups)

    @property
    def num_bytes(self) -> int:
        """Memory of all parameters on this rank."""
        return sum(model.num_bytes for model in self.models.values())

    @property
    def keeps_states(self) -> bool:
        """Whether scores hold states, which are large."""
        return any(model.keeps_states for model in self.models.values())

    def score(self, micro_batches: list[MicroBatch]) -> list[TeacherScores]:
        """As `TeacherModel.score`, of each token's own teacher. Collective."""
        by_folder = {folder: model.score(micro_batches) for folder, model in self.models.items()}
        if len(self._named) == 1 and self._named[0].source is None and by_folder:
            (found,) = by_folder.values()
            return found
        if not self._groups.is_last_stage:
            return []
        return [
            self._of_each_token(micro_batch, {folder: scores[index] for folder, scores in by_folder.items()})
            for index, micro_batch in enumerate(micro_batches)
        ]

    def _of_each_token(self, micro_batch: MicroBatch, by_folder: Mapping[str, TeacherScores]) -> TeacherScores:
        held, rows = held_rows(micro_batch, self._groups)
        active = held[rows].numpy()
        number = np.zeros(len(active))
        if "teacher" in micro_batch.sequence:
            number = micro_batch.sequence["teacher"][micro_batch.sequence_ids[active]]
        log_probs = torch.zeros(len(active), device=device())
        distributions: list[TaughtStates | TaughtTokens] = []
        for place, one in enumerate(self._named):
            mine = np.flatnonzero(number == place)
            places = torch.from_numpy(mine).to(device())
            if one.settings.path is not None:
                scores = by_folder[one.settings.path]
                log_probs[places] = scores.log_probs[places]
                for part in scores.distributions:
                    assert isinstance(part, TaughtStates)
                    distributions.append(TaughtStates(places, part.states[places], part.head_weight))
                continue
            log_probs[places] = _packed(micro_batch.teacher_log_probs, active[mine])
            if self._has_top:
                ids = _packed(micro_batch.teacher_top_ids, active[mine]).long()
                tops = _packed(micro_batch.teacher_top_log_probs, active[mine])
                distributions.append(TaughtTokens(places, ids, tops))
        taught = None if (number >= 0).all() else torch.from_numpy(number >= 0).to(device())
        return TeacherScores(log_probs, taught, distributions)


def _packed(values: np.ndarray | None, places: np.ndarray) -> torch.Tensor:
    """Values of a pack at these places, on this rank's device."""
    assert values is not None, "the pack has no scores of a teacher's server"
    return torch.from_numpy(values[places]).to(device())


@dataclass
class _StatePipeline(Pipeline):
    """Keeps the states that the head reads, if `states` is a list: [N, H] of the model's dtype for each micro-batch."""

    states: list[torch.Tensor] | None = None

    def read(
        self, batch: DeviceBatch, hidden: torch.Tensor, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.states is not None:
            is_cut = self.megatron_config.sequence_parallel
            self.states.append(head_rows(hidden, batch.rows, tensor_group=self.groups.tensor, sequence_parallel=is_cut))
        return super().read(batch, hidden, with_entropy)


class FrozenBase:
    """The policy's own frozen weights as the reference, if it trains adapters: passes with the adapters off. It needs
    no memory.
    """

    num_bytes = 0
    chunks: Sequence[torch.nn.Module] = ()

    def __init__(self, engine: PolicyEngine) -> None:
        self._engine = engine

    def log_probs(self, micro_batches: list[MicroBatch]) -> list[torch.Tensor]:
        """As `ReferencePolicy.log_probs`. Collective."""
        with without_adapters(self._engine.chunks):
            outputs = self._engine.score(micro_batches, _collect, replays_rollout=False)
        return [output.columns["reference_log_probs"] for output in outputs]


def _collect(batch: DeviceBatch, log_probs: torch.Tensor, _entropies: torch.Tensor | None) -> PassOutput:
    require_finite_tokens(batch, reference_log_probs=log_probs)
    return PassOutput(columns={"reference_log_probs": log_probs})


class Snapshots:
    """The policy's weights at the last `most` versions. Every rank keeps its own, in their dtype, on the host."""

    def __init__(self, engine: PolicyEngine, most: int) -> None:
        self._engine, self._most = engine, most
        self._kept: dict[int, list[torch.Tensor]] = {}

    def keep(self, version: int) -> None:
        """Copy the present parameters as those of `version`, and drop the copies older than the last `most`."""
        self._kept = {kept: values for kept, values in self._kept.items() if kept > version - self._most}
        self._kept[version] = [tensor.detach().to("cpu", copy=True) for tensor in self._tensors()]

    def missing(self, micro_batches: Sequence[MicroBatch]) -> list[int]:
        """The versions of these packs of which there is no copy, as after a restart; sorted."""
        return sorted(_versions(micro_batches) - self._kept.keys())

    def measure(self, mini_batches: Sequence[list[MicroBatch]], olds: Sequence[OldState], version: int) -> None:
        """Add the two parts of every sequence's gap (`STALENESS_SUMS`) to the report of each mini-batch's old pass,
        which the weights of `version` made.

        Runs one pass without gradients for each other version of the packs. Afterwards the parameters are bit for bit
        the present ones again. Collective. Raises KeyError for a version that is `missing`, or if `version` is not
        kept.
        """
        engine = self._engine
        own = [[part.log_probs.double() for part in old.micro_batches] for old in olds]
        versions = mini_batches[0][0].versions  # of the whole rollout batch, the same in each pack
        for place, other in enumerate(() if versions is None else versions.tolist()):
            if other == version:
                continue
            with self._as_of(other, version):
                for micro_batches, mine in zip(mini_batches, own, strict=True):
                    kept = _VersionLogProbs()
                    engine.score(micro_batches, kept, replays_rollout=engine.config.moe.routing_replay == "R3")
                    for index, (values, chosen) in enumerate(zip(kept.log_probs, kept.sampled_by(place), strict=True)):
                        mine[index] = torch.where(chosen, values.double(), mine[index])
        if not engine.groups.reports:
            return
        for micro_batches, old, mine in zip(mini_batches, olds, own, strict=True):
            sums = []
            for micro_batch, part, of_version in zip(micro_batches, old.micro_batches, mine, strict=True):
                batch = to_device(micro_batch, engine.groups)
                parts = (part.log_probs.double() - of_version, of_version - batch.rollout_log_probs.double())
                both = [segment_sum(values, batch.sequence_ids, batch.num_sequences) for values in parts]
                sums.append(torch.stack(both, dim=1)[torch.from_numpy(batch.trajectory_index >= 0).to(both[0].device)])
            old.report.columns[STALENESS_SUMS.name] = torch.cat(sums).cpu().numpy()

    @contextmanager
    def _as_of(self, version: int, present: int) -> Iterator[None]:
        """Inside the block the parameters are those of `version`, afterwards again those of `present`, the current
        ones.
        """
        before = self._kept[present]
        try:
            self._write(self._kept[version])
            yield
        finally:
            self._write(before)

    def _write(self, values: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for tensor, value in zip(self._tensors(), values, strict=True):
                tensor.copy_(value)

    def _tensors(self) -> Iterator[torch.Tensor]:
        for chunk in self._engine.chunks:
            chunk.await_parameters()  # overlapped gathers of the last step may not be complete
            yield from chunk.parameters()
            yield from chunk.buffers()  # the expert bias is one


def _versions(micro_batches: Sequence[MicroBatch]) -> set[int]:
    return {int(version) for one in micro_batches if one.versions is not None for version in one.versions}


class _VersionLogProbs:
    """A head that keeps the log-probs of this rank's active tokens, [N] float32 nats, and their versions' places."""

    wants_entropy: ClassVar[bool] = False

    def __init__(self) -> None:
        self.log_probs: list[torch.Tensor] = []
        self._places: list[torch.Tensor] = []

    def __call__(self, batch: DeviceBatch, log_probs: torch.Tensor, entropies: torch.Tensor | None) -> PassOutput:
        assert batch.version_index is not None
        self.log_probs.append(log_probs.detach())
        self._places.append(batch.version_index)
        return PassOutput()

    def sampled_by(self, place: int) -> list[torch.Tensor]:
        """Which tokens the version at this place of the batch's versions sampled: [N] bool of each pack."""
        return [places == place for places in self._places]
