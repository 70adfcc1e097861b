"""What ranks run in the tests of carried layers: import a folder in a layout, and export it as a run does."""

from __future__ import annotations

from pathlib import Path

import torch
from family_jobs import SIZES
from layout_jobs import layout_config

from gspo_mega.base.errors import ModelError, PublishError
from gspo_mega.checkpoint.hf_export import export_huggingface
from gspo_mega.checkpoint.hf_import import import_huggingface
from gspo_mega.engine.model import build_chunks, transformer_config
from gspo_mega.engine.process_groups import create_groups, destroy_groups
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.train.checkpointing import check_carried_layers


def start(folder: str, spec_of: str) -> tuple[list[str], str | None]:
    """What a run from `folder` says at its start, where config.json is that of `spec_of`; and why it does not begin."""
    groups, said = create_groups(expert_tensor=1), []
    try:
        check_carried_layers(Path(folder), read_model_spec(spec_of), groups, said.append)
        return said, None
    except ModelError as error:
        return said, str(error)
    finally:
        destroy_groups()


def export(folder: str, parallel: dict, out: str, source: str | None = None) -> str | None:
    """The policy of `folder`, written to `out` with what `source` (`folder`) describes; or why it is not written."""
    parallel = {"expert_tensor": 1, **parallel}
    groups = create_groups(**{size: parallel.get(size, 1) for size in SIZES})
    try:
        spec = read_model_spec(folder)
        chunks = build_chunks(transformer_config(layout_config(folder, parallel), spec), spec, groups)
        import_huggingface(folder, spec, groups, chunks)
        try:
            export_huggingface(Path(out), spec, groups, chunks, torch.float32, source or folder, 1, 60_000)
        except PublishError as error:
            return str(error)
        return None
    finally:
        destroy_groups()
