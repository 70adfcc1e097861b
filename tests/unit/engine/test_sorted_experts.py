"""A router lists a token's experts in the same order with and without gradients, also under a Megatron-Core that sorts
them only where gradients are on.
"""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from gspo_mega.engine.routing import sort_chosen_experts


def choose_as_on_a_gpu(scores, topk, num_groups=None, group_topk=None):
    """Megatron-Core 0.19's choice; where torch need not sort, the order is another one."""
    values, indices = torch.topk(scores, topk, dim=1)
    return (values, indices) if torch.is_grad_enabled() else (values.flip(1), indices.flip(1))


@pytest.fixture
def replay():
    router = SimpleNamespace(router_replay=RouterReplay())
    sort_chosen_experts(router)
    yield router.router_replay
    RouterReplay.clear_global_router_replay_instances()


def weights(replay, logits):
    scores, experts = replay.get_replay_topk(logits, 6, None, None, choose_as_on_a_gpu)
    return torch.softmax(scores, dim=-1, dtype=torch.float32), experts


@pytest.mark.parametrize("action", [None, RouterReplayAction.RECORD])
def test_the_old_pass_weighs_experts_as_the_training_pass(replay, action):
    logits = torch.randn(4096, 32, generator=torch.Generator().manual_seed(0))
    if action is not None:
        replay.set_router_replay_action(action)
    with torch.no_grad():
        old, old_experts = weights(replay, logits)
    new, experts = weights(replay, logits.clone().requires_grad_())
    assert torch.equal(old_experts, experts)
    assert torch.equal(old, new)
    assert not old.requires_grad and new.requires_grad
    # In the other order, which is what an unwrapped router would give without gradients, last bits differ.
    other = torch.softmax(torch.topk(logits, 6, dim=1).values.flip(1), dim=-1).flip(1)
    assert not torch.equal(other, new)
