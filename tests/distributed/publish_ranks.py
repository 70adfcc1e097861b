"""What two ranks do in the tests of what a publish gathers, hashes and compares: real ranks and files, servers that are
objects of rank 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from run_configs import make_config
from safetensors.torch import load_file

from gspo_mega.base.errors import PublishError


class HoldingServer:
    """Holds what a publish gave it. `stale` tensors keep what they were, and `altered` ones change a little, at every
    load.
    """

    tensor_parallel = 1

    def __init__(self, spec: Any, generation: int = 1) -> None:
        self.server_id, self.generation, self._spec = "server-0", generation, spec
        self.held: dict[str, torch.Tensor] = {}
        self.version, self.stale, self.altered = 0, "", ""
        self.skips: list[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name not in ("pause", "resume", "flush_cache", "reset_tensors", "snapshot", "compare"):
            raise AttributeError(name)
        return lambda **_: None

    def load(self, tensors: dict[str, torch.Tensor], version: int) -> None:
        for name, tensor in tensors.items():
            if not (self.stale and self.stale in name and name in self.held):
                self.held[name] = tensor.clone() if not self.altered or self.altered not in name else tensor + 1.0
        self.version = version

    def update_from_disk(self, path: str, version: int, *, deadline_seconds: float) -> None:
        self.load({n: t for file in Path(path).glob("*.safetensors") for n, t in load_file(file).items()}, version)

    def weight_version(self, *, deadline_seconds: float) -> int:
        return self.version

    def checksums(self, *, deadline_seconds: float, skip=()) -> list[dict[str, str]]:
        from gspo_mega.models.tensors import checkpoint_tensors
        from gspo_mega.sync.verify import ExpectedChecksums

        self.skips.append(list(skip))
        expected = ExpectedChecksums(self._spec)
        for entry in checkpoint_tensors(self._spec):
            expected.add(entry.name, self.held[entry.name])
        return [{n: c for n, c in expected.checksums().items() if not any(piece in n for piece in skip)}]


def publish_rounds(source: str, parallel: dict, publish: dict, rounds: list[dict], weights_dir: str) -> list[dict]:
    """Publish once per round. A round's keys: `change`, a part of the names of parameters that change before;
    `stale` and `altered`, faults of the server; `restart`, a new generation of it; `again`, the version to publish again;
    `gather`, a fault of the gather on its owner: (kind, tensor).
    """
    from gspo_mega.cpu import backend

    backend.install()
    from gspo_mega.checkpoint.gather import PolicyTensors
    from gspo_mega.checkpoint.hf_import import import_huggingface
    from gspo_mega.engine.model import build_chunks, transformer_config
    from gspo_mega.engine.process_groups import create_groups, destroy_groups
    from gspo_mega.models.huggingface import read_model_spec
    from gspo_mega.sync.publish import Publisher

    gathered: Counter[str] = Counter()
    plain_gather, plain_assemble, fault = PolicyTensors._gather, PolicyTensors._assemble, [None]

    def gather(self, parameter, entries, dtype):
        gathered[parameter] += 1
        return plain_gather(self, parameter, entries, dtype)

    def assemble(self, entry, shares):
        if fault[0] is not None and fault[0][1] == entry.name:
            if fault[0][0] == "swapped":
                return plain_assemble(self, entry, shares[::-1])
            whole = plain_assemble(self, entry, shares).clone()
            whole.view(-1)[-1] += 1.0
            return whole
        return plain_assemble(self, entry, shares)

    spec = read_model_spec(source)
    config = make_config(model={"path": source}, parallel=parallel, publish=publish)
    sizes = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")
    groups = create_groups(**{size: getattr(config.parallel, size) for size in sizes})
    chunks = build_chunks(transformer_config(config, spec), spec, groups)
    import_huggingface(source, spec, groups, chunks)
    PolicyTensors._gather, PolicyTensors._assemble = gather, assemble
    try:
        publisher = Publisher(config, spec, groups, chunks, weights_dir)
        server = HoldingServer(spec)
        servers = [server] if groups.is_lead else []

        def send(fleet, targets, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
            whole = {name: tensor.clone() for name, tensor in tensors}
            fleet.each(lambda s, left: s.load(whole, version), targets)

        publisher._sender.send = send  # of method distributed, where rank 0 is the only one that sends
        results = []
        for version, one in enumerate(rounds, start=1):
            with torch.no_grad():
                for chunk in chunks:
                    for name, parameter in chunk.named_parameters():
                        if one.get("change") is not None and one["change"] in name:
                            parameter.mul_(1.5)
            server.stale, server.altered = one.get("stale", ""), one.get("altered", "")
            server.generation += one.get("restart", 0)
            fault[0] = one.get("gather")
            gathered.clear()
            begun = len(server.skips)
            try:
                if one.get("again"):
                    result = publisher.publish_again(one["again"], servers)
                else:
                    result = publisher.publish(version, servers)
            except PublishError as error:
                results.append({"error": str(error)})
                continue
            results.append(
                {
                    "verified": bool(result.verified),
                    "failed": result.failed,
                    "num_bytes": result.num_bytes,
                    "num_bytes_hashed": result.num_bytes_hashed,
                    "compared": result.num_tensors_compared,
                    "gathers": max(gathered.values(), default=0),
                    "skips": len(server.skips[-1]) if len(server.skips) > begun else 0,
                }
            )
        return results
    finally:
        PolicyTensors._gather, PolicyTensors._assemble = plain_gather, plain_assemble
        destroy_groups()
