"""From a configuration to its layout, or to one error that lists every reason why there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from gspo_mega.base.errors import PlanError
from gspo_mega.config.schema import Config
from gspo_mega.models.families import padded_vocab_size
from gspo_mega.models.sizes import attention_crossover_tokens
from gspo_mega.models.spec import ModelSpec
from gspo_mega.plan.layout import Layout
from gspo_mega.plan.layout_checks import check_layout
from gspo_mega.plan.layout_sizes import Sizes
from gspo_mega.plan.model_division import stage_layers


def resolve_layout(
    config: Config,
    spec: ModelSpec,
    where: Callable[[str], str] | None = None,
    device: Literal["cpu", "gpu"] | None = None,
) -> Layout:
    """The layout of a configuration for a model.

    `where` turns a dotted key into its place (`LoadedConfig.where`). `device`: what the ranks will run on, None
    when that is not known, as on a login node. Raises PlanError with a line for every violation:
    `place: key: what; nearest valid: ...`.
    """
    violations = check_layout(config, spec, device)
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
    """The layout of a configuration that has passed `check_layout`.

    `crossover_tokens`: the model's, where the caller knows it already.
    """
    sizes = Sizes.of(config)
    parallel = config.parallel
    num_sequences = config.batch.prompts_per_step * config.batch.group_size
    layers = stage_layers(spec.num_layers, parallel)
    assert layers is not None, "check_layout finds this"
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
