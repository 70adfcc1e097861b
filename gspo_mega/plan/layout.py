"""The sizes of every kind of parallelism, and each rank's place in them.

`layout_of_config.py` makes a Layout of a configuration. Makes no process groups; the engine does, in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Coordinates:
    """One rank's index in each kind of parallelism."""

    data: int
    pipeline: int
    context: int
    tensor: int
    expert: int
    expert_tensor: int
    expert_data: int


@dataclass(frozen=True)
class Layout:
    """A layout that can run. Sizes are numbers of ranks unless they say otherwise.

    `data` excludes context parallelism. `expert_data`: ranks over which an expert's gradient is summed.
    `stage_layers`: layers of each pipeline stage, of all its model chunks. `sequence_multiple_tokens`:
    every packed sequence is padded to a multiple of it, and the whole pack to one of `pack_multiple_tokens`.
    `mini_batch_sequences`: trajectories of each mini-batch when no sample is dropped, the largest first.
    `attention_crossover_tokens`: the model's, see `models/sizes.py`. `equal_packs`: micro-batches that run at the same
    time on different data-parallel ranks are padded to one length.
    """

    world_size: int
    tensor: int
    pipeline: int
    virtual_pipeline: int | None
    context: int
    data: int
    expert: int
    expert_tensor: int
    expert_data: int
    sequence_parallel: bool
    stage_layers: tuple[int, ...]
    padded_vocab_size: int
    sequence_multiple_tokens: int
    pack_multiple_tokens: int
    mini_batch_sequences: tuple[int, ...]
    attention_crossover_tokens: int
    equal_packs: bool

    @property
    def synchronised_packs(self) -> bool:
        """Do data-parallel ranks wait for each other in every micro-batch, and not only at the optimizer step?

        They do where a group that exchanges tokens between experts spans several of them.
        """
        return self.expert * self.expert_tensor > self.tensor * self.context

    @property
    def micro_batches_multiple(self) -> int:
        """The number of micro-batches must be a multiple of this: interleaved stages take them in turns of one per
        stage, and filler completes the last turn.
        """
        return self.pipeline if self.virtual_pipeline is not None else 1

    def chunk_layers(self, stage: int) -> list[range]:
        """The layers of each of a pipeline stage's model chunks, counted from 0."""
        chunks = self.virtual_pipeline or 1
        before, own = sum(self.stage_layers[:stage]) // chunks, self.stage_layers[stage] // chunks
        firsts = [index * sum(self.stage_layers) // chunks + before for index in range(chunks)]
        return [range(first, first + own) for first in firsts]

    @property
    def fullest_stage(self) -> int:
        """The first of the stages with the most layers."""
        return self.stage_layers.index(max(self.stage_layers))

    def ranks_of(self, data: int, stage: int | None = None) -> list[int]:
        """The ranks of one data-parallel rank, of one pipeline stage or of all: ascending, stage by stage."""
        size = self.tensor * self.context
        stages = range(self.pipeline) if stage is None else [stage]
        return [(one * self.data + data) * size + place for one in stages for place in range(size)]

    def coordinates(self, rank: int) -> Coordinates:
        """Megatron's order, fastest first: tensor, context, (expert,) data, pipeline.

        The same ranks are cut a second time for experts: expert tensor, expert, expert data, pipeline; context
        parallelism has no meaning inside an expert and its ranks are expert or expert-data ranks there.
        """
        within_stage = rank % (self.world_size // self.pipeline)
        return Coordinates(
            data=within_stage // (self.tensor * self.context),
            pipeline=rank // (self.world_size // self.pipeline),
            context=within_stage // self.tensor % self.context,
            tensor=within_stage % self.tensor,
            expert=within_stage // self.expert_tensor % self.expert,
            expert_tensor=within_stage % self.expert_tensor,
            expert_data=within_stage // (self.expert_tensor * self.expert),
        )
