"""What ranks run in the tests of the LM head and of the sums over context ranks: the function itself, no model around
it.
"""

from __future__ import annotations

import contextlib
import math

import numpy as np
import torch
import torch.distributed as dist
from layout_jobs import layout_config, recorded_sequences, shard
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig

from gspo_mega.algorithm.correction import CorrectionRule
from gspo_mega.algorithm.objective import ObjectiveSettings
from gspo_mega.algorithm.terms import local_rows
from gspo_mega.checkpoint.hf_import import import_huggingface
from gspo_mega.engine import forward_backward
from gspo_mega.engine.device_batch import DeviceBatch
from gspo_mega.engine.log_probs import KeptTokens, token_log_probs
from gspo_mega.engine.losses import OldPass, PolicyLoss
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.engine.process_groups import create_groups, destroy_groups
from gspo_mega.models.huggingface import read_model_spec

NUM_TOKENS, WIDTH = 24, 16


@contextlib.contextmanager
def counted(group: dist.ProcessGroup):
    """Counts the collectives that this process enters: `all_reduces` on `group`; `here`, of any kind, on `group`; and
    `elsewhere`, on all other groups. The groups' own sequence numbers tell, which no way into a collective goes around.
    """
    counts, plain = dict(all_reduces=0), dist.all_reduce

    def numbers() -> dict[bool, int]:
        totals = {True: 0, False: 0}
        for other in dist.distributed_c10d._world.pg_map:
            totals[other is group] += other._get_sequence_number_for_group()
        return totals

    def all_reduce(*args, **kwargs):
        counts["all_reduces"] += kwargs.get("group") is group
        return plain(*args, **kwargs)

    before = numbers()
    dist.all_reduce = all_reduce
    try:
        yield counts
    finally:
        dist.all_reduce = plain
        after = numbers()
        counts.update(here=after[True] - before[True], elsewhere=after[False] - before[False])


# --- the LM head over tensor ranks ----------------------------------------------------------------------------------


def head_case(vocab: int) -> dict[str, torch.Tensor]:
    """One pack, the same on every rank: hidden [24, 1, 16], head [vocab, 16], 15 chosen rows with labels and upstream
    gradients.
    """
    generator = torch.Generator().manual_seed(3)
    rows = torch.randperm(NUM_TOKENS, generator=generator)[:15]
    labels = torch.randint(vocab, (15,), generator=generator)
    labels[0], labels[1] = 0, vocab - 1
    return dict(
        hidden=torch.randn(NUM_TOKENS, 1, WIDTH, generator=generator),
        weight=torch.randn(vocab, WIDTH, generator=generator) / math.sqrt(WIDTH) * 2,
        rows=rows,
        labels=labels,
        upstream=torch.randn(15, generator=generator),
    )


