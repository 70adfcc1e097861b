"""What a critic adds to a plan: state on the ranks, bytes of a checkpoint.

Owns which numbers follow from the critic's own precision, optimizer and head; the arithmetic is the policy's.
"""

from __future__ import annotations

from gspo_mega.config.critic_config import critic_config, critic_of
from gspo_mega.config.schema import Config
from gspo_mega.models.sizes import count_parameters
from gspo_mega.models.spec import ModelSpec
from gspo_mega.plan.adapter_shares import trained_parameters
from gspo_mega.plan.layout import Layout
from gspo_mega.plan.shares import ModelShares, StageState
from gspo_mega.plan.state_bytes import StateBytes, checkpoint_bytes, state_bytes


def critic_state(
    config: Config, layout: Layout, shares: ModelShares, stage: int
) -> tuple[StageState, StateBytes] | None:
    """What the ranks of a stage hold of the critic; None without one. `shares`: the policy's."""
    if critic_of(config) is None:
        return None
    own = critic_config(config)
    held = shares.critic.state(own, layout, stage)
    return held, state_bytes(own, held.largest, is_critic=True)


def critic_parameters(spec: ModelSpec) -> int:
    """Parameters of a critic: the policy's with a row in place of the LM head."""
    counts = count_parameters(spec)
    head = 0 if spec.tie_word_embeddings else counts.embedding
    return counts.total - head + spec.hidden_size


def saved_bytes(config: Config, spec: ModelSpec, total_parameters: int) -> int:
    """Bytes of a checkpoint of the run: of what it trains of the policy, and of the critic."""
    size = checkpoint_bytes(config, trained_parameters(config, spec, total_parameters))
    return (
        size if critic_of(config) is None else size + checkpoint_bytes(critic_config(config), critic_parameters(spec))
    )
