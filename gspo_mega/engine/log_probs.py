"""From hidden states to per-token log-probs, holding no more than one chunk of logits at a time.

`token_log_probs`, at the end of this file, is the only log-prob function: the old pass, the training passes and
evaluation all call it. Only rows that carry an active response token reach the LM head. The head is
vocabulary-parallel; accumulation, log-softmax and entropy are fp32 (float64 stays). The backward pass computes each
chunk's logits again and adds the head's gradient straight into Megatron's main gradient. `token_divergence` compares
whole distributions of a policy and a teacher in the same way, and `divergence_from_top` those of a policy and of a
teacher of which only the most likely tokens are known.

Where tokens were sampled from sets of kept ones (`KeptTokens`), with q = softmax(logits / temperature) over the whole
vocabulary and S_t the set of token t, the log-prob is log(q[y_t] / q(S_t)), whose gradient with respect to the logits
is 1[y_t] - q / q(S_t) inside of S_t and 0 outside. Entropies stay those of q.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch.autograd.function import once_differentiable

from gspo_mega.cpu.batch_invariant import divide, label_log_probs
from gspo_mega.cpu.batch_invariant import logits as invariant_logits
from gspo_mega.cpu.products import add_product, widens_bf16
from gspo_mega.engine.process_groups import RankGroup

ENTROPY_PARTS = 8  # the entropy's scratch memory is a chunk divided by this
_FEWEST_ROWS = 4
WIDENED_NUMBERS = 2**24  # numbers widened at once if no kernel accumulates bf16 in fp32 ...
CACHED_NUMBERS = 2**20  # ... and of a piece of the vocabulary


def _accumulation_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _add_product(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, alpha: float = 1.0, beta: float = 0.0, most_numbers: int
) -> None:
    """out = beta * out + alpha * (a @ b) in place. a [m, k], b [k, n] of one dtype; out [m, n] accumulates in its own.

    With beta = 0 the previous content of `out` does not matter, NaN included. `most_numbers`: how many numbers of the
    product a CPU may hold beside `out`.
    """
    if a.dtype == out.dtype:
        add_product(out, a, b, beta=beta, alpha=alpha, most_numbers=most_numbers)
    elif a.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=beta, alpha=alpha, out=out)
    else:
        # The CPU has no product of bf16 with an fp32 result: widen a piece at a time. Pieces of a long side of the
        # result, as the vocabulary is in logits and in the head's gradient, stay in the processor's cache, and each
        # number of the result is written once. Otherwise they are pieces of the contraction.
        num_rows, length, num_columns = a.size(0), a.size(1), b.size(1)
        if num_columns >= max(num_rows, length):
            wide = a.to(out.dtype)
            step = max(1, min(CACHED_NUMBERS // max(length, 1), most_numbers // max(num_rows, 1)))
            for columns, piece in zip(out.split(step, dim=1), b.split(step, dim=1), strict=True):
                add_product(columns, wide, piece.to(out.dtype), alpha=alpha, beta=beta, most_numbers=most_numbers)
        elif num_rows > max(num_columns, length):
            wide = b.to(out.dtype)
            step = max(1, min(CACHED_NUMBERS // max(length, 1), most_numbers // max(num_columns, 1)))
            for rows, piece in zip(out.split(step), a.split(step), strict=True):
                add_product(rows, piece.to(out.dtype), wide, alpha=alpha, beta=beta, most_numbers=most_numbers)
        else:
            step = max(1, WIDENED_NUMBERS // (num_rows + num_columns))
            for start in range(0, length, step):
                part = slice(start, start + step)
                wide = a[:, part].to(out.dtype), b[part].to(out.dtype)
                add_product(out, *wide, beta=beta, alpha=alpha, most_numbers=most_numbers)
                beta = 1.0


def _hidden_gradient(grad_logits: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """grad_logits [n, v] @ weight [v, H], added up in fp32 (float64 stays): [n, H], of the model's dtype where a kernel
    rounds the whole sum once. The CPU's kernel of bf16 products does, and needs no widened copy of the head.
    """
    if grad_logits.dtype == torch.bfloat16 and not grad_logits.is_cuda and not widens_bf16():
        return grad_logits @ weight
    product = grad_logits.new_empty((grad_logits.size(0), weight.size(1)), dtype=_accumulation_dtype(grad_logits))
    _add_product(product, grad_logits, weight, most_numbers=grad_logits.numel())
    return product


def _with_enough_rows(rows: torch.Tensor) -> torch.Tensor:
    """Rows of zeros after those of a chunk that has few, on a CPU.

    Products of one to three rows go through kernels that add a whole contraction in one fp32 sum. Over a vocabulary of
    49 152 its error is ten times that of the kernels for more rows, and a hundred times in the gradient of a response
    of one token, whose terms nearly cancel.
    """
    missing = _FEWEST_ROWS - rows.size(0)
    if rows.is_cuda or missing <= 0:
        return rows
    return torch.cat([rows, rows.new_zeros((missing, rows.size(1)))])


@dataclass
class KeptTokens:
    """The sets of tokens that N tokens were sampled from. `counts` [N] int64: their sizes; `ids` [sum of counts] int32:
    global token ids, one set after the other, each with its own sampled token. `offsets` [N + 1], on the host: where
    each set begins.

    `token_log_probs` writes `log_mass` [N] float32 nats: the log of the probability of the set under softmax(logits /
    temperature).
    """

    offsets: list[int]
    counts: torch.Tensor
    ids: torch.Tensor
    log_mass: torch.Tensor | None = None

    def columns(self, rows: slice, first_id: int, num_held: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The sets of these rows as columns of this tensor rank's logits: [n, K] int64, and [n, K] bool, False where a
        set has fewer tokens or the token is on another rank.
        """
        offsets = self.offsets[rows.start : rows.stop + 1]
        most = max([1, *(end - start for start, end in itertools.pairwise(offsets))])
        present = torch.arange(most, device=self.ids.device) < self.counts[rows, None]
        ids = torch.zeros(present.shape, dtype=torch.int64, device=self.ids.device)
        local = ids.masked_scatter_(present, self.ids[offsets[0] : offsets[-1]].long()) - first_id
        return local.clamp(0, num_held - 1), present & (local >= 0) & (local < num_held)


