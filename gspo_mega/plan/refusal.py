"""Whether a plan whose figures are known can run: a GPU's memory, and the GPUs of the nodes.

`gspo-mega plan`, the start of a run and the submission of a job show the report first, and then ask here. Everything
that is impossible whatever the figures say is refused before (`layout_checks.py`, `estimate.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from gspo_mega.base.errors import FitError
from gspo_mega.config.schema import Config
from gspo_mega.plan.estimate import Estimate, only_evaluates
from gspo_mega.plan.memory import GIB
from gspo_mega.plan.resolve import Plan
from gspo_mega.plan.server_places import check_shared_nodes

# A part below this share of the peak is not worth a change.
_WORTH = 0.1


def refuse_what_does_not_fit(plan: Plan, figures: Estimate, where: Callable[[str], str]) -> None:
    """Raises, with the key's place, PlanError where ranks and servers need more GPUs than their nodes have; FitError
    where the estimate of a rank's peak is more than its GPU has and `plan.over_memory` is refuse. On a machine without
    GPUs neither matters, and the peak does not where nothing is trained.
    """
    config, memory, limit = plan.config, figures.memory, figures.limit
    if plan.device == "cpu":
        return
    check_shared_nodes(config, where)
    if figures.fits is not False or config.plan.over_memory == "warn" or only_evaluates(config):
        return
    if memory is None or limit is None:
        return
    key = "cluster.gpu_memory_gib" if config.cluster.gpu_memory_gib is not None else "cluster.gpu"
    largest = sorted(memory.parts, key=lambda part: -memory.parts[part])
    parts = [part for part in largest if memory.parts[part] >= _WORTH * memory.peak]
    changes = list(dict.fromkeys(change for part in parts for change in _changes(config, part)))
    shown = ", ".join(f"{part} {memory.parts[part] / GIB:.1f} GiB" for part in parts)
    raise FitError(
        f"{where(key)}: {key}: by estimate a rank of stage {memory.stage} needs {memory.peak / GIB:.1f} GiB in"
        f" {memory.peak_phase} and its GPU has {limit / GIB:.1f} GiB: over by {(memory.peak - limit) / GIB:.1f} GiB"
        f" ({shown}). What would help: {'; '.join(changes)}. No GPU has checked these formulas yet: `plan.over_memory:"
        " warn` starts the run all the same"
    )


def _changes(config: Config, part: str) -> list[str]:
    """What makes a part of the memory smaller and is not done yet, as keys."""
    more_ranks = "more parallelism (parallel.tensor, parallel.pipeline, parallel.expert) on more ranks"
    optimizer = config.optimizer
    if part in ("activations", "fragmentation", "pipeline buffers"):
        full = config.recompute.granularity == "full"
        return [
            *([] if full else ["`recompute.granularity: full`"]),
            f"a smaller batch.micro_batch_tokens than {config.batch.micro_batch_tokens}",
            "a larger parallel.context or parallel.tensor",
        ]
    if part == "logits":
        return [f"a smaller batch.log_prob_chunk_tokens than {config.batch.log_prob_chunk_tokens}"]
    if part in ("main weights", "moments"):
        return [
            *([] if optimizer.distributed else ["`optimizer.distributed: true`"]),
            *(["a smaller optimizer.moments_dtype"] if optimizer.moments_dtype == "fp32" else []),
            f"a larger optimizer.cpu_offload_fraction than {optimizer.cpu_offload_fraction:g}",
            more_ranks,
        ]
    if part == "reference":
        return ["no reference (kl.coefficient: 0)", more_ranks]
    if part == "publish":
        return [f"a smaller publish.bucket_bytes than {config.publish.bucket_bytes}, or `publish.method: disk`"]
    return [more_ranks, "GPUs with more memory"] if part != "reserve" else []
