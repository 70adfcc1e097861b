"""What a published version takes, by the precision that servers hold: bytes on disk and on the way.

Owns these sums for the estimates of disk and time; a server's memory is `server_needs.py`'s, the layout itself
`models/block_fp8.py`'s.
"""

from __future__ import annotations

from gspo_mega.config.lora_rules import publishes_adapters
from gspo_mega.config.schema import Config
from gspo_mega.config.server_precision import DTYPES, server_dtype
from gspo_mega.models.block_fp8 import served_layout, stored_bytes
from gspo_mega.models.families import hf_tensors
from gspo_mega.models.gpt_oss import needs_plain_copy
from gspo_mega.models.spec import ModelSpec
from gspo_mega.plan.adapter_shares import num_adapter_parameters
from gspo_mega.plan.server_needs import DTYPE_BYTES


def version_bytes(config: Config, spec: ModelSpec, total_parameters: int) -> int:
    """Bytes of one version as it is sent: on disk, or through a server's group."""
    if config.lora is not None and publishes_adapters(config):
        return num_adapter_parameters(config.lora, spec) * DTYPE_BYTES["fp32"]
    plain, layout = DTYPE_BYTES[server_dtype(config)], served_layout(config)
    return total_parameters * plain if layout is None else stored_bytes(layout, hf_tensors(spec), plain)


def needs_start_folder(config: Config, spec: ModelSpec) -> bool:
    """Do servers start from a copy of `model.path` in another form? The nearest that the configuration alone says."""
    if spec.raw is not None and needs_plain_copy(spec.raw, DTYPES[server_dtype(config)]):
        return True
    return (spec.stored is None) != (served_layout(config) is None)