class _Head:
    """This tensor rank's part of the LM head, and the iteration over its chunks of logits, which share one buffer.

    `weight` [v, H] is the part without vocabulary padding; v = 0 on a rank that holds padding only.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        first_id: int,
        temperature: float,
        chunk_rows: int,
        batch_invariant: bool,
    ) -> None:
        self.hidden, self.weight, self.temperature, self.chunk_rows = hidden, weight, temperature, chunk_rows
        self.batch_invariant = batch_invariant
        local = labels - first_id
        self.owned = (local >= 0) & (local < weight.size(0))
        self.columns = local.clamp(0, max(weight.size(0) - 1, 0))[:, None]

    def chunks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yields (rows, logits [n, v] over the temperature) of each chunk; the next chunk overwrites them. There are no
        chunks if v = 0.
        """
        num_rows, width = self.hidden.size(0), self.weight.size(0)
        if width == 0:
            return
        buffer = self.hidden.new_empty((min(self.chunk_rows, num_rows), width), dtype=_accumulation_dtype(self.hidden))
        for start in range(0, num_rows, self.chunk_rows):
            rows = slice(start, min(start + self.chunk_rows, num_rows))
            if self.batch_invariant:
                yield rows, divide(invariant_logits(self.hidden[rows], self.weight), self.temperature)
                continue
            logits = buffer[: rows.stop - start]
            most = logits.numel() // 8
            _add_product(logits, self.hidden[rows], self.weight.t(), alpha=1.0 / self.temperature, most_numbers=most)
            yield rows, logits


