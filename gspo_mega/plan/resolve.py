"""Turn a loaded configuration into everything that is decided before a process starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gspo_mega.base.errors import ModelError
from gspo_mega.config.critic_config import critic_of, penalises_kl
from gspo_mega.config.layer_library import has_transformer_engine_layers
from gspo_mega.config.loader import LoadedConfig
from gspo_mega.config.schema import Config
from gspo_mega.models.end_tokens import planned_end_tokens
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.spec import ModelSpec, shape_differences
from gspo_mega.models.value_models import read_critic_spec
from gspo_mega.plan.expert_checks import gathers_unevenly
from gspo_mega.plan.fusion_needs import describe_operations
from gspo_mega.plan.layout import Layout
from gspo_mega.plan.layout_of_config import resolve_layout
from gspo_mega.plan.verification import describe_verification, is_on_gpu

Device = Literal["cpu", "gpu"]


@dataclass(frozen=True)
class Plan:
    """`model`: the folder or shape file that was read. `notices`: the configuration's and the layout's, to be shown
    at a run's start and end. `verification`: how a publish is verified; `operations`: what is fused; both in words.
    `device`: what the ranks run on, None where that is not known.
    """

    model: Path
    config: Config
    spec: ModelSpec
    layout: Layout
    notices: tuple[str, ...]
    verification: str
    operations: tuple[str, ...]
    device: Device | None = None


def plan_run(loaded: LoadedConfig, device: Device | None = None, model: str | Path | None = None) -> Plan:
    """Read the model's shape and resolve the layout.

    `model`: another Hugging Face folder or config.json to plan with instead of `model.path`. `device`: what the
    ranks will run on, when known. Raises ModelError or PlanError with the place in the configuration.
    """
    config = loaded.config
    source = Path(model if model is not None else config.model.path)
    try:
        spec = read_model_spec(source)
    except ModelError as error:
        if model is not None:
            raise
        place = f"{loaded.where('model.path')}: model.path: "
        raise ModelError("\n".join(place + line for line in str(error).splitlines())) from None
    compares = config.kl.coefficient > 0 or penalises_kl(config)
    if model is None and compares and config.kl.reference_path is not None:
        _check_same_shape(config.kl.reference_path, spec, f"{loaded.where('kl.reference_path')}: kl.reference_path: ")
    critic = critic_of(config)
    if model is None and critic is not None and critic.path is not None:
        _check_same_shape(critic.path, spec, f"{loaded.where('critic.path')}: critic.path: ", read_critic_spec)
    if model is None and config.model.weights is not None:
        place = f"{loaded.where('model.weights')}: model.weights: "
        _check_same_shape(config.model.weights, spec, place)
        if not (Path(config.model.weights) / "megatron" / "metadata.json").is_file():
            raise ModelError(
                f"{place}{config.model.weights}: it has no Megatron checkpoint; tools/hf_to_megatron.py makes such a"
                " folder"
            )
    layout = resolve_layout(config, spec, loaded.where, device)
    notices = [*loaded.notices, *_notices(config, spec, layout, device)]
    if source.is_dir():
        ends = planned_end_tokens(source, spec.eos_token_ids, spec.vocab_size)
        notices += ends.notices
        if not ends.ids:
            notices.append("the model names no end-of-sequence token: every response runs to max_new_tokens")
    if spec.num_ignored_layers:
        notices.append(
            f"num_nextn_predict_layers {spec.num_ignored_layers}: layers for multi-token prediction are neither loaded"
            " nor trained nor published; the run's `hf` carries those of model.path as they are"
        )
    on_gpu = is_on_gpu(config, device)
    return Plan(
        source,
        config,
        spec,
        layout,
        tuple(notices),
        describe_verification(config, on_gpu),
        describe_operations(config, spec, on_gpu),
        device,
    )


def _check_same_shape(
    path: str, spec: ModelSpec, place: str, read: Callable[[str], ModelSpec] = read_model_spec
) -> None:
    """Raises ModelError where the model that `read` finds in `path` does not have the policy's shape, which weights
    that replace the policy's, a reference and a critic must have.
    """
    try:
        other = shape_differences(read(path), spec)
    except ModelError as error:
        raise ModelError("\n".join(place + line for line in str(error).splitlines())) from None
    if other:
        raise ModelError(f"{place}{path} has another shape than the policy: {', '.join(other)}")


def _notices(config: Config, spec: ModelSpec, layout: Layout, device: Device | None) -> Iterator[str]:
    ranks_per_node = config.cluster.ranks_per_node
    if ranks_per_node % layout.tensor:
        yield f"tensor groups of {layout.tensor} ranks span nodes of {ranks_per_node}: slow; keep them inside a node"
    if layout.mini_batch_sequences[-1] % layout.data:
        yield (
            f"{layout.mini_batch_sequences[-1]} trajectories per mini-batch do not divide evenly over {layout.data}"
            " data-parallel ranks: some ranks compute less and wait"
        )
    if device == "cpu" and has_transformer_engine_layers(config, has_gpu=False):
        rounding = "Operands are rounded to FP8 as the recipe says, and their" if config.precision == "fp8" else "Their"
        yield (
            f"precision {config.precision} without a GPU: Transformer Engine's own layers over CPU kernels. {rounding}"
            f" products are summed in fp32: {config.precision}'s numbers, not its speed or memory, and not a GPU's"
            " order of summation"
        )
    if device is None and gathers_unevenly(config, spec):
        yield (
            "expert_tensor > 1 with the alltoall dispatcher runs on GPUs only; without them use `expert_dispatcher:"
            " allgather`"
        )
