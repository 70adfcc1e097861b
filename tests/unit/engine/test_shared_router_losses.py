"""Megatron's losses of a router, of a pack whose rows share prefixes: those of its whole rows, and their gradient."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from gspo_mega.cpu.forest_attention import ForestNodes, set_forest
from gspo_mega.data.forest import lay_out
from gspo_mega.data.packing import build_micro_batch
from gspo_mega.engine.precision import clear_router_losses, router_losses, router_losses_know_their_parts
from gspo_mega.engine.routing import Routers

EXPERTS, TOP_K, BALANCE, Z = 4, 2, 0.3, 0.1
SIZES, SHARED = [7, 6, 9, 5], [0, 4, 4, 0]
# Which of these positions are computed once is by hand: the second and third row begin at token 4 of the first.
COMPUTED = 7 + 2 + 5 + 5


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """Megatron's sum over ranks asks for groups of processes; a test of several ranks puts their sum in."""
    monkeypatch.setattr(moe_utils, "reduce_from_tensor_model_parallel_region", lambda x, group: x)


class Group:
    """One rank of a group that would be `ranks` large: its sums are another's part of the test."""

    def __init__(self, ranks: int = 1, rank: int = 0) -> None:
        self.ranks, self.place = ranks, rank

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.place


class Layer(TransformerLayer):
    """A layer of a router only: Megatron's constructor is left out."""

    def __init__(self, router: TopKRouter) -> None:
        nn.Module.__init__(self)
        self.router = router

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return nn.Module.__call__(self, *args, **kwargs)

    def forward(self, logits: torch.Tensor, packed_seq_params: Any = None) -> Any:
        return self.router.routing(logits)


def layer_of(ranks: int = 1, rank: int = 0, score: Any = "softmax") -> Layer:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=BALANCE,
        moe_z_loss_coeff=Z,
        moe_router_score_function=score,
        moe_enable_routing_replay=True,
        calculate_per_token_loss=True,
        use_cpu_initialization=True,
        add_bias_linear=False,
    )
    group: Any = Group(ranks, rank)
    held: Any = SimpleNamespace(tp=group, cp=Group(), tp_cp=Group(ranks), tp_dp_cp=group)
    router = TopKRouter(config, held)
    router.set_layer_number(1)
    layer = Layer(router)
    groups: Any = SimpleNamespace(
        tensor=SimpleNamespace(size=ranks, rank=rank), context=SimpleNamespace(size=1, rank=0)
    )
    Routers([nn.ModuleList([layer])], None, groups, sequence_parallel=ranks > 1, recompute=False)
    return layer.train()


def pack_of(num_rows: torch.Tensor | None, total: int = 0) -> PackedSeqParams:
    params = PackedSeqParams(qkv_format="thd")
    if num_rows is not None:
        set_forest(params, ForestNodes([0], [], num_rows, num_rows, total))
    return params


def losses_and_gradient(layer: Layer, logits: torch.Tensor, params: PackedSeqParams) -> tuple[dict, torch.Tensor]:
    """The reported losses, and the gradient of what Megatron adds to the loss."""
    clear_router_losses()
    logits = logits.clone().requires_grad_()
    probs, _ = layer(logits[:, None], packed_seq_params=params)
    (gradient,) = torch.autograd.grad((probs * 0).sum(), logits)
    return {name: float(values.sum()) for name, values in router_losses().items()}, gradient


def written_out(logits: torch.Tensor, score: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle, of whole rows: E sum_i f_i P_i and the mean squared logsumexp."""
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    chosen = torch.zeros_like(logits).scatter_(1, logits.topk(TOP_K).indices, 1.0)
    balance = EXPERTS * (chosen.mean(0) / TOP_K * scores.mean(0)).sum()
    return balance, logits.logsumexp(-1).square().mean()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_shared_token_counts_for_each_of_its_rows(score):
    torch.manual_seed(0)
    computed_at = torch.from_numpy(lay_out(SIZES, SHARED).computed_at)
    shared = torch.randn(COMPUTED, EXPERTS) * 2
    rows = shared[computed_at].requires_grad_()
    balance, z = written_out(rows, score)
    (wanted,) = torch.autograd.grad((BALANCE * balance + Z * z) * sum(SIZES), rows)
    wanted = torch.zeros(COMPUTED, EXPERTS).index_add_(0, computed_at, wanted)

    whole, gradient = losses_and_gradient(layer_of(score=score), rows.detach(), pack_of(None))
    assert whole == pytest.approx({"load_balancing_loss": float(balance), "z_loss": float(z)}, rel=1e-5)
    assert torch.allclose(torch.zeros(COMPUTED, EXPERTS).index_add_(0, computed_at, gradient), wanted, atol=1e-5)

    counts = torch.bincount(computed_at)
    losses, gradient = losses_and_gradient(layer_of(score=score), shared, pack_of(counts, sum(SIZES)))
    assert losses == pytest.approx(whole, rel=1e-5)
    assert torch.allclose(gradient, wanted, atol=1e-5)
    # Without the counts it would be another loss: the test can tell.
    unweighted, _ = losses_and_gradient(layer_of(score=score), shared, pack_of(None))
    assert abs(unweighted["load_balancing_loss"] - whole["load_balancing_loss"]) > 1e-3


def test_the_parts_of_tensor_ranks_add_up_to_the_whole(monkeypatch):
    """Ranks have unequal numbers of rows. The sum of choices over ranks is put in by hand."""
    torch.manual_seed(1)
    computed_at = torch.from_numpy(lay_out(SIZES, SHARED).computed_at)
    logits = torch.randn(COMPUTED + 1, EXPERTS)  # the last position is padding, which counts for no row
    counts = torch.bincount(computed_at, minlength=COMPUTED + 1)
    whole, wanted = losses_and_gradient(layer_of(), logits, pack_of(counts, sum(SIZES)))
    chosen = torch.zeros_like(logits).scatter_(1, logits.topk(TOP_K).indices, 1.0).long() * counts[:, None]
    monkeypatch.setattr(moe_utils, "reduce_from_tensor_model_parallel_region", lambda x, group: chosen.sum(0))
    parts, gradients = [], []
    for rank in range(2):
        losses, gradient = losses_and_gradient(layer_of(2, rank), logits.chunk(2)[rank], pack_of(counts, sum(SIZES)))
        parts.append(losses)
        gradients.append(gradient * (1 if router_losses_know_their_parts() else 2))
    assert sum(p["load_balancing_loss"] for p in parts) == pytest.approx(whole["load_balancing_loss"], rel=1e-5)
    assert sum(p["z_loss"] for p in parts) / 2 == pytest.approx(whole["z_loss"], rel=1e-5)
    assert torch.allclose(torch.cat(gradients), wanted, atol=1e-5)
    assert not bool(wanted[-1].any())


def test_the_counts_of_a_pack_leave_out_padding():
    rows = [
        {"prompt_token_ids": [1, 2, 3], "response_token_ids": list(range(4, 4 + n)), "response_mask": [1] * n}
        | {"rollout_log_probs": [0.0] * n}
        for n in (2, 4)
    ]
    pack = build_micro_batch(rows, [0, 1], 1, pack_multiple=8, share_prefixes="prompts")
    assert pack.num_computed == 16 and pack.row_counts().tolist() == [2] * 3 + [1] * 6 + [0] * 7
    assert int(pack.row_counts().sum()) == 3 + 2 + 3 + 4
    plain = build_micro_batch(rows, [0, 1], 1, pack_multiple=8)
    assert np.array_equal(plain.row_counts(), [1] * 12 + [0] * 4)
