"""The sizes of every kind of parallelism, each rank's place in them, and the arithmetic that they follow.

`Layout` and `Coordinates` describe a layout that can run; `resolve.py` makes it of a configuration. `Sizes` follows
from a configuration alone. The functions after it say how a model's sizes divide over ranks: multiples that FP8 demands
of a pack, the layers of each pipeline stage as Megatron divides them, and the nearest sizes that divide. What does not
divide is refused by `validate.py`. This module makes no process groups; the engine makes them in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from gspo_mega.config.derived import episode_lengths
from gspo_mega.config.schema import Config, Fp8, Parallel, Precision
from gspo_mega.models.families import FAMILIES
from gspo_mega.models.spec import ModelSpec

# The multiple that a product of Transformer Engine needs of either side of a layer, and of a rank's rows of a pack. Its
# forward pass checks 16 for a row's length and 8 for the number of rows; the backward pass turns either side, and the
# rows, into a row's length. One scale of mxfp8 serves 32 values in both directions. Blockwise takes a ragged last
# block.
RECIPE_SIDES = {"delayed": 16, "tensorwise": 16, "mxfp8": 32, "blockwise": 16}
# Rows of one block in the backward pass. With sequence parallelism Transformer Engine gathers a layer's input in FP8 if
# a rank has whole blocks. Otherwise it gathers bf16, which is twice the bytes, and quantises for the backward pass what
# it has rounded once already.
_BLOCK_ROWS = 128
# The keys that give the first and the last stage other numbers of layers.
END_KEYS = ("parallel.first_stage_layers", "parallel.last_stage_layers")


@dataclass(frozen=True)
class Layout:
    """A layout that can run. Sizes are numbers of ranks unless they say otherwise.

    `data` excludes context parallelism. `expert_data`: ranks over which an expert's gradient is summed. `stage_layers`:
    layers of each pipeline stage, of all its model chunks. `sequence_multiple_tokens`: every packed sequence is padded
    to a multiple of it, and the whole pack to one of `pack_multiple_tokens`. `mini_batch_sequences`: trajectories of
    each mini-batch when no sample is dropped, the largest first. `attention_crossover_tokens`: the model's, see
    `models/tensors.py`. `equal_packs`: micro-batches that run at the same time on different data-parallel ranks are
    padded to one length.
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
        """Whether data-parallel ranks wait for each other in every micro-batch, and not only at the optimizer step.
        They do if a group that exchanges tokens between experts spans several of them.
        """
        return self.expert * self.expert_tensor > self.tensor * self.context

    @property
    def micro_batches_multiple(self) -> int:
        """The number of micro-batches must be a multiple of this: interleaved stages take them in turns of one per
        stage, and filler completes the last turn.
        """
        return self.pipeline if self.virtual_pipeline is not None else 1

    def chunk_layers(self, stage: int) -> list[range]:
        """Return the layers of each model chunk of a pipeline stage, counted from 0."""
        chunks = self.virtual_pipeline or 1
        before, own = sum(self.stage_layers[:stage]) // chunks, self.stage_layers[stage] // chunks
        firsts = [index * sum(self.stage_layers) // chunks + before for index in range(chunks)]
        return [range(first, first + own) for first in firsts]

    @property
    def fullest_stage(self) -> int:
        """The first of the stages with the most layers."""
        return self.stage_layers.index(max(self.stage_layers))

    def ranks_of(self, data: int, stage: int | None = None) -> list[int]:
        """Return the ranks of one data-parallel rank, in one pipeline stage or in all: ascending, stage by stage."""
        size = self.tensor * self.context
        stages = range(self.pipeline) if stage is None else [stage]
        return [(one * self.data + data) * size + place for one in stages for place in range(size)]

    def coordinates(self, rank: int) -> Coordinates:
        """Return a rank's coordinates in Megatron's order, fastest first: tensor, context, (expert,) data, pipeline.

        The same ranks are divided a second time for experts: expert tensor, expert, expert data, pipeline; context
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
class Sizes:
    """Sizes that follow from a configuration alone. `world`: ranks in all. `model`: ranks of one data-parallel rank.
    `data`: data-parallel ranks, rounded down if ranks do not divide. `sequence_multiple`, `pack_multiple`: tokens that
    sequences and packs are padded to a multiple of. `longest_sequence`: tokens.
    """

    world: int
    model: int
    data: int
    sequence_parallel: bool
    sequence_multiple: int
    pack_multiple: int
    longest_sequence: int

    @classmethod
    def of(cls, config: Config) -> Sizes:
        parallel = config.parallel
        world = config.cluster.num_nodes * config.cluster.ranks_per_node
        model = parallel.tensor * parallel.pipeline * parallel.context
        sequence_parallel = parallel.sequence and parallel.tensor > 1
        # Context parallelism gives each rank two equal slices of a sequence, one from either end, to balance causal
        # attention; sequence parallelism cuts a pack's tokens evenly over tensor ranks.
        multiple = (2 * parallel.context if parallel.context > 1 else 1) * (parallel.tensor if sequence_parallel else 1)
        return cls(
            world=world,
            model=model,
            data=max(1, world // model),
            sequence_parallel=sequence_parallel,
            sequence_multiple=multiple,
            pack_multiple=math.lcm(multiple, alignment_tokens(config.parallel, config.precision, config.fp8)),
            longest_sequence=episode_lengths(config).tokens,
        )


def alignment_tokens(parallel: Parallel, precision: Precision, fp8: Fp8) -> int:
    """Return the number of tokens that the length of every pack must be a multiple of; 1 without FP8.

    It is a rank's rows x context size x (tensor size, with sequence parallelism), because a pack is cut over those
    ranks before its rows meet an FP8 product. It is always a multiple of what single sequences are padded to, so the
    packer reaches it with filler of whole sequence multiples.
    """
    if precision != "fp8":
        return 1
    tensor = parallel.tensor if parallel.sequence else 1
    rows = _BLOCK_ROWS if fp8.recipe == "blockwise" and tensor > 1 else RECIPE_SIDES[fp8.recipe]
    return rows * parallel.context * tensor


def undivided_sizes(spec: ModelSpec, tensor: int) -> list[str]:
    """Return the model's sizes that `tensor` ranks do not divide, in words."""
    # With more ranks than key-value heads, several ranks share a head: Megatron gathers the projection's rows.
    shared = tensor % spec.num_kv_heads == 0 and 2 * spec.num_kv_heads * spec.head_dim % tensor == 0
    if FAMILIES[
        spec.family
    ].norms_all_heads:  # a rank has the rows of its own heads, and a shared head would count twice
        shared = False
    sizes = [
        ("attention heads", spec.num_heads),
        ("key-value heads", 0 if shared or spec.latent is not None else spec.num_kv_heads),
    ]
    if spec.delta is not None:
        sizes.append(("key heads of gated delta nets", spec.delta.key_heads))
    if not spec.has_experts(0):
        sizes.append(("intermediate size", spec.intermediate_size))
    if spec.moe is not None:
        sizes.append(("shared experts' intermediate size", spec.moe.shared_intermediate_size))
    return [f"{name} {size}" for name, size in sizes if size % tensor]


def can_divide_model(parallel: Parallel, spec: ModelSpec) -> bool:
    """Return whether `parallel.tensor` and `parallel.pipeline` divide the model. If not, checks that follow from these
    sizes are left out, because the sizes have to change first.
    """
    return not undivided_sizes(spec, parallel.tensor) and bool(stage_layers(spec.num_layers, parallel))


def stage_layers(num_layers: int, parallel: Parallel) -> tuple[int, ...] | None:
    """Return the layers of each pipeline stage; None if they do not add up, or if a stage would have none.

    Stages with fewer layers leave room for the embedding or the head, or make a number of layers divide that otherwise
    would not.
    """
    first, last = given_ends(parallel)
    middle = parallel.pipeline - len(first) - len(last)
    left = num_layers - sum(first) - sum(last)
    if middle < 0 or left < middle or (left % middle if middle else left):
        return None
    return (*first, *[left // max(1, middle)] * middle, *last)


def given_ends(parallel: Parallel) -> tuple[list[int], list[int]]:
    """Return the numbers of layers that the YAML gives to the first and to the last stage: lists of one
    number or none.
    """
    first, last = parallel.first_stage_layers, parallel.last_stage_layers
    return [] if first is None else [first], [] if last is None else [last]


def lighter_ends(num_layers: int, pipeline: int) -> dict[str, int | None] | None:
    """Return the values of both keys with which `pipeline` stages hold the layers, no stage more than needed and the
    last one the fewest. Returns None if the stages divide evenly, or if it cannot be done.
    """
    if pipeline < 2 or num_layers % pipeline == 0 or num_layers < pipeline:
        return None
    most = -(-num_layers // pipeline)
    last = num_layers - most * (pipeline - 1)
    if last >= 1 and last >= most - 2:
        return {"first_stage_layers": None, "last_stage_layers": last}
    both = num_layers - most * (pipeline - 2)
    if both < 2:
        return None
    return {"first_stage_layers": both - both // 2, "last_stage_layers": both // 2}


def nearest(value: int, valid: Iterable[int]) -> str:
    """Return the closest valid values below and above `value`, in words."""
    choices = sorted(set(valid))
    below = [choice for choice in choices if choice < value][-1:]
    above = [choice for choice in choices if choice > value][:1]
    return " or ".join(map(str, below + above))


def divisors(number: int) -> list[int]:
    """Return all positive divisors, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def dividing(world: int, others: int, choices: list[int]) -> list[int]:
    """Return the `choices` whose product with `others` divides `world`. If none does, return all of them; the number of
    ranks then has to change too.
    """
    return [choice for choice in choices if world % (choice * others) == 0] or choices
