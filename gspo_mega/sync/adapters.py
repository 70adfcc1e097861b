"""Publish of a policy as adapters (`publish.lora: adapter`): servers keep the weights of `model.path` and load each
version's PEFT folder.

Three things differ from a publish of whole weights: what is written, how a server loads it, and the proof. At every
server start, random adapters prove that the server computes with adapters. After each publish, the servers' own weights
are compared with the trainer's frozen ones. SGLang loads strictly: a tensor with another name or shape is an error
there.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors.torch import save_file

from gspo_mega.base import atomic_io
from gspo_mega.base.errors import PublishError
from gspo_mega.checkpoint.adapters import CONFIG_NAME, WEIGHTS_NAME, export_adapters, served_config
from gspo_mega.config.precision import publishes_adapters
from gspo_mega.config.schema import Config, Lora
from gspo_mega.engine.adapters import without_adapters
from gspo_mega.models.low_rank import SERVED_NAME, adapter_tensors
from gspo_mega.models.spec import ModelSpec
from gspo_mega.sync.publish import Publisher
from gspo_mega.sync.servers import Deadline, Fleet, ServerControl
from gspo_mega.sync.transaction import PublishContent, Send, Transaction

# The proof compares the log-probs of these tokens with and without adapters.
_PROBE = tuple(range(1, 9))
_PROOF = "adapter_proof"


class AdapterServer(ServerControl, Protocol):
    """A server control with what a publish of adapters needs in addition."""

    def load_adapter(self, path: str, *, deadline_seconds: float) -> None:
        """Load a PEFT folder in place of the adapters that the server has. The server is paused."""
        ...

    def log_probs(self, token_ids: tuple[int, ...], adapter: str | None, *, deadline_seconds: float) -> list[float]:
        """Return the log-probs of these tokens except the first, with or without adapters. The server is not paused."""
        ...


class AdapterTransaction(Transaction):
    """One publish of adapters. `proof` is a PEFT folder of random adapters."""

    def __init__(self, *parts: Any, proof: Path) -> None:
        super().__init__(*parts)
        self._proof = proof

    def _prove(self, fleet: Fleet, generations: dict[str, int]) -> None:
        """Once per server start, check that random adapters change the server's answers, then send the policy's again.

        The server serves during this check, but the pool gives it no request before the publish ends.
        """
        new = [s for s in fleet.active if self._memory.proved.get(s.server_id) != generations[s.server_id]]
        fleet.each(lambda s, left: self._prove_server(cast("AdapterServer", s), left), new)
        self._update(fleet, [s for s in new if s in fleet.active])
        for server in new:
            if server in fleet.active:
                self._memory.proved[server.server_id] = generations[server.server_id]

    def _prove_server(self, server: AdapterServer, seconds: float) -> None:
        server.load_adapter(str(self._proof), deadline_seconds=seconds)
        server.resume(deadline_seconds=seconds)
        own = server.log_probs(_PROBE, None, deadline_seconds=seconds)
        adapted = server.log_probs(_PROBE, SERVED_NAME, deadline_seconds=seconds)
        server.pause(deadline_seconds=seconds)
        if own == adapted:
            raise PublishError(
                f"{server.server_id}: gives the same answers with adapters as without: it loaded them but does not"
                " compute with them; set publish.lora: merged"
            )


class AdapterPublisher(Publisher):
    """Publishes one policy's adapters. Its interface is that of `Publisher`."""

    def __init__(self, config: Config, *parts: Any, **named: Any) -> None:
        super().__init__(config, *parts, **named)
        assert config.lora is not None
        self._lora: Lora = config.lora
        self._base: PublishContent | None = None
        self._proof = self.versions.folder / _PROOF

    def _prepare(self, weight_version: int, chosen: frozenset[str] | None) -> PublishContent:
        """Write the version's folder. Return the frozen weights, which servers hold in addition; they are read once."""
        path = self.versions.path(weight_version)
        export_adapters(path, self._lora, self._spec, self._groups, self._chunks, self._source_folder, served=True)
        if self._base is None:
            with without_adapters(self._chunks):
                self._base = self._hash_all(weight_version)
        return replace(self._base, weight_version=weight_version, chosen=chosen)

    def _load(self, server: ServerControl, path: str, version: int, seconds: float, **more: bool) -> None:
        cast("AdapterServer", server).load_adapter(path, deadline_seconds=seconds)
        server.set_weight_version(version, deadline_seconds=seconds)

    def _transaction(
        self, content: PublishContent, deadline: Deadline, send: Send, keeps_requests: bool
    ) -> Transaction:
        if not (self._proof / CONFIG_NAME).is_file():
            write_random_adapters(self._proof, self._lora, self._spec, self._source_folder)
        return AdapterTransaction(
            self._tensors, self._memory, content, deadline, send, keeps_requests, proof=self._proof
        )

    def _version_bytes(self) -> int:
        return 4 * sum(entry.num_elements for entry in adapter_tensors(self._spec, self._lora.rank, self._lora.targets))


def publisher_class(config: Config) -> type[Publisher]:
    """Return the class that publishes this run's policy."""
    return AdapterPublisher if publishes_adapters(config) else Publisher


def write_random_adapters(folder: Path, settings: Lora, spec: ModelSpec, base: str) -> None:
    """Write a PEFT folder for this model in which every adapter changes its layer by a large amount.

    Raises PublishError if the folder cannot be written.
    """
    generator = torch.Generator().manual_seed(0)
    tensors = {
        entry.name: 0.1 * torch.randn(entry.shape, generator=generator)
        for entry in adapter_tensors(spec, settings.rank, settings.targets)
    }
    try:
        atomic_io.make_folder(folder, at="publish.folder")
        with atomic_io.operation("publish.tensors"):
            save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})
            atomic_io.follow_umask(folder / WEIGHTS_NAME)
        atomic_io.sync(folder / WEIGHTS_NAME, at="publish.sync")
        atomic_io.atomic_write_json(folder / CONFIG_NAME, served_config(settings, spec, base), at="publish.config")
    except OSError as error:
        raise PublishError(f"{folder} cannot be written: {error}") from error