def _expected_logits(shifted: torch.Tensor) -> torch.Tensor:
    """The sum of exp(x) x over each row of `shifted` [n, v], whose maxima are 0; uses n / 8 rows of scratch memory."""
    parts = shifted.split(-(-shifted.size(0) // ENTROPY_PARTS))
    return torch.cat([part.exp().mul_(part).sum(1) for part in parts])


def _weigh_probabilities(
    log_p: torch.Tensor, entropies: torch.Tensor, grad_log_probs: torch.Tensor, grad_entropies: torch.Tensor
) -> None:
    """Turn `log_p` [n, v] into p (g + e (log p + H)) in place, n / 8 rows at a time; each of the others is [n]."""
    step = -(-log_p.size(0) // ENTROPY_PARTS)
    for start in range(0, log_p.size(0), step):
        rows = slice(start, start + step)
        e = grad_entropies[rows, None].to(log_p.dtype)
        weights = (log_p[rows] + entropies[rows, None]).mul_(e).add_(grad_log_probs[rows, None].to(log_p.dtype))
        log_p[rows].exp_().mul_(weights)


class _ChunkedLogProbs(torch.autograd.Function):
    """log softmax(h W^T / temperature)[label] for each row, chunk by chunk; with `kept` over the row's set only.

    hidden [N, H]; weight [padded vocabulary / tensor, H], the parameter itself, of which the first `held` rows
    are vocabulary; labels [N] int64, global ids. Returns log-probs [N] and entropies [N] (empty unless asked for),
    fp32 nats, both differentiable. With p = softmax(x), x the logits over the temperature, and upstream gradients g of
    a log-prob and e of an entropy H = -sum p log p,

        d / d x_j = g (1[j is the label] - p_j) - e p_j (log p_j + H).
    """

    @staticmethod
    def forward(
        ctx,
        hidden,
        weight,
        labels,
        first_id,
        held,
        temperature,
        tensor_group,
        chunk_rows,
        with_entropy,
        batch_invariant,
        kept,
    ):
        head = _Head(hidden, weight[:held], labels, first_id, temperature, chunk_rows, batch_invariant)
        peaks = hidden.new_full((hidden.size(0),), float("-inf"), dtype=_accumulation_dtype(hidden))
        totals, targets, weighted = (torch.zeros_like(peaks) for _ in range(3))
        as_served = torch.empty_like(peaks)
        kept_peaks, kept_totals = torch.full_like(peaks, float("-inf")), torch.zeros_like(peaks)
        for rows, logits in head.chunks():
            if kept is not None:
                columns, is_held = kept.columns(rows, first_id, held)
                among = logits.gather(1, columns).masked_fill_(~is_held, float("-inf"))
                kept_peaks[rows] = among.amax(1)
                among.sub_(torch.where(kept_peaks[rows] == float("-inf"), 0.0, kept_peaks[rows])[:, None])
                kept_totals[rows] = among.exp_().sum(1)
            if batch_invariant:
                as_served[rows] = label_log_probs(logits, head.columns[rows])
            peaks[rows] = logits.amax(1)
            targets[rows] = torch.where(head.owned[rows], logits.gather(1, head.columns[rows])[:, 0], 0.0)
            logits.sub_(peaks[rows, None])
            if with_entropy:
                weighted[rows] = _expected_logits(logits)
            totals[rows] = logits.exp_().sum(1)

        # Each rank has summed relative to its own maximum: two collectives per micro-batch for any number of chunks.
        # The sum has three rows with or without entropy: the position of a number can decide the order of its addition,
        # and the old pass (with entropy) must equal the first training pass (without) bit for bit.
        # Those of the sets are further rows of the same two.
        highest = torch.stack([peaks] if kept is None else [peaks, kept_peaks])
        if tensor_group.size > 1 and peaks.numel():
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=tensor_group.group)
            shift = torch.where(totals == 0, 0.0, peaks - highest[0])  # a rank that holds padding only has -inf
            scale = shift.exp()
            parts = [totals * scale, targets, (weighted + shift * totals) * scale]
            if kept is not None:
                parts.append(kept_totals * torch.where(kept_totals == 0, 0.0, kept_peaks - highest[1]).exp())
            sums = torch.stack(parts)
            dist.all_reduce(sums, group=tensor_group.group)
            totals, targets, weighted = sums[:3]
            kept_totals = sums[-1]
        log_totals = totals.log()
        log_sums = log_all = highest[0] + log_totals
        log_probs = as_served if batch_invariant else targets - highest[0] - log_totals
        if kept is not None:
            log_kept = kept_totals.log()
            log_probs = targets - highest[1] - log_kept
            log_sums = highest[1] + log_kept
            kept.log_mass = log_sums - log_all
        entropies = log_totals - weighted / totals if with_entropy else log_probs.new_empty(0)

        ctx.save_for_backward(hidden, weight, labels, log_sums, log_all, entropies)
        ctx.set_materialize_grads(False)  # so that entropies that are only reported cost no second product
        ctx.kept = kept
        ctx.first_id, ctx.held, ctx.temperature, ctx.chunk_rows = first_id, held, temperature, chunk_rows
        ctx.batch_invariant = batch_invariant
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    # `once_differentiable` makes `ctx` positional; autograd passes it so.
    def backward(ctx, *grad_outputs: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_log_probs, grad_entropies = grad_outputs
        hidden, weight, labels, log_sums, log_all, entropies = ctx.saved_tensors
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_sums)
        head = _Head(
            hidden, weight[: ctx.held], labels, ctx.first_id, ctx.temperature, ctx.chunk_rows, ctx.batch_invariant
        )
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = _WeightGradient(weight, log_sums.dtype) if ctx.needs_input_grad[1] else None
        minus_scale = grad_log_probs.to(log_sums.dtype)[:, None] / -ctx.temperature
        minus_owned = head.owned.to(log_sums.dtype).neg_()[:, None]
        for rows, logits in head.chunks():
            own = minus_owned[rows]
            inside: tuple[torch.Tensor, torch.Tensor] | None = None  # columns of the rows' sets, and p there
            if ctx.kept is not None:
                columns, is_held = ctx.kept.columns(rows, ctx.first_id, ctx.held)
                among = logits.gather(1, columns).sub_(log_sums[rows, None]).exp_().masked_fill_(~is_held, 0.0)
                inside = columns, among
            if grad_entropies is None:
                if inside is None:
                    difference = logits.sub_(log_sums[rows, None]).exp_()
                else:
                    difference = logits.zero_().scatter_add_(1, *inside)
            else:
                grad = grad_log_probs[rows].to(log_sums.dtype)
                _weigh_probabilities(
                    logits.sub_(log_all[rows, None]),
                    entropies[rows],
                    grad if inside is None else torch.zeros_like(grad),
                    grad_entropies[rows],
                )
                difference = logits if inside is None else logits.scatter_add_(1, inside[0], inside[1] * grad[:, None])
                own = own * grad[:, None]
            difference.scatter_add_(1, head.columns[rows], own)
            # d loss / d logits, rounded to the model's dtype for the products, as in every linear layer.
            grad_logits = (
                difference if hidden.dtype == difference.dtype else torch.empty_like(difference, dtype=hidden.dtype)
            )
            scale = minus_scale[rows] if grad_entropies is None else -1.0 / ctx.temperature
            torch.mul(difference, scale, out=grad_logits)
            full = _with_enough_rows(grad_logits)
            grad_hidden[rows] = _hidden_gradient(full, head.weight)[: difference.size(0)]
            if grad_weight is not None:
                most = grad_logits.numel() // 4
                _add_product(grad_weight.sum[: ctx.held], grad_logits.t(), hidden[rows], beta=1.0, most_numbers=most)
            del grad_logits, full  # else the next chunk's would be made beside them
        return grad_hidden, grad_weight.for_autograd() if grad_weight is not None else None, *[None] * 9


class _WeightGradient:
    """The accumulated gradient of the head, `sum` [padded vocabulary / tensor, H] in the accumulation dtype.

    Under Megatron's DDP it is the parameter's main gradient itself; otherwise a tensor that autograd receives.
    """

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype) -> None:
        main_grad: torch.Tensor | None = getattr(weight, "main_grad", None)
        self._weight: Any = weight  # DDP's attributes are not declared by torch's class
        # DDP's flag: it keeps DDP's hook from adding the parameter's `grad` a second time.
        if main_grad is not None and main_grad.dtype == dtype and hasattr(weight, "grad_added_to_main_grad"):
            self._is_main, self.sum = True, main_grad
        else:
            self._is_main, self.sum = False, torch.zeros(weight.shape, dtype=dtype, device=weight.device)

    def for_autograd(self) -> torch.Tensor | None:
        """What backward() returns for the weight."""
        if not self._is_main:
            return self.sum.to(self._weight.dtype)
        self._weight.grad_added_to_main_grad = True
        if getattr(self._weight, "zero_out_wgrad", False):
            # The embedding is the same parameter on this stage: DDP adds autograd's gradient, the embedding's part
            # only.
            return None
        # DDP's hook drops the gradient. With overlapped reduction it still requires one, and only a tensor on the
        # parameter's device runs the hook on the backward thread. The parameter itself serves without extra memory.
        return self._weight.detach()


@dataclass(frozen=True)
class DivergenceRule:
    """Over what two distributions p and q of the next token are compared: everything, or the K most likely tokens of
    one of them, ties included.

    `top_k`: K; None for the whole vocabulary. `of_teacher`: the K are the teacher's, else the policy's. `in_bucket`:
    all tokens outside of the K are one more token, whose probability is the rest of the mass; else p and q are both
    renormalised over the K.
    """

    top_k: int | None = None
    of_teacher: bool = True
    in_bucket: bool = True


class _TwoHeads:
    """The policy's and the teacher's part of the vocabulary on this tensor rank, chunk by chunk."""

    def __init__(self, policy: _Head, teacher: _Head, rule: DivergenceRule, threshold: torch.Tensor | None) -> None:
        self.policy, self.teacher, self.rule, self.threshold = policy, teacher, rule, threshold

    def chunks(self) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """Yields (rows, the policy's logits [n, v], the teacher's [n, v], which tokens are among the K: [n, v] bool,
        None for all); the next chunk overwrites the logits.
        """
        for (rows, ours), (_, theirs) in zip(self.policy.chunks(), self.teacher.chunks(), strict=True):
            chosen = theirs if self.rule.of_teacher else ours
            yield rows, ours, theirs, None if self.threshold is None else chosen >= self.threshold[rows, None]


def _threshold(head: _Head, top_k: int, tensor_group: RankGroup) -> torch.Tensor:
    """The K-th largest logit of each row over all tensor ranks, [N]; -inf if the vocabulary has fewer."""
    num_rows = head.hidden.size(0)
    best = head.hidden.new_full((num_rows, top_k), float("-inf"), dtype=_accumulation_dtype(head.hidden))
    for rows, logits in head.chunks():
        held = min(top_k, logits.size(1))
        best[rows, :held] = logits.topk(held, dim=1).values
    if tensor_group.size > 1 and best.numel():
        parts = [torch.empty_like(best) for _ in range(tensor_group.size)]
        dist.all_gather(parts, best, group=tensor_group.group)
        best = torch.cat(parts, dim=1).topk(top_k, dim=1).values
    return best.amin(1)


class _ChunkedDivergence(torch.autograd.Function):
    """The reverse KL(p || q) of the policy's p and a teacher's q at each row, chunk by chunk, [N] fp32 nats.

    hidden, weight: the policy's, as in `_ChunkedLogProbs`; taught [N, H'] and teacher_weight: the teacher's, without
    gradient. With z the logits over the temperature, L their logsumexp and a = z - L, b the teacher's a, the divergence
    is f = sum p (a - b) over the tokens, and

        d f / d z_j = p_j (a_j - b_j - f).

    With a bucket T for all tokens outside of the K, its term is P_T log(P_T / Q_T), which also stands in place of
    a_j - b_j at each of its tokens. Renormalised over the K, L is over the K, and p is 0 elsewhere.
    """

    @staticmethod
    def forward(
        ctx, hidden, weight, taught, teacher_weight, first_id, held, temperature, tensor_group, chunk_rows, rule
    ):
        nothing = torch.zeros(hidden.size(0), dtype=torch.int64, device=hidden.device)
        policy, teacher = (
            _Head(states, matrix[:held], nothing, first_id, temperature, chunk_rows, False)
            for states, matrix in ((hidden, weight), (taught, teacher_weight))
        )
        threshold = None
        if rule.top_k is not None:
            threshold = _threshold(teacher if rule.of_teacher else policy, rule.top_k, tensor_group)
        dtype = _accumulation_dtype(hidden)
        peaks = hidden.new_full((2, hidden.size(0)), float("-inf"), dtype=dtype)
        inside, outside = (torch.zeros_like(peaks) for _ in range(2))
        crossed = torch.zeros_like(peaks[0])
        for rows, ours, theirs, among in _TwoHeads(policy, teacher, rule, threshold).chunks():
            difference = ours - theirs
            for place, logits in enumerate((ours, theirs)):
                peaks[place, rows] = logits.amax(1)
                logits.sub_(peaks[place, rows, None]).exp_()
                if among is None:
                    inside[place, rows] = logits.sum(1)
                    continue
                outside[place, rows] = logits.masked_fill(among, 0.0).sum(1)
                logits.masked_fill_(~among, 0.0)
                inside[place, rows] = logits.sum(1)
            crossed[rows] = ours.mul_(difference).sum(1)

        highest = peaks.clone()
        if tensor_group.size > 1 and peaks.numel():
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=tensor_group.group)
            shift = torch.where(inside + outside == 0, 0.0, peaks - highest).exp()
            sums = torch.cat([inside * shift, outside * shift, (crossed * shift[0])[None]])
            dist.all_reduce(sums, group=tensor_group.group)
            inside, outside, crossed = sums[:2], sums[2:4], sums[4]
        if not rule.in_bucket:
            outside = torch.zeros_like(outside)
        totals = inside + outside
        log_sums = highest + totals.log()
        # A tail that rounds to 0 in the teacher has the smallest number for its mass, so no divergence is infinite.
        tails = (outside / totals).clamp(min=torch.finfo(dtype).tiny)
        has_tail = outside[0] > 0
        of_tail = torch.where(has_tail, tails[0].log() - tails[1].log(), 0.0)
        divergence = (crossed - inside[0] * (log_sums[0] - log_sums[1]) + outside[0] * of_tail) / totals[0]

        ctx.save_for_backward(hidden, weight, taught, teacher_weight, log_sums, of_tail, divergence, threshold)
        ctx.first_id, ctx.held, ctx.temperature, ctx.chunk_rows, ctx.rule = (
            first_id,
            held,
            temperature,
            chunk_rows,
            rule,
        )
        return divergence

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,) = grad_outputs
        hidden, weight, taught, teacher_weight, log_sums, of_tail, divergence, threshold = ctx.saved_tensors
        nothing = torch.zeros(hidden.size(0), dtype=torch.int64, device=hidden.device)
        policy, teacher = (
            _Head(states, matrix[: ctx.held], nothing, ctx.first_id, ctx.temperature, ctx.chunk_rows, False)
            for states, matrix in ((hidden, weight), (taught, teacher_weight))
        )
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = _WeightGradient(weight, log_sums.dtype) if ctx.needs_input_grad[1] else None
        scale = grad.to(log_sums.dtype) / ctx.temperature
        for rows, ours, theirs, among in _TwoHeads(policy, teacher, ctx.rule, threshold).chunks():
            log_p = ours.sub_(log_sums[0, rows, None])
            gaps = theirs.sub_(log_sums[1, rows, None]).neg_().add_(log_p)
            if among is not None:
                gaps = torch.where(among, gaps, of_tail[rows, None])
            gaps.sub_(divergence[rows, None]).mul_(scale[rows, None])
            probabilities = log_p.exp_()
            if among is not None and not ctx.rule.in_bucket:
                probabilities.masked_fill_(~among, 0.0)
            grad_logits = probabilities.mul_(gaps).to(hidden.dtype)
            full = _with_enough_rows(grad_logits)
            grad_hidden[rows] = _hidden_gradient(full, policy.weight)[: grad_logits.size(0)]
            if grad_weight is not None:
                most = grad_logits.numel() // 4
                _add_product(grad_weight.sum[: ctx.held], grad_logits.t(), hidden[rows], beta=1.0, most_numbers=most)
        return grad_hidden, grad_weight.for_autograd() if grad_weight is not None else None, *[None] * 8


