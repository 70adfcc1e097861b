"""Turn a loaded configuration into everything that is decided before a process starts, or into one error that lists
every reason why it cannot run.

`plan_run` reads the model's shape and checks the other models of the run against it; `resolve_layout` checks the layout
and makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gspo_mega.base.errors import ModelError, PlanError
from gspo_mega.config.derived import critic_of, penalises_kl, with_teacher_folders
from gspo_mega.config.loader import LoadedConfig
from gspo_mega.config.precision import has_transformer_engine_layers
from gspo_mega.config.schema import Config
from gspo_mega.models.end_tokens import planned_end_tokens
from gspo_mega.models.families import FAMILIES, VISION_TOWER
from gspo_mega.models.huggingface import carried_bytes, read_model_spec
from gspo_mega.models.spec import ModelSpec, shape_differences
from gspo_mega.models.tensors import attention_crossover_tokens, padded_vocab_size
from gspo_mega.models.value_models import read_critic_spec
from gspo_mega.plan.gpus import Device, describe_verification, is_on_gpu
from gspo_mega.plan.layout import Layout, Sizes, stage_layers
from gspo_mega.plan.teacher import check_teacher
from gspo_mega.plan.validate import gathers_unevenly, validate_layout
from gspo_mega.plan.validate_precision import describe_operations


@dataclass(frozen=True)
class Plan:
    """A run that can start.

    `model`: the folder or shape file that was read. `notices`: those of the configuration and of the layout, to be
    shown at a run's start and end. `verification`: how a publish is verified, in words. `operations`: what is fused, in
    words. `device`: what the ranks run on, None if that is not known.
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
    """Read the model's shape, resolve the layout, and return the plan.

    `model`: another Hugging Face folder or config.json to plan with instead of `model.path`. `device`: what the ranks
    will run on, None if that is not known. Raises ModelError or PlanError with the place in the configuration.
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
    if model is not None and config.teacher is not None:  # the teacher may not be here either: take one of that shape
        config = config.model_copy(update={"teacher": with_teacher_folders(config.teacher, lambda path: str(source))})
    compares = config.kl.coefficient > 0 or penalises_kl(config.algorithm, config.critic)
    if model is None and compares and config.kl.reference_path is not None:
        _check_same_shape(config.kl.reference_path, spec, f"{loaded.where('kl.reference_path')}: kl.reference_path: ")
    critic = critic_of(config.algorithm, config.critic)
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
    check_teacher(config, spec, source, loaded.where, device)
    notices = [*loaded.notices, *_notices(config, spec, layout, device)]
    if source.is_dir():
        ends = planned_end_tokens(source, spec.eos_token_ids, spec.vocab_size)
        notices += ends.notices
        if not ends.ids:
            notices.append("the model names no end-of-sequence token: every response runs to max_new_tokens")
    if spec.num_ignored_layers:
        notices.append(
            f"num_nextn_predict_layers {spec.num_ignored_layers}: layers for multi-token prediction are neither loaded"
            " nor trained nor published; the run's `hf` keeps those of model.path as they are"
        )
    notices += [_carried(source, beginning) for beginning in FAMILIES[spec.family].carried]
    on_gpu = is_on_gpu(config.cluster, device)
    return Plan(
        source,
        config,
        spec,
        layout,
        tuple(notices),
        describe_verification(config.publish.verify, config.server.tensor, on_gpu),
        describe_operations(config, spec, on_gpu),
        device,
    )


def _carried(source: Path, beginning: str) -> str:
    """Say what happens to the tensors of `source` whose names begin so."""
    number, size = carried_bytes(source, beginning)
    what = "the vision tower" if beginning == VISION_TOWER else "layers for multi-token prediction"
    held = f"{number} tensors, {size / 1e9:.3g} GB" if number else "if it has any"
    return (
        f"tensors {beginning}* of {source} ({what}; {held}) are neither loaded nor trained nor published, and no server"
        " holds them; the run's `hf` keeps them as they are"
    )


def _check_same_shape(
    path: str, spec: ModelSpec, place: str, read: Callable[[str], ModelSpec] = read_model_spec
) -> None:
    """Raises ModelError if the model that `read` finds in `path` does not have the policy's shape. A reference, a
    critic and weights that replace the policy's must have it.
    """
    try:
        other = shape_differences(read(path), spec)
    except ModelError as error:
        raise ModelError("\n".join(place + line for line in str(error).splitlines())) from None
    if other:
        raise ModelError(f"{place}{path} has another shape than the policy: {', '.join(other)}")


def _notices(config: Config, spec: ModelSpec, layout: Layout, device: Device | None) -> Iterator[str]:
    """Yield what a user should know about a layout that can run."""
    ranks_per_node = config.cluster.ranks_per_node
    if ranks_per_node % layout.tensor:
        yield f"tensor groups of {layout.tensor} ranks span nodes of {ranks_per_node}: slow; keep them inside a node"
    if layout.mini_batch_sequences[-1] % layout.data:
        yield (
            f"{layout.mini_batch_sequences[-1]} trajectories per mini-batch do not divide evenly over {layout.data}"
            " data-parallel ranks: some ranks compute less and wait"
        )
    if device == "cpu" and has_transformer_engine_layers(config.precision, config.engine, has_gpu=False):
        rounding = "Operands are rounded to FP8 as the recipe says, and their" if config.precision == "fp8" else "Their"
        yield (
            f"precision {config.precision} without a GPU: Transformer Engine's own layers over CPU kernels. {rounding}"
            f" products are summed in fp32: {config.precision}'s numbers, not its speed or memory, and not a GPU's"
            " order of summation"
        )
    if config.batch.share_prefixes != "off" and is_on_gpu(config.cluster, device):
        yield (
            f"batch.share_prefixes {config.batch.share_prefixes} on GPUs: attention over shared prefixes"
            " (FlexAttention) was traced, and compared with loops on CPUs; it has not yet run on a GPU"
        )
    has_engine = has_transformer_engine_layers(config.precision, config.engine, has_gpu=device != "cpu")
    if spec.delta is not None and device != "cpu" and has_engine:
        yield (
            "gated delta nets with Transformer Engine's layers (engine.transformer_engine): compared with Megatron's"
            " plain ones on CPUs, not yet run on a GPU"
        )
    if device is None and gathers_unevenly(config.parallel, spec):
        yield (
            "expert_tensor > 1 with the alltoall dispatcher runs on GPUs only; without them use `expert_dispatcher:"
            " allgather`"
        )


def resolve_layout(
    config: Config,
    spec: ModelSpec,
    where: Callable[[str], str] | None = None,
    device: Device | None = None,
) -> Layout:
    """Return the layout of a configuration for a model.

    `where` turns a dotted key into its place (`LoadedConfig.where`). `device`: what the ranks will run on, None if that
    is not known, as on a login node. Raises PlanError with a line for every violation:
    `place: key: what is wrong; nearest valid: ...`.
    """
    violations = validate_layout(config, spec, device)
    if violations:
        lines = [f"{where(v.key)}: " if where is not None else "" for v in violations]
        raise PlanError(
            "\n".join(
                f"{place}{v.key}: {v.text}" + (f"; nearest valid: {v.nearest}" if v.nearest else "")
                for place, v in zip(lines, violations)
            )
        )
    return layout_of(config, spec)


def layout_of(config: Config, spec: ModelSpec, crossover_tokens: int | None = None) -> Layout:
    """Return the layout of a configuration that has passed `validate_layout`.

    `crossover_tokens`: the model's `attention_crossover_tokens`, if the caller knows it already.
    """
    sizes = Sizes.of(config)
    parallel = config.parallel
    num_sequences = config.batch.prompts_per_step * config.batch.group_size
    layers = stage_layers(spec.num_layers, parallel)
    assert layers is not None, "validate_layout finds this"
    quotient, remainder = divmod(num_sequences, config.batch.num_mini_batches)
    return Layout(
        world_size=sizes.world,
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        virtual_pipeline=parallel.virtual_pipeline,
        context=parallel.context,
        data=sizes.data,
        expert=parallel.expert,
        expert_tensor=parallel.expert_tensor,
        expert_data=sizes.world // (parallel.pipeline * parallel.expert * parallel.expert_tensor),
        sequence_parallel=sizes.sequence_parallel,
        stage_layers=layers,
        padded_vocab_size=padded_vocab_size(spec.vocab_size, parallel.tensor),
        sequence_multiple_tokens=sizes.sequence_multiple,
        pack_multiple_tokens=sizes.pack_multiple,
        mini_batch_sequences=tuple(quotient + (index < remainder) for index in range(config.batch.num_mini_batches)),
        attention_crossover_tokens=crossover_tokens or attention_crossover_tokens(spec),
        # The allgather dispatcher gathers tokens over all ranks of an expert group as if each had equally many.
        equal_packs=spec.moe is not None and parallel.expert_dispatcher == "allgather",
    )
