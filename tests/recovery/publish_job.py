"""Publishes through the disk, without servers and without Megatron: three versions, one after another, in a process
that may be killed.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from types import SimpleNamespace

from gspo_mega.base import failpoints

NUM_VERSIONS = 3
NAMES = ("embed", "layer", "head")


def main(arguments: list[str]) -> None:
    """`arguments`: folder of versions, a Hugging Face folder to describe them. Goes on where the folder is."""
    import torch
    import torch.distributed as dist

    from gspo_mega.checkpoint.hf_export import export_policy
    from gspo_mega.checkpoint.quantized import plain_form
    from gspo_mega.sync.versions import PublishedVersions

    failpoints.arm(os.environ.get(failpoints.VARIABLE), 0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = SimpleNamespace(rank=0, size=1, group=dist.group.WORLD, ranks=[0])
    versions = PublishedVersions(arguments[0])
    current = versions.current()
    for version in range(1 if current is None else current.weight_version + 1, NUM_VERSIONS + 1):
        entries = [SimpleNamespace(name=name, is_buffer=False, shape=(4, 4)) for name in NAMES]
        policy = SimpleNamespace(
            groups=SimpleNamespace(world=group, host=group, is_lead=True),
            table={"all": entries},
            config_json=lambda raw: raw,
            stored=lambda: ((entry, (entry,)) for entry in entries),
            owned=lambda dtype: iter([(entry, torch.full((4, 4), float(version), dtype=dtype)) for entry in entries]),
        )
        # So small a limit that every tensor has a file of its own, and the folder an index.
        export_policy(
            policy, versions.path(version), plain_form(torch.float32), arguments[1], version, max_file_bytes=64
        )
        versions.commit(version)
        versions.prune(1)
    versions.prune(1)  # a run's start publishes, and prunes, once more


def check(folder: Path) -> int:
    """The committed version (0 before the first), of which every tensor is there as its manifest says."""
    from safetensors.numpy import load_file

    try:
        current = json.loads((folder / "current.json").read_text())
    except FileNotFoundError:
        return 0
    path = Path(current["path"])
    manifest = json.loads((path / "manifest.json").read_text())
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    assert manifest["weight_version"] == current["weight_version"] and set(manifest["tensors"]) == set(index) == set(
        NAMES
    )
    assert (path / "config.json").is_file()
    for name, tensor in manifest["tensors"].items():
        data = load_file(path / index[name])[name].tobytes()
        assert hashlib.sha256(data).hexdigest() == tensor["sha256"], name
    return current["weight_version"]