def token_divergence(
    hidden_states: torch.Tensor,
    head_weight: torch.Tensor,
    rows: torch.Tensor,
    taught: torch.Tensor,
    teacher_weight: torch.Tensor,
    *,
    rule: DivergenceRule,
    vocab_size: int,
    temperature: float,
    tensor_group: RankGroup,
    sequence_parallel: bool,
    chunk_rows: int,
) -> torch.Tensor:
    """KL(policy || teacher) of the next token's distributions at each row, over what `rule` compares; [N] float32 nats,
    differentiable with respect to hidden_states and head_weight, the same on all tensor ranks.

    taught: [N, H'] of the teacher's dtype, its states at these rows (`head_rows`); teacher_weight: [padded vocabulary /
    tensor, H'], its head on this tensor rank. The others as in `token_log_probs`; vocab_size is that of both models.
    In memory at once are two chunks of logits, and a third for a moment. Collective over the tensor group.
    """
    hidden = head_rows(hidden_states, rows, tensor_group=tensor_group, sequence_parallel=sequence_parallel)
    first_id = tensor_group.rank * head_weight.size(0)
    held = max(0, min(head_weight.size(0), vocab_size - first_id))
    return _ChunkedDivergence.apply(
        hidden,
        head_weight,
        taught.detach(),
        teacher_weight.detach(),
        first_id,
        held,
        temperature,
        tensor_group,
        chunk_rows,
        rule,
    )


