"""The processes that this folder's tests fork ranks and servers from, one of each kind for all tests of a session."""

from __future__ import annotations

import atexit
import functools

from forked_workers import OF_RANKS, ForkedWorkers

# `forked_serve` imports the server's entry, which comes before SGLang and sets this variable before it imports that.
_OF_SERVERS = (
    "forked_serve",
    "gspo_mega.cli.serve",
    "sglang.srt.server_args",
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
)
_VARIABLES_OF_SERVERS = {"TORCHDYNAMO_DISABLE": "1"}


@functools.cache
def forked_servers() -> ForkedWorkers:
    """Its command `forked_serve` is `gspo-mega serve`."""
    forks = ForkedWorkers(_OF_SERVERS, **_VARIABLES_OF_SERVERS)
    atexit.register(forks.close)
    return forks


@functools.cache
def forked_ranks() -> ForkedWorkers:
    """Without Transformer Engine. Its command `gspo_mega.train.worker` is a rank, and `forked_trial` tries inputs."""
    forks = ForkedWorkers((*OF_RANKS, "forked_trial", "transformers.models.auto.tokenization_auto"))
    atexit.register(forks.close)
    return forks
