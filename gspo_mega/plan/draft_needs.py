"""What speculative decoding takes of a server's GPU: the draft's weights and its own cache; and where it cannot run.

The draft's folder is read for its size and shape. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gspo_mega.base.errors import Violation
from gspo_mega.base.guarded_files import read_json_file
from gspo_mega.config.schema import Config
from gspo_mega.config.server_precision import server_dtype
from gspo_mega.config.speculative import draft_folder
from gspo_mega.models.families import hf_tensors
from gspo_mega.models.spec import ModelSpec
from gspo_mega.plan.server_needs import DTYPE_BYTES, cache_element_bytes
from gspo_mega.plan.server_parallel import attention_ranks
from gspo_mega.plan.verification import is_on_gpu


@dataclass(frozen=True)
class DraftNeeds:
    """Bytes on one GPU of a server: of the draft's weights, and of its cache per token."""

    weights: int = 0
    cached_token: int = 0


def draft_needs(config: Config, spec: ModelSpec) -> DraftNeeds:
    """Nothing without a draft model. A layer for multi-token prediction counts as one more of the policy's layers, and
    the projection before it.
    """
    folder, speculative = draft_folder(config), config.server.speculative
    if folder is None or speculative is None:
        return DraftNeeds()
    if speculative.draft_path is None:
        layer = sum(entry.num_elements for entry in hf_tensors(spec) if entry.layer == spec.num_layers - 1)
        elements = layer + 2 * spec.hidden_size**2
        cached = spec.cache_elements_per_token // spec.num_layers
        if spec.latent is None:
            cached //= min(attention_ranks(config), spec.num_kv_heads)
        size = DTYPE_BYTES[server_dtype(config)] if config.server.quantization == "none" else 1
        return DraftNeeds(elements * size // config.server.tensor, cached * cache_element_bytes(config))
    shape = _shape(Path(folder))
    stored = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    heads = shape.get("num_attention_heads", 1)
    kv_heads = max(1, shape.get("num_key_value_heads", heads) // attention_ranks(config))
    head_dim = shape.get("head_dim") or shape.get("hidden_size", 0) // heads
    cached = 2 * shape.get("num_hidden_layers", 1) * kv_heads * head_dim
    return DraftNeeds(stored // config.server.tensor, cached * cache_element_bytes(config))


def _shape(folder: Path) -> dict:
    try:
        found = read_json_file(folder / "config.json")
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: value for key, value in found.items() if type(value) is int and 0 < value < 2**31}


def check_speculative(config: Config, spec: ModelSpec, device: Literal["cpu", "gpu"] | None) -> Iterator[Violation]:
    """Where SGLang cannot draft, or would sample from another distribution."""
    speculative = config.server.speculative
    if speculative is None:
        return
    if is_on_gpu(config, device) is False:
        yield Violation(
            "server.speculative",
            f"{speculative.algorithm} without GPUs: SGLang accepts drafts there by the most probable token, whatever"
            " the temperature is",
            "null",
        )
    if speculative.algorithm == "nextn" and spec.family not in ("deepseek_v3", "glm4_moe"):
        yield Violation(
            "server.speculative.algorithm",
            f"nextn, and models of {spec.family} bring no layers for multi-token prediction",
            "eagle3, standalone or ngram",
        )
    folder = speculative.draft_path
    if folder is not None and not (_shape(Path(folder)) and any(Path(folder).glob("*.safetensors"))):
        yield Violation(
            "server.speculative.draft_path", f"{folder} is no Hugging Face folder with config.json and safetensors"
        )
