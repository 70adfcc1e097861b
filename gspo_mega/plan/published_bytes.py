"""What a published version and a server's weights take, by the precision that servers hold: bytes on disk, on the way,
and in a server's memory.

Owns these sums for the estimates of disk, memory and time; the layout itself is `model/block_fp8.py`'s.
"""

from __future__ import annotations

from gspo_mega.config.schema import Config
from gspo_mega.config.server_precision import server_dtype
from gspo_mega.model.block_fp8 import is_quantizable, served_layout, stored_bytes
from gspo_mega.model.families import hf_tensors
from gspo_mega.model.spec import ModelSpec

PLAIN_BYTES = {"fp32": 4, "bf16": 2}


def version_bytes(config: Config, spec: ModelSpec, total_parameters: int) -> int:
    """Bytes of one version as it is sent: on disk, or through a server's group."""
    plain, layout = PLAIN_BYTES[server_dtype(config)], served_layout(config)
    return total_parameters * plain if layout is None else stored_bytes(layout, hf_tensors(spec), plain)


def server_weight_bytes(config: Config, spec: ModelSpec, total_parameters: int) -> int:
    """Bytes of all ranks of one server for its weights and their scales."""
    if config.server.quantization not in ("fp8", "int8"):
        return version_bytes(config, spec, total_parameters)
    # A scale per row at most, and one byte an element.
    entries = [entry for entry in hf_tensors(spec) if is_quantizable(entry)]
    quantised, rows = sum(entry.num_elements for entry in entries), sum(entry.shape[0] for entry in entries)
    return quantised + 4 * rows + (total_parameters - quantised) * PLAIN_BYTES[server_dtype(config)]


def needs_start_folder(config: Config, spec: ModelSpec) -> bool:
    """Do servers start from a copy of `model.path` in another form? The nearest that the configuration alone says."""
    return (spec.stored is None) != (served_layout(config) is None)