def head_sets(vocab: int) -> list[list[int]]:
    """The sets of the pack's 15 rows: 1 to 9 ids, the label among them, some in one half of the vocabulary only."""
    rng = np.random.default_rng(4)
    sets = []
    for row, label in enumerate(head_case(vocab)["labels"].tolist()):
        first, end = [(0, vocab), (label // 2, label + 1), (label, vocab)][row % 3]
        sets.append(sorted({label, *rng.integers(first, max(end, first + 1), row % 9).tolist()}))
    return sets


def kept_tokens(sets: list[list[int]]) -> KeptTokens:
    counts = torch.tensor([len(one) for one in sets], dtype=torch.int64)
    ids = torch.tensor([token for one in sets for token in one], dtype=torch.int32)
    return KeptTokens([0, *counts.cumsum(0).tolist()], counts, ids)


class _Head(torch.nn.Module):
    """A model that is only its LM head; with `tied` the same weight is its embedding as well."""

    def __init__(self, weight: torch.Tensor, tied: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)
        self.weight.zero_out_wgrad = tied


def run_head(
    vocab: int,
    padded: int,
    tensor: int,
    sequence_parallel: bool,
    wrapped: str,
    chunk: int = 4,
    temperature: float = 0.7,
    tied: bool = False,
    entropy: float = 0.0,
    with_sets: bool = False,
) -> dict:
    """Log-probs, entropies, gradients of this rank's part of the head and hidden states, and the collectives of the
    head.

    `wrapped`: "" for plain autograd, "ddp" or "ddp-overlap" for Megatron's DDP with two micro-batches of the same pack.
    `entropy`: weight of the entropies in the loss, whose upstream gradients are those of the log-probs in reverse.
    `with_sets`: log-probs over `head_sets`. With `tied` the pack's labels go through the same weight as an embedding
    into the hidden states.
    """
    groups = create_groups(tensor=tensor)
    try:
        case = head_case(vocab)
        held = padded // tensor
        # What stands in the padding must not matter.
        whole = torch.cat([case["weight"], torch.full((padded - vocab, WIDTH), 30.0)])
        module = _Head(whole[groups.tensor.rank * held :][:held].clone(), tied)
        share = NUM_TOKENS // tensor if sequence_parallel else NUM_TOKENS
        start = groups.tensor.rank * share if sequence_parallel else 0
        if wrapped:
            settings = DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, overlap_grad_reduce=wrapped == "ddp-overlap"
            )
            config = TransformerConfig(
                num_layers=1, hidden_size=WIDTH, num_attention_heads=1, calculate_per_token_loss=True
            )
            ddp = DistributedDataParallel(config, settings, module)
            ddp.zero_grad_buffer()
        for micro_batch in range(2 if wrapped else 1):
            hidden = case["hidden"][start : start + share].clone().requires_grad_()
            states = hidden
            if tied:
                states = states + torch.nn.functional.embedding(case["labels"][:1] % held, module.weight)[None]
            context = ddp.no_sync() if wrapped and micro_batch == 0 else contextlib.nullcontext()
            with context, counted(groups.tensor.group) as calls:
                kept = kept_tokens(head_sets(vocab)) if with_sets else None
                log_probs, entropies = token_log_probs(
                    states,
                    module.weight,
                    case["rows"],
                    case["labels"],
                    vocab_size=vocab,
                    temperature=temperature,
                    tensor_group=groups.tensor,
                    sequence_parallel=sequence_parallel,
                    chunk_rows=chunk,
                    with_entropy=True,
                    kept=kept,
                )
                loss = log_probs @ case["upstream"]
                if entropy:
                    loss = loss + entropy * (entropies @ case["upstream"].flip(0))
                loss.backward()
        if wrapped:
            ddp.finish_grad_sync()
            assert module.weight.grad is None and module.weight.grad_added_to_main_grad
        gradient = module.weight.main_grad / 2 if wrapped else module.weight.grad
        return dict(
            log_probs=log_probs.detach().numpy(),
            entropies=entropies.detach().numpy(),
            hidden_grad=hidden.grad.numpy().copy(),
            weight_grad=gradient.numpy().copy(),
            collectives=calls,
            log_mass=None if kept is None else kept.log_mass.numpy(),
        )
    finally:
        destroy_groups()


# --- the sums over context ranks ------------------------------------------------------------------------------------


def context_batch(size: int, rank: int) -> tuple[DeviceBatch, torch.Tensor]:
    """(a rank's batch, log-probs [N]) of three sequences of 8, 12 and 4 positions; the first and one inner token of the
    second carry no loss. A label is its token's position, and no forward pass is made.
    """
    generator = torch.Generator().manual_seed(5)
    cu_seqlens = torch.tensor([0, 8, 20, 24])
    ids = torch.repeat_interleave(torch.arange(3), cu_seqlens.diff())
    active = torch.ones(24, dtype=torch.bool)
    active[cu_seqlens[:-1]] = active[13] = False
    rollout, log_probs = torch.randn(2, 24, generator=generator) * 0.3 - 2
    lengths = torch.bincount(ids[active], minlength=3)
    held = local_rows(cu_seqlens, size, rank)
    chosen = held[active[held]]
    batch = DeviceBatch(
        token_ids=held[None],
        position_ids=held[None],
        packed=PackedSeqParams(),
        rows=torch.nonzero(active[held]).flatten(),
        sequence_ids=ids[chosen],
        labels=torch.arange(24)[chosen],
        rollout_log_probs=rollout[chosen],
        num_sequences=3,
        trajectory_index=np.arange(3),
        end_rows=torch.zeros(0, dtype=torch.int64),
        end_sequences=torch.zeros(0, dtype=torch.int64),
        sequence=dict(
            advantage=torch.tensor([0.7, -1.1, 0.4], dtype=torch.float64), length=lengths, group_size=torch.ones(3)
        ),
    )
    return batch, log_probs[chosen]


def run_context_sums(context: int, skipped: bool, use_rollout: bool, ratio: str = "sequence") -> dict:
    """Loss and gradient of one micro-batch, and the collectives of its passes. Gradients [24], this rank's part, 0
    elsewhere.
    """
    groups = create_groups(context=context)
    try:
        batch, values = context_batch(groups.context.size, groups.context.rank)
        old_pass = OldPass(groups, CorrectionRule("none"))
        entropies = torch.ones_like(values)
        with counted(groups.context.group) as in_old_pass:
            old = None if skipped else [old_pass(batch, values - 0.01 * torch.cos(batch.labels.float()), entropies).old]
        head = PolicyLoss(groups, ObjectiveSettings(ratio, 0.2, 0.3), 3.0, old_pass, use_rollout, old)
        log_probs = values.clone().requires_grad_()
        with counted(groups.context.group) as in_training:
            output = head(batch, log_probs, entropies if head.wants_entropy else None)
            output.loss.backward()
        gradient = torch.zeros(24, dtype=torch.float64)
        gradient[batch.labels] = log_probs.grad.double()
        return dict(
            gradient=gradient.numpy(),
            loss=float(output.loss),
            log_s=output.columns["log_s"].numpy(),
            wanted_entropy=head.wants_entropy,
            old_pass=in_old_pass,
            training=in_training,
        )
    finally:
        destroy_groups()


# --- the engine's use of both ---------------------------------------------------------------------------------------


def run_engine(folder: str, chunk: int) -> dict:
    """What the engine asks of the head in an old pass, in a training pass after it and in one without, and their
    numbers.
    """
    config = layout_config(folder, {})
    config = config.model_copy(update={"batch": config.batch.model_copy(update={"log_prob_chunk_tokens": chunk})})
    spec, plain = read_model_spec(folder), forward_backward.token_log_probs
    groups = create_groups()
    asked: list[tuple[int, bool]] = []
    bits: list[np.ndarray] = []

    def asking(*args, **kwargs):
        asked.append((kwargs["chunk_rows"], kwargs["with_entropy"]))
        log_probs, entropies = plain(*args, **kwargs)
        bits.append(log_probs.detach().numpy().copy())
        return log_probs, entropies

    forward_backward.token_log_probs = asking
    try:
        engine = PolicyEngine(config, spec, groups, num_optimizer_steps=100)
        import_huggingface(folder, spec, groups, engine.chunks)
        engine.after_weights_loaded()
        batch = shard(recorded_sequences(), 0, 1, 2)[:1]
        settings = ObjectiveSettings(clip_low=0.2, clip_high=0.2)
        old = engine.old_pass(batch)
        after = engine.policy_gradients(batch, settings, 3.0, old)
        alone = engine.policy_gradients(batch, settings, 3.0, None)
        engine.train_supervised(batch, 10.0)
        return dict(
            asked=asked,
            bits=bits,
            entropy=[old.report.columns["entropy_sum"], alone.columns["entropy_sum"]],
            columns=[sorted(after.columns), sorted(alone.columns)],
            log_s=[after.columns["log_s"], alone.columns["log_s"]],
        )
    finally:
        forward_backward.token_log_probs = plain
        destroy_groups()
