"""The cases of `gspo-mega certify`: each `set` of the configuration becomes a configuration of its own, or a reason why
it is refused. Starts nothing and imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gspo_mega.base.errors import ConfigError, GspoMegaError, PlanError
from gspo_mega.config import LoadedConfig, load_config
from gspo_mega.config.derived import has_block_scaled_products
from gspo_mega.config.schema import CertifyCase, Config
from gspo_mega.plan import plan_run
from gspo_mega.verify.certify.trees import require_room

# Of optimizer steps: see `steps.py`.
STEP_KINDS = ("norm", "steps", "state")
# Beside the kinds of `compare_runs.Tolerance`; each tolerates what that one of the policy does.
CRITIC_KINDS = {
    "values": "log_prob",
    "value_gradient": "gradient",
    "value_weights": "weights",
    **{f"value_{kind}": kind for kind in STEP_KINDS},
}
# The parameter groups in which a norm is taken apart.
PARAMETER_KINDS = (
    *("embeddings", "matrices", "norms", "biases", "sinks", "routers", "experts", "biases of experts", "adapters"),
)


def parameter_kind(name: str) -> str:
    """One of PARAMETER_KINDS, from Megatron's or a checkpoint's name of a parameter."""
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


# In the attempt's folder: a line for each case that is done.
RESULTS_FILE = "cases.jsonl"
# Every case starts from one rank of everything; the file's own sizes are one more case.
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
# One mini-batch, whose old log-probs are the recorded ones. Adam divides by |gradient| + eps: with an eps near the
# rounding of a gradient, weights would compare the rounding of elements that have no gradient to speak of.
_MEASURED = {
    "batch.num_mini_batches": 1,
    "old_log_probs": "rollout",
    "optimizer.eps": 1e-6,
    # Below the norm of most gradients, so that the norm acts in every step.
    "optimizer.clip_grad": 0.1,
    "kl.coefficient": 0.0,
    "moe.routing_replay": "none",
}


@dataclass(frozen=True)
class Case:
    """One row of the table. `refusal`: why it cannot run, None when it can."""

    spec: CertifyCase
    model: str
    precision: str
    refusal: str | None

    @property
    def name(self) -> str:
        return self.spec.name


def folder_name(model: str) -> str:
    """Name of the folder for a model's data: readable, and different for each path."""
    return f"{Path(model).stem}-{hashlib.sha256(model.encode()).hexdigest()[:8]}"


def own_layout(config: Config) -> CertifyCase:
    """The configuration's own layout as a case."""
    values = {f"parallel.{key}": value for key, value in config.parallel.model_dump().items()}
    world = config.cluster.num_nodes * config.cluster.ranks_per_node
    return CertifyCase(name=f"the file's layout on {world} ranks", ranks=world, set=values)


def case_overrides(case: CertifyCase) -> list[str]:
    """`key=value` overrides that turn the file into this case's configuration. A JSON value is a YAML value."""
    values: dict[str, Any] = {**_ONE_RANK, **_MEASURED, "cluster.ranks_per_node": case.ranks, **case.set}
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def case_config(file: str | Path, case: CertifyCase, overrides: Sequence[str] = ()) -> LoadedConfig:
    """The configuration of `case`. Raises ConfigError naming the case's own keys as overrides."""
    measured = _critic_overrides(load_config(file, overrides, "certify").config)
    return load_config(file, [*overrides, *measured, *case_overrides(case)], "certify")


def _critic_overrides(config: Config) -> list[str]:
    """What `_MEASURED` is for a critic, where the file has one."""
    values: dict[str, Any] = {}
    if config.critic is not None and config.critic.kl_coefficient > 0:
        values["critic.kl_coefficient"] = 0.0
    if config.critic is not None and config.critic.optimizer is not None:
        values["critic.optimizer.eps"] = _MEASURED["optimizer.eps"]
        values["critic.optimizer.clip_grad"] = _MEASURED["optimizer.clip_grad"]
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def resolve_cases(
    loaded: LoadedConfig, overrides: Sequence[str], device: Literal["cpu", "gpu"] | None
) -> tuple[list[Case], list[Case]]:
    """(references, cases) of a configuration: one reference for each model that a case names.

    Raises ConfigError for two cases of one name, and PlanError when the reference itself cannot run.
    """
    certify = loaded.config.certify
    specs = list(certify.cases) or [own_layout(loaded.config)]
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
    references = []
    for model in dict.fromkeys(case.model for case in cases):
        suffix = "" if model == loaded.config.model.path else f" ({Path(model).stem})"
        spec = certify.reference.model_copy(
            update={"name": certify.reference.name + suffix, "set": {**certify.reference.set, "model.path": model}}
        )
        reference = _resolve(loaded, overrides, spec, device)
        if reference.refusal is not None:
            raise PlanError(f"the reference that all cases are compared with cannot run:\n{reference.refusal}")
        references.append(reference)
    return references, cases


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
        if has_block_scaled_products(own.config) and own.config.fp8.block_scales != loaded.config.fp8.block_scales:
            raise PlanError(
                f"fp8.block_scales {own.config.fp8.block_scales}: one process runs several cases, and reads the rule"
                f" once when it starts; set it outside the cases, for all of them (now"
                f" {loaded.config.fp8.block_scales})"
            )
    except GspoMegaError as error:
        return Case(spec, model, precision, str(error))
    return Case(spec, model, precision, None)


def starts(cases: Sequence[Case], cases_a_start: int) -> Iterator[list[Case]]:
    """Cases in the order they run: those with the same number of ranks together, at most `cases_a_start` per start
    of ranks.
    """
    by_ranks: dict[int, list[Case]] = {}
    for case in cases:
        by_ranks.setdefault(case.spec.ranks, []).append(case)
    for together in by_ranks.values():
        for begin in range(0, len(together), cases_a_start):
            yield together[begin : begin + cases_a_start]
