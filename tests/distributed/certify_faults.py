"""A rank of `gspo-mega certify` with a fault in it: `main([FAULT, ARGUMENTS...])`, in a fork (`forked_workers.py`).

Each fault is one that real systems have had; a certificate that passes with it would be worth nothing.
"""

from __future__ import annotations

import itertools
import os


def context_sums_not_shared() -> None:
    """Every context-parallel rank takes its own tokens for the whole sequence."""
    import gspo_mega.engine.losses as losses

    losses.sum_over_context = lambda values, context: values


def norms_not_marked_for_sequence_parallelism() -> None:
    """The gradients of norms are not summed over tensor ranks."""
    import gspo_mega.engine.model as model

    mark = model.mark_parameters

    def unmarked(spec, groups, chunks):
        mark(spec, groups, chunks)
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if "norm" in name:
                    parameter.sequence_parallel = False

    model.mark_parameters = unmarked


def mean_of_means() -> None:
    """Each rank divides by its own number of sequences."""
    import gspo_mega.verify.certify.measure as measure

    whole = measure.Measurement.shard

    def divided_locally(self):
        mine = whole(self)
        size = self.engine.groups.data.size
        mine.denominator = size * float(sum((m.sequence["length"] > 0).sum() for m in mine.micro_batches)) or 1.0
        return mine

    measure.Measurement.shard = divided_locally


def value_gradient_summed_over_tensor_ranks() -> None:
    """Each tensor rank has the whole gradient of the critic's states; their sum is of a head that is cut over them."""
    import gspo_mega.engine.critic as value_head

    gather = value_head.gather_from_sequence_parallel_region
    value_head.gather_from_sequence_parallel_region = lambda states, tensor_parallel_output_grad, group: gather(
        states, tensor_parallel_output_grad=True, group=group
    )


def second_moments_stay_behind() -> None:
    """A run that is continued begins with second moments of zero."""
    import gspo_mega.checkpoint.load as load

    read = load._load_model

    def without(folder, name, engine, saved):
        read(folder, name, engine, saved)
        for part in engine.optimizer.chained_optimizers:
            for state in part.optimizer.state.values():
                state["exp_avg_sq"].zero_()

    load._load_model = without


def the_schedule_begins_again() -> None:
    """A run that is continued has the learning rates of its first steps."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    step = OptimizerParamScheduler.step
    OptimizerParamScheduler.step = lambda self, increment: step(self, increment if increment == 1 else 0)


def positions_from_zero_in_each_node() -> None:
    """The response after a shared prompt has the rotary positions of a row of its own."""
    import gspo_mega.engine.device_batch as device_batch

    nodes = device_batch.ForestNodes

    def from_zero(starts, ends, depths, *counts):
        for start, stop in itertools.pairwise(starts):
            depths[start:stop] -= depths[start].clone()
        return nodes(starts, ends, depths, *counts)

    device_batch.ForestNodes = from_zero


def responses_see_their_siblings() -> None:
    """Every token attends to all earlier ones of its tree."""
    import gspo_mega.cpu.packed_sdpa as packed_sdpa

    attend = packed_sdpa.forest_attend

    def over_siblings(query, key, value, nodes, scale, sinks):
        last = [max(end for start, end in zip(nodes.starts, nodes.ends) if start <= own) for own in nodes.starts[:-1]]
        return attend(query, key, value, type(nodes)(nodes.starts, last, nodes.depths), scale, sinks)

    packed_sdpa.forest_attend = over_siblings


def masks_of_the_first_tokens() -> None:
    """A context-parallel rank takes the sets of the pack's first tokens for those of the tokens that it holds."""
    from gspo_mega.base.sampling_masks import SamplingMasks

    at = SamplingMasks.at
    SamplingMasks.at = lambda self, places: at(self, self.counts.nonzero()[0][: len(places)])


def second_rank_dies_in_one_case() -> None:
    """An exception on one rank, in the case whose chunk is of 31 tokens."""
    import gspo_mega.verify.certify.ranks as ranks

    load = ranks._load

    def fails(engine, config):
        if config.batch.log_prob_chunk_tokens == 31 and os.environ["RANK"] == "1":
            raise RuntimeError("a rank's own trouble")
        load(engine, config)

    ranks._load = fails


def main(words: list[str]) -> None:
    """Does not return."""
    from gspo_mega.train import worker

    globals()[words[0]]()
    worker.main(words[1:])
