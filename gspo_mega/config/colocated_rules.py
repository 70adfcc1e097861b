"""Rules between `cluster.colocated` and other keys: what cannot use a GPU in turns with servers."""

from __future__ import annotations

from collections.abc import Iterator

from gspo_mega.base.errors import Violation
from gspo_mega.config.schema import Config

_KEY = "cluster.colocated"


def colocated_violations(config: Config) -> Iterator[Violation]:
    """What contradicts ranks and servers on the same GPUs."""
    if not config.cluster.colocated:
        return
    if config.rollout.max_staleness > 0:
        yield Violation(
            _KEY,
            f"true with `rollout.max_staleness: {config.rollout.max_staleness}`: sampling goes on while ranks train,"
            " which needs GPUs of its own; valid: false, or `max_staleness: 0`",
        )
    if config.publish.method == "distributed":
        yield Violation(
            _KEY,
            "true with `publish.method: distributed`: NCCL refuses a group with two members on one GPU, a rank and a"
            " server; valid: `method: disk`",
        )
    if config.cluster.num_rollout_nodes > 0:
        yield Violation(
            _KEY,
            f"true with `num_rollout_nodes: {config.cluster.num_rollout_nodes}`: nodes of their own for servers have no"
            " ranks to share GPUs with; valid: `num_rollout_nodes: 0`, or false",
        )
    if config.server.num_nodes > 1:
        yield Violation(
            _KEY,
            f"true with `server.num_nodes: {config.server.num_nodes}`: a server that takes turns with ranks is on their"
            " node; valid: `num_nodes: 1`, or false",
        )
    if config.optimizer.cpu_offload_fraction > 0:
        yield Violation(
            _KEY,
            "true with `optimizer.cpu_offload_fraction` above 0: all of the optimizer's state goes to the host while"
            " servers sample, and none stays there; valid: `cpu_offload_fraction: 0`, or false",
        )
    if config.fp8.parameters:
        yield Violation(
            _KEY,
            "true with `fp8.parameters: true`: parameters in FP8 cannot be moved to the host and back yet; valid:"
            " `parameters: false`, or false",
        )
