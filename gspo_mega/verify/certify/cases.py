"""Resolve the cases of `gspo-mega certify`: each case's `set` gives a configuration of its own, or a reason why it is
refused. Starts nothing and imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from gspo_mega.base.errors import ConfigError, GspoMegaError, PlanError
from gspo_mega.config import LoadedConfig, load_config
from gspo_mega.config.precision import has_block_scaled_products
from gspo_mega.config.schema import CertifyCase, Cluster, Critic, Parallel
from gspo_mega.launcher.prepare import continuation_problems
from gspo_mega.plan import plan_run
from gspo_mega.verify.certify.trees import require_room

# The kinds of difference of optimizer steps: see `steps.py`.
STEP_KINDS = ("norm", "steps", "state")
# From a critic's kind of difference to the policy's kind in `compare.Tolerance` that sets its tolerance.
CRITIC_KINDS = {
    "values": "log_prob",
    "value_gradient": "gradient",
    "value_weights": "weights",
    **{f"value_{kind}": kind for kind in STEP_KINDS},
}
# The kinds of parameter by which a norm is broken down.
PARAMETER_KINDS = (
    *("embeddings", "matrices", "norms", "biases", "sinks", "routers", "experts", "biases of experts", "adapters"),
)


def parameter_kind(name: str) -> str:
    """Return one of PARAMETER_KINDS, from a parameter's name in Megatron or in a checkpoint."""
    if "lora_" in name or name.startswith("adapters."):
        return "adapters"
    if ".experts." in name:
        return "biases of experts" if "bias" in name.rpartition(".experts.")[2] else "experts"
    if name.endswith(("sinks", "softmax_offset")):
        return "sinks"
    if any(part in name for part in (".router.", "mlp.gate.", "moe.gate.", "shared_expert_gate", "gate_weight")):
        return "routers"
    if "norm" in name:
        return "norms"
    if name.endswith("bias"):
        return "biases"
    if any(part in name for part in ("embed", "lm_head", "output_layer", "score.", "value_head")):
        return "embeddings"
    return "matrices"


# In the attempt's folder; one line per completed case.
RESULTS_FILE = "cases.jsonl"
# Every case starts from a size of 1 in every dimension; the file's own layout is a case if no cases are given.
_ONE_RANK = {
    "cluster.num_nodes": 1,
    "cluster.num_rollout_nodes": 0,
    "cluster.ranks_per_node": 1,
    "parallel.tensor": 1,
    "parallel.pipeline": 1,
    "parallel.virtual_pipeline": None,
    "parallel.context": 1,
    "parallel.expert": 1,
    "parallel.expert_tensor": 1,
}
# One mini-batch, whose old log-probs are the recorded ones. Adam divides by |gradient| + eps: if eps were near the
# rounding of a gradient, comparing weights would compare the rounding of elements whose gradient is negligible.
_MEASURED = {
    "batch.num_mini_batches": 1,
    "old_log_probs": "rollout",
    "optimizer.eps": 1e-6,
    # Below the norm of most gradients, so that clipping acts in every step.
    "optimizer.clip_grad": 0.1,
    "kl.coefficient": 0.0,
    "moe.routing_replay": "none",
}


@dataclass(frozen=True)
class Case:
    """One row of the table. `refusal`: why it cannot run; None if it can."""

    spec: CertifyCase
    model: str
    precision: str
    refusal: str | None

    @property
    def name(self) -> str:
        return self.spec.name


def folder_name(model: str) -> str:
    """Return the name of the folder for a model's data: readable, and different for each path."""
    return f"{Path(model).stem}-{hashlib.sha256(model.encode()).hexdigest()[:8]}"


def own_layout(parallel: Parallel, cluster: Cluster) -> CertifyCase:
    """Return the configuration's own layout as a case."""
    values = {f"parallel.{key}": value for key, value in parallel.model_dump().items()}
    world = cluster.num_nodes * cluster.ranks_per_node
    return CertifyCase(name=f"the file's layout on {world} ranks", ranks=world, set=values)