class _ChunkedAmong(torch.autograd.Function):
    """log softmax(h W^T / temperature) of K given tokens for each row, chunk by chunk, [N, K] fp32 nats.

    hidden, weight: as in `_ChunkedLogProbs`; ids [N, K] int64, global. With upstream gradients g_k,

        d / d x_j = sum_k g_k (1[j is the k-th token] - p_j).
    """

    @staticmethod
    def forward(ctx, hidden, weight, ids, first_id, held, temperature, tensor_group, chunk_rows):
        head = _Head(hidden, weight[:held], ids[:, 0], first_id, temperature, chunk_rows, False)
        local = ids - first_id
        is_held, columns = (local >= 0) & (local < held), local.clamp(0, max(held - 1, 0))
        peaks = hidden.new_full((hidden.size(0),), float("-inf"), dtype=_accumulation_dtype(hidden))
        totals, targets = torch.zeros_like(peaks), peaks.new_zeros(ids.shape)
        for rows, logits in head.chunks():
            targets[rows] = logits.gather(1, columns[rows]).masked_fill_(~is_held[rows], 0.0)
            peaks[rows] = logits.amax(1)
            totals[rows] = logits.sub_(peaks[rows, None]).exp_().sum(1)
        highest = peaks.clone()
        if tensor_group.size > 1 and peaks.numel():
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=tensor_group.group)
            scale = torch.where(totals == 0, 0.0, peaks - highest).exp()
            sums = torch.cat([(totals * scale)[:, None], targets], dim=1)
            dist.all_reduce(sums, group=tensor_group.group)
            totals, targets = sums[:, 0], sums[:, 1:]
        log_sums = highest + totals.log()
        ctx.save_for_backward(hidden, weight, is_held, columns, log_sums)
        ctx.first_id, ctx.held, ctx.temperature, ctx.chunk_rows = first_id, held, temperature, chunk_rows
        return targets - log_sums[:, None]

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,) = grad_outputs
        hidden, weight, is_held, columns, log_sums = ctx.saved_tensors
        head = _Head(hidden, weight[: ctx.held], columns[:, 0], ctx.first_id, ctx.temperature, ctx.chunk_rows, False)
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = _WeightGradient(weight, log_sums.dtype) if ctx.needs_input_grad[1] else None
        grad = grad.to(log_sums.dtype) / ctx.temperature
        total, own = grad.sum(1), grad.masked_fill(~is_held, 0.0)
        for rows, logits in head.chunks():
            share = logits.sub_(log_sums[rows, None]).exp_().mul_(-total[rows, None])
            grad_logits = share.scatter_add_(1, columns[rows], own[rows]).to(hidden.dtype)
            full = _with_enough_rows(grad_logits)
            grad_hidden[rows] = _hidden_gradient(full, head.weight)[: grad_logits.size(0)]
            if grad_weight is not None:
                most = grad_logits.numel() // 4
                _add_product(grad_weight.sum[: ctx.held], grad_logits.t(), hidden[rows], beta=1.0, most_numbers=most)
        return grad_hidden, grad_weight.for_autograd() if grad_weight is not None else None, *[None] * 6


