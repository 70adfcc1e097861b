"""Trace a configuration: one process for each kind of rank, and the comparison of all of them with the plan."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gspo_mega.base.errors import ConfigError, ModelError
from gspo_mega.config import load_config
from gspo_mega.config.precision import megatron_folder, wheel_folder
from gspo_mega.plan import Plan, plan_run
from gspo_mega.plan.memory import EXPERT_IMBALANCE
from gspo_mega.verify.trace.compare import Difference, compare, compare_flops, kinds_of_rank, num_packs
from gspo_mega.verify.trace.request import TraceRequest, with_layers

_SETS_UP = "launch/setup.sh --trace"


@dataclass(frozen=True)
class Traced:
    """`ranks`: what each traced rank did, as `rank.py` writes it. `differences`: their figures beside the plan's."""

    plan: Plan
    ranks: list[dict[str, Any]]
    differences: list[Difference]


def trace_run(
    config: str,
    overrides: Sequence[str],
    *,
    model: str | None = None,
    rank: int | None = None,
    layers: int | None = None,
    packs: int | None = None,
    imbalance: float = EXPERT_IMBALANCE,
) -> Traced:
    """Trace one rank of each kind, or only `rank`. `model`: a folder or config.json in place of `model.path`. `layers`:
    a model of so many layers. `packs`: of the mini-batch. `imbalance`: tokens of a rank's experts, in means.

    Raises ConfigError for a rank or number that the configuration does not have, and ModelError without the GPU's
    Megatron-Core, and by the operation's name for what cannot be traced.
    """
    if not (megatron_folder() / "megatron" / "core").is_dir():
        raise ModelError(f"trace: the GPU's Megatron-Core is not in {megatron_folder()}; {_SETS_UP} installs it")
    with tempfile.TemporaryDirectory(prefix="gspo_mega_trace_") as name:
        folder = Path(name)
        loaded = load_config(config, overrides, "train")
        if layers is not None:
            model = str(with_layers(Path(model or loaded.config.model.path), layers, folder))
        plan = plan_run(loaded, "gpu", model)
        ranks = kinds_of_rank(plan.layout) if rank is None else [rank]
        if ranks[-1] >= plan.layout.world_size:
            raise ConfigError(f"--rank {rank}: the configuration has ranks 0 to {plan.layout.world_size - 1}")
        packs = packs or num_packs(plan.layout)
        if packs % plan.layout.micro_batches_multiple:
            raise ConfigError(f"--packs {packs}: interleaved stages need a multiple of {plan.layout.pipeline}")
        asked = TraceRequest(
            config=config,
            overrides=list(overrides),
            model=model,
            rank=0,
            packs=packs,
            imbalance=imbalance,
            megatron=str(megatron_folder()),
            transformer_engine=str(wheel_folder()),
            out="",
        )
        traced = [_trace(asked, one, folder) for one in ranks]
        differences = []
        for result in traced:
            own = compare(plan, result)
            if len(traced) > 1:
                own = [replace(one, what=f"rank {result['rank']}: {one.what}") for one in own]
            differences += own
        flops = compare_flops(plan, traced)
    return Traced(plan, traced, differences + ([] if flops is None else [flops]))


def _trace(asked: TraceRequest, rank: int, folder: Path) -> dict[str, Any]:
    """Trace one rank in a process of its own, which has the fake device."""
    out, request = folder / f"rank_{rank}.json", folder / f"request_{rank}.json"
    request.write_text(json.dumps(asdict(replace(asked, rank=rank, out=str(out)))), encoding="utf-8")
    command = [sys.executable, "-W", "ignore", "-m", "gspo_mega.verify.trace.entry", str(request)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not out.exists():
        last = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"
        raise ModelError(last if last.startswith("trace: ") else f"trace: rank {rank}: {last}")
    return json.loads(out.read_text(encoding="utf-8"))
