"""What the ranks of the publish tests do, in the pool's processes: a trainer, its publisher, faults on the way to a
server.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from gspo_mega.base.errors import PublishError


class Trainer:
    """A policy, its publisher and (on rank 0) the servers, as a run has them."""

    def __init__(self, config_path: str, attempt: str, parallel: dict, publish: dict, weights_dir: str) -> None:
        from gspo_mega.base.run_folder import Attempt
        from gspo_mega.checkpoint.hf_import import import_huggingface
        from gspo_mega.config import load_config
        from gspo_mega.engine.model import build_chunks, transformer_config
        from gspo_mega.engine.process_groups import create_groups
        from gspo_mega.models.huggingface import read_model_spec
        from gspo_mega.rollout.pool import ServerPool
        from gspo_mega.sync.publish import Publisher

        config = load_config(config_path).config
        layout = config.parallel.model_copy(update=parallel)
        config = config.model_copy(update={"parallel": layout, "publish": config.publish.model_copy(update=publish)})
        spec = read_model_spec(config.model.path)
        self.groups = create_groups(**parallel)
        self.chunks = build_chunks(transformer_config(config, spec), spec, self.groups)
        import_huggingface(config.model.path, spec, self.groups, self.chunks)
        self.publisher = Publisher(config, spec, self.groups, self.chunks, weights_dir)
        self.pool = ServerPool(config.rollout, spec, Attempt(Path(attempt))) if self.groups.world.rank == 0 else None
        if self.pool is not None:
            self.pool.wait_ready(1, deadline_seconds=60)

    def change(self, which: str, every: int = 1) -> None:
        """As an optimizer step would: every parameter whose name has `which` in it moves a little, or one in `every` of
        its values.
        """
        with torch.no_grad():
            for chunk in self.chunks:
                for name, parameter in chunk.named_parameters():
                    if which in name:
                        parameter.view(-1)[::every].mul_(1.01)

    def servers(self, fault: dict | None) -> list:
        if self.pool is None:
            return []
        return [Faulty(c, **fault) if fault and c.server_id in fault["servers"] else c for c in self.pool.controls()]


class Faulty:
    """The control of a real server, with one fault on the way there: what is between trainer and server goes wrong."""

    # Servers that read one folder meet its fault in turn: what one puts right again the other must have read before.
    _turn = threading.Lock()

    def __init__(self, control, servers: list[str], kind: str, names: str, old: str | None = None) -> None:
        self._control, self._kind, self._names, self._old = control, kind, names, old

    def __getattr__(self, name: str):
        return getattr(self._control, name)

    def update_from_disk(self, path, weight_version, *, deadline_seconds):
        with self._turn:
            self._update_from_disk(path, weight_version, deadline_seconds)

    def _update_from_disk(self, path, weight_version, deadline_seconds):
        files = sorted(Path(path).glob("*.safetensors"))
        file = next((f for f in files if any(self._names in n for n in load_file(f))), None)
        if file is None:  # this folder has no such tensor: a fault of changes only
            self._control.update_from_disk(path, weight_version, deadline_seconds=deadline_seconds)
            return
        right = load_file(file)
        wrong = {}
        for name, tensor in right.items():
            if self._names not in name:
                wrong[name] = tensor
            elif self._kind == "renamed":
                wrong[name.replace("proj", "projection")] = tensor
            elif self._kind == "stale":
                wrong[name] = load_file(Path(self._old) / file.name)[name]
            elif self._kind == "rule":
                wrong[name] = by_another_rule(name, right)
        save_file(wrong, file, metadata={"format": "pt"})
        index = Path(path) / "model.safetensors.index.json"
        indexed = index.read_text() if index.exists() else None
        if indexed is not None:
            weight_map = {n: f for n, f in json.loads(indexed)["weight_map"].items() if f != file.name} | dict.fromkeys(
                wrong, file.name
            )
            index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        try:
            self._control.update_from_disk(path, weight_version, deadline_seconds=deadline_seconds)
        finally:
            save_file(right, file, metadata={"format": "pt"})
            if indexed is not None:
                index.write_text(indexed)

    def update_from_distributed(self, names, dtypes, shapes, group_name, *, deadline_seconds):
        if self._kind == "refused" and any(self._names in n for n in names):
            group_name = "a group that the server is not in"
        # SGLang receives what it has no name for and drops it.
        unknown = {"renamed": "projection", "missing": "nowhere", "stale": "nowhere"}.get(self._kind, "proj")
        if self._kind == "shape":  # of the same number of bytes
            shapes = [s[::-1] if self._names in n else s for n, s in zip(names, shapes, strict=True)]
        names = [n.replace("proj", unknown) if self._names in n else n for n in names]
        self._control.update_from_distributed(names, dtypes, shapes, group_name, deadline_seconds=deadline_seconds)


def by_another_rule(name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The weight, or its scales, as the quantiser with powers of two makes them of the same values."""
    from gspo_mega.algorithm.fp8 import dequantize_blocks, quantize_blocks

    weight = name.removesuffix("_scale_inv")
    values = dequantize_blocks(tensors[weight], tensors[f"{weight}_scale_inv"])
    return quantize_blocks(values, (128, 128), power_of_two=True)[0 if name == weight else 1]


_trainer: Trainer | None = None


def open_trainer(**arguments) -> None:
    global _trainer
    _trainer = Trainer(**arguments)


def publish(
    version: int, change: str = "", fault: dict | None = None, again: bool = False, every: int = 1, base: int = 0
) -> dict:
    """Publish after a change; the result as plain values, or the error's text. `base`: the trainer takes this for the
    version that it published last, where it is not 0.
    """
    assert _trainer is not None
    if not again:
        _trainer.change(change or "\0", every)
    if base:
        committed = _trainer.publisher._memory.committed
        if committed is not None:
            committed.weight_version = base
        _trainer.publisher._changes._copy.version = base
    act = _trainer.publisher.publish_again if again else _trainer.publisher.publish
    try:
        result = act(version, _trainer.servers(fault))
    except PublishError as error:
        return {"error": str(error)}
    return {
        "verified": [list(v) for v in result.verified],
        "failed": result.failed,
        "phases": result.phase_seconds,
        "num_bytes": result.num_bytes,
        "num_bytes_sent": result.num_bytes_sent,
        "bytes_sent_by_rank": result.bytes_sent_by_rank,
        "num_bytes_hashed": result.num_bytes_hashed,
        "num_compared": result.num_tensors_compared,
        "is_full": result.is_full,
        "changed_share": result.changed_share,
        "num_delta_bytes": result.num_delta_bytes,
        "fallback": result.fallback,
        "seconds": result.seconds,
    }


def held() -> list | None:
    """On rank 0, the checksums of every server's tensors, as the servers report them."""
    assert _trainer is not None
    return [control.checksums(deadline_seconds=60) for control in _trainer.servers(None)] or None


def await_server(generation: int) -> None:
    """On rank 0, wait until the pool has seen this start of the server."""
    assert _trainer is not None
    until = time.monotonic() + 120
    while _trainer.pool is not None and [c.generation for c in _trainer.pool.controls()] != [generation]:
        assert time.monotonic() < until, "the server does not come back"
        time.sleep(0.1)


def close_trainer() -> None:
    global _trainer
    from gspo_mega.engine.process_groups import destroy_groups

    assert _trainer is not None
    _trainer.publisher.close()
    if _trainer.pool is not None:
        _trainer.pool.close()
    destroy_groups()
    _trainer = None