def divergence_from_top(
    hidden_states: torch.Tensor,
    head_weight: torch.Tensor,
    rows: torch.Tensor,
    top_ids: torch.Tensor,
    top_log_probs: torch.Tensor,
    *,
    in_bucket: bool,
    vocab_size: int,
    temperature: float,
    tensor_group: RankGroup,
    sequence_parallel: bool,
    chunk_rows: int,
) -> torch.Tensor:
    """KL(policy || teacher) at each row over the teacher's K most likely tokens; [N] float32 nats, differentiable as
    `token_divergence`, whose other arguments these are.

    top_ids: [N, K] int64, K different tokens in each row; top_log_probs: [N, K] nats, the teacher's. in_bucket: as in
    `DivergenceRule`. The teacher's tail is then 1 - sum q, and the policy's 1 - sum p, neither below the rounding of
    these sums (2^-23 in fp32). Collective over the tensor group.
    """
    hidden = head_rows(hidden_states, rows, tensor_group=tensor_group, sequence_parallel=sequence_parallel)
    first_id = tensor_group.rank * head_weight.size(0)
    held = max(0, min(head_weight.size(0), vocab_size - first_id))
    found = _ChunkedAmong.apply(hidden, head_weight, top_ids, first_id, held, temperature, tensor_group, chunk_rows)
    log_p, log_q = found.double(), top_log_probs.detach().double()
    if in_bucket:
        least = torch.finfo(found.dtype).eps
        log_p, log_q = (
            torch.cat([part, (1 - part.exp().sum(1, keepdim=True)).clamp(min=least).log()], dim=1)
            for part in (log_p, log_q)
        )
    else:
        log_p, log_q = (part - part.logsumexp(1, keepdim=True) for part in (log_p, log_q))
    return (log_p.exp() * (log_p - log_q)).sum(1).to(found.dtype)