def case_overrides(case: CertifyCase) -> list[str]:
    """Return the `key=value` overrides that make the file this case's configuration. JSON values are valid YAML."""
    values: dict[str, Any] = {**_ONE_RANK, **_MEASURED, "cluster.ranks_per_node": case.ranks, **case.set}
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def case_config(file: str | Path, case: CertifyCase, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Return the configuration of `case`. Raises ConfigError, which names the case's own keys as overrides."""
    measured = _critic_overrides(load_config(file, overrides, "certify").config.critic)
    return load_config(file, [*overrides, *measured, *case_overrides(case)], "certify")


def _critic_overrides(critic: Critic | None) -> list[str]:
    """Return the critic's counterpart of `_MEASURED`, as overrides; empty if the file has no critic."""
    values: dict[str, Any] = {}
    if critic is not None and critic.kl_coefficient > 0:
        values["critic.kl_coefficient"] = 0.0
    if critic is not None and critic.optimizer is not None:
        values["critic.optimizer.eps"] = _MEASURED["optimizer.eps"]
        values["critic.optimizer.clip_grad"] = _MEASURED["optimizer.clip_grad"]
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def resolve_cases(
    loaded: LoadedConfig, overrides: Sequence[str], device: Literal["cpu", "gpu"] | None
) -> tuple[list[Case], list[Case]]:
    """Return (references, cases) of a configuration, with one reference per model that a case names.

    Raises ConfigError for two cases of one name, or a name that begins like the reference's; PlanError if the reference
    itself cannot run.
    """
    certify = loaded.config.certify
    specs = list(certify.cases) or [own_layout(loaded.config.parallel, loaded.config.cluster)]
    pairs = list(_pairs(specs)) if certify.pairs == "all" else []
    specs += pairs
    _check_continued(loaded, specs)
    sources = {spec.continued_from for spec in specs}
    specs = [spec.model_copy(update={"stops": True}) if spec.name in sources else spec for spec in specs]
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"{loaded.where('certify.cases')}: certify.cases: {names.count(name)} cases are named {name!r}; names"
                " must differ"
            )
    if taken := [name for name in names if name.startswith(certify.reference.name)]:
        raise ConfigError(
            f"{loaded.where('certify.cases')}: certify.cases: {taken[0]!r} begins like the reference's name "
            f"{certify.reference.name!r}; give the case another"
        )
    cases = [_resolve(loaded, overrides, spec, device) for spec in specs]
    by_name = {case.name: case for case in cases}
    cases = [_with_source(loaded, overrides, case, by_name) for case in cases]
    made = {pair.name for pair in pairs}
    cases = [
        replace(case, spec=case.spec.model_copy(update={"refused": True}))
        if case.spec.name in made and case.refusal is not None
        else case
        for case in cases
    ]
    references = []
    for model in dict.fromkeys(case.model for case in cases):
        suffix = "" if model == loaded.config.model.path else f" ({Path(model).stem})"
        spec = certify.reference.model_copy(
            update={
                "name": certify.reference.name + suffix,
                # Rows that share prefixes are compared with rows that do not.
                "set": {**certify.reference.set, "model.path": model, "batch.share_prefixes": "off"},
                "stops": any(case.spec.stops and case.model == model for case in cases),
            }
        )
        reference = _resolve(loaded, overrides, spec, device)
        if reference.refusal is not None:
            raise PlanError(f"the reference that all cases are compared with cannot run:\n{reference.refusal}")
        references.append(reference)
    return references, cases


def _pairs(specs: Sequence[CertifyCase]) -> Iterator[CertifyCase]:
    """Yield a case for each case that continues each other one of its model."""
    alone = [spec for spec in specs if not (spec.refused or spec.rounded or spec.continued_from)]
    for source in alone:
        for spec in alone:
            if spec is not source and spec.set.get("model.path") == source.set.get("model.path"):
                yield spec.model_copy(
                    update={"name": f"{source.name} -> {spec.name}", "continued_from": source.name, "exact": ()}
                )


def _check_continued(loaded: LoadedConfig, specs: Sequence[CertifyCase]) -> None:
    """Raise ConfigError for a case that continues none of the others, or one that cannot be continued."""
    by_name = {spec.name: spec for spec in specs}
    for spec in specs:
        if (name := spec.continued_from) is None:
            continue
        source = by_name.get(name)
        if source is None or source is spec or source.refused or source.rounded or source.continued_from:
            valid = [one.name for one in specs if not (one.refused or one.rounded or one.continued_from)]
            raise ConfigError(
                f"{loaded.where('certify.cases')}: certify.cases: {spec.name!r} is continued_from {name!r}; valid: a"
                f" case that runs and begins by itself: {', '.join(one for one in valid if one != spec.name) or 'none'}"
            )


def _with_source(loaded: LoadedConfig, overrides: Sequence[str], case: Case, by_name: Mapping[str, Case]) -> Case:
    """Return the case, refused if it continues a case whose run `gspo-mega train` would not continue in its place."""
    if case.spec.continued_from is None or case.refusal is not None:
        return case
    source = by_name[case.spec.continued_from]
    if source.refusal is not None:
        return replace(case, refusal=f"{source.name}, which it continues, is refused: {source.refusal}")
    if source.model != case.model:
        return replace(case, refusal=f"{source.name}, which it continues, is of another model, {source.model}")
    before, now = (case_config(loaded.path, one.spec, overrides).config for one in (source, case))
    if before.moe.routing_replay == "R3" and before.precision != "fp8" and before.certify.num_steps > 1:
        why = "replays the experts that its first weights chose, so it takes one step; set certify.num_steps to 1"
        return replace(case, refusal=f"{source.name}, which it continues, {why}")
    if problems := continuation_problems(before, now):
        return replace(case, refusal=f"a run of {source.name} cannot be continued: {'; '.join(problems)}")
    return case


def _resolve(
    loaded: LoadedConfig, overrides: Sequence[str], spec: CertifyCase, device: Literal["cpu", "gpu"] | None
) -> Case:
    model, precision = (
        spec.set.get("model.path", loaded.config.model.path),
        spec.set.get("precision", loaded.config.precision),
    )
    try:
        own = case_config(loaded.path, spec, overrides)
        plan_run(own, device)
        require_room(own.config)
        if (
            has_block_scaled_products(own.config.precision, own.config.fp8)
            and own.config.fp8.block_scales != loaded.config.fp8.block_scales
        ):
            raise PlanError(
                f"fp8.block_scales {own.config.fp8.block_scales}: one process runs several cases, and reads the rule"
                f" once when it starts; set it outside the cases, for all of them (now"
                f" {loaded.config.fp8.block_scales})"
            )
    except GspoMegaError as error:
        return Case(spec, model, precision, str(error))
    return Case(spec, model, precision, None)


def starts(cases: Sequence[Case], cases_a_start: int) -> Iterator[list[Case]]:
    """Yield the cases of each start of ranks, in the order in which they run: cases with the same number of ranks
    together, at most `cases_a_start` per start.
    """
    by_ranks: dict[int, list[Case]] = {}
    for case in cases:
        by_ranks.setdefault(case.spec.ranks, []).append(case)
    for together in by_ranks.values():
        for begin in range(0, len(together), cases_a_start):
            yield together[begin : begin + cases_a_start]