def head_rows(
    hidden_states: torch.Tensor, rows: torch.Tensor, *, tensor_group: RankGroup, sequence_parallel: bool
) -> torch.Tensor:
    """The states at `rows` of the whole pack, [N, H], for a head that is divided over the tensor group: their gradient
    is summed over it. Arguments as in `token_log_probs`. Collective over the tensor group.
    """
    hidden = hidden_states
    if tensor_group.size > 1 and sequence_parallel:
        hidden = gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=True, group=tensor_group.group
        )
    elif tensor_group.size > 1:
        hidden = copy_to_tensor_model_parallel_region(hidden, group=tensor_group.group)
    return hidden.squeeze(1).index_select(0, rows)


def token_log_probs(
    hidden_states: torch.Tensor,
    head_weight: torch.Tensor,
    rows: torch.Tensor,
    labels: torch.Tensor,
    *,
    vocab_size: int,
    temperature: float,
    tensor_group: RankGroup,
    sequence_parallel: bool,
    chunk_rows: int,
    with_entropy: bool,
    batch_invariant: bool = False,
    kept: KeptTokens | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs of the tokens `labels` under softmax(logits / temperature), and on request the entropies there.

    hidden_states: [t, 1, H] of the model's dtype, the last stage's output; with `sequence_parallel` t is this tensor
    rank's share.
    head_weight: [padded vocabulary / tensor, H] of that dtype, this tensor rank's part; rows beyond `vocab_size` are
    padding and left out.
    rows: [N] int64, positions in this context rank's (gathered) pack whose next token is active; labels: [N] int64.
    chunk_rows: rows whose logits are in memory at once. Apart from tensors of N or t rows of at most H numbers, the
    memory is about chunk_rows x vocabulary / tensor x 4 bytes, half as much again in the backward pass of a bf16 head.
    Returns two [N] float32 tensors in nats, the same on all tensor ranks, the second None unless `with_entropy`. Both
    are differentiable with respect to hidden_states and head_weight. The first is bitwise the same with and without
    entropy, and so is its gradient if the second is not differentiated. If head_weight is a parameter under Megatron's
    DDP, its gradient goes to `main_grad` only.
    batch_invariant: on one tensor rank on a CPU, the log-probs are bit for bit those of the servers
    (`engine.batch_invariant`).
    kept: the sets of the N tokens, over which their log-probs are normalised; their `log_mass` is written. None: the
    whole vocabulary. Not with `batch_invariant`.
    Collective over the tensor group.
    """
    assert kept is None or not batch_invariant, "the servers' order of summation over a set is not repeated"
    hidden = head_rows(hidden_states, rows, tensor_group=tensor_group, sequence_parallel=sequence_parallel)
    first_id = tensor_group.rank * head_weight.size(0)
    held = max(0, min(head_weight.size(0), vocab_size - first_id))
    log_probs, entropies = _ChunkedLogProbs.apply(
        hidden,
        head_weight,
        labels,
        first_id,
        held,
        temperature,
        tensor_group,
        chunk_rows,
        with_entropy,
        batch_invariant,
        kept,
    )
    return log_probs, entropies if with_entropy else None
