"""Measure a rank's memory in each phase of a step, and compare it with what `gspo-mega trace` predicted.

    python tests/gpu/traced.py [--cases dense,experts]
    python tests/gpu/traced.py --device cpu --predict 1        makes predicted.json anew, by the trace

One rank of each case goes through old pass, training, optimizer, publish and save twice, as the trace does, with packs
full of sequences of the longest length and random weights. `predicted.json` has the trace's figures. A measured peak may be
above its prediction by what the plan's reserve stands for (workspaces and libraries), and differs by fragmentation, so
a part fails beyond 5 % and 1 GiB together.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from gpu_engine import CLIP_HIGH, CLIP_LOW, ROOT, Rows, arguments, engine, finish, one_rank

from gspo_mega.algorithm.objective import ObjectiveSettings
from gspo_mega.checkpoint import load, save
from gspo_mega.checkpoint.gather import PolicyTensors
from gspo_mega.checkpoint.quantized import published_form
from gspo_mega.config import load_config
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.plan import plan_run
from gspo_mega.verify.trace.packs import full_pack
from gspo_mega.verify.trace.request import with_layers

PREDICTED = Path(__file__).with_name("predicted.json")
_ONE_RANK = (
    "cluster.num_nodes=1",
    "cluster.num_rollout_nodes=0",
    "cluster.ranks_per_node=1",
    "rollout.max_staleness=0",
    "parallel={}",
    "publish.method=disk",
    "server={num_servers: 1, tensor: 1}",
)
# Configuration, layers (None: all), and overrides. Each fits on a GPU of 80 GB; `tiny` is for a CPU.
CASES: dict[str, tuple[str, int | None, tuple[str, ...]]] = {
    "dense": ("qwen3_06b_1gpu", None, ("cluster.colocated=false", "cluster.gpus_per_node=2")),
    "shared": (
        "qwen3_06b_1gpu",
        None,
        ("cluster.colocated=false", "cluster.gpus_per_node=2", "batch.share_prefixes=prompts"),
    ),
    "experts": ("qwen3_30b_a3b_4nodes", 4, _ONE_RANK),
    "fp8": ("qwen3_30b_a3b_4nodes_fp8", 4, _ONE_RANK),
    "tiny": (
        "qwen3_06b_1gpu",
        2,
        ("cluster.gpu=null", "cluster.colocated=false", "precision=fp32", "batch.micro_batch_tokens=4096"),
    ),
    "adapters": ("qwen3_30b_a3b_4nodes", 4, (*_ONE_RANK, "lora={rank: 16, alpha: 32}")),
}
TINY = dict(
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=512,
    eos_token_id=2,
)
PHASES = ("old pass", "training", "optimizer", "publish", "save")
TOLERANCE, SLACK_BYTES = 0.05, 2**30
PACKS = 2


def predict(case: str) -> dict[str, dict[str, int]]:
    """Bytes before, at the peak and after each phase of the second step, by the trace."""
    name, layers, overrides = CASES[case]
    command = [sys.executable, "-m", "gspo_mega", "trace", str(ROOT / f"configs/{name}.yaml"), *overrides]
    command += ["--json", "--rank", "0", "--packs", str(PACKS), *(["--layers", str(layers)] if layers else [])]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    phases = {one["name"].removeprefix("second "): one for one in json.loads(done.stdout)["ranks"][0]["phases"]}
    return {
        name: {key: phases[name][key] for key in ("before", "peak", "after")}
        | {"waits": sum(phases[name]["waits"].values())}
        for name in PHASES
        if name in phases
    }


@contextmanager
def phase(rows: Rows, case: str, name: str, predicted: dict[str, dict[str, int]]) -> Iterator[None]:
    """Measure what happens inside, and add a row."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    yield
    row: dict[str, Any] = dict(case=case, phase=name)
    if on_gpu:
        torch.cuda.synchronize()
        row |= dict(peak_gib=torch.cuda.max_memory_allocated() / 2**30, after_gib=torch.cuda.memory_allocated() / 2**30)
    row |= dict(seconds=time.perf_counter() - began)
    if (wanted := predicted.get(name)) is not None:
        row |= dict(predicted_peak_gib=wanted["peak"] / 2**30, predicted_after_gib=wanted["after"] / 2**30)
    rows.append(row)


def measure(case: str, rows: Rows, predicted: dict[str, dict[str, int]]) -> None:
    name, layers, overrides = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_config(str(ROOT / f"configs/{name}.yaml"), overrides)
        model = ROOT / loaded.config.model.path
        shape = with_layers(model, layers, Path(folder)) if layers else model
        if case == "tiny":
            shape.write_text(json.dumps(json.loads(shape.read_text()) | TINY))
        plan = plan_run(loaded, "gpu" if torch.cuda.is_available() else "cpu", shape)
        config, spec = plan.config, plan.spec
        packs = [full_pack(config, plan.layout, spec) for _ in range(PACKS)]
        with engine(spec, config, same_weights=False) as policy:
            steps(policy, packs, lambda what: phase(rows, case, what, predicted))
            with phase(rows, case, "save", predicted):
                state = load.sharded_state(policy, loading=False)
                copies = save.copied(policy, state, Path(folder), config.checkpoint)
            del state, copies


def steps(policy: PolicyEngine, packs: list, measured: Any) -> None:
    """Two steps, of which the second is measured, since the optimizer has its moments after the first; and a publish."""
    settings = ObjectiveSettings(clip_low=CLIP_LOW, clip_high=CLIP_HIGH)
    for number in range(2):
        inside = measured if number else lambda _: phase(Rows(), "", "", {})
        with inside("old pass"):
            old = policy.old_pass(packs)
            policy.correct([old])
        with inside("training"):
            report = policy.policy_gradients(packs, settings, 1.0, old, None)
        with inside("optimizer"):
            policy._apply(report)
        del old, report
    form = published_form(policy.config)
    with measured("publish"):
        for _, tensor in form.owned(PolicyTensors(policy.spec, policy.groups, policy.chunks)):
            del tensor


def judge(rows: Rows) -> list[str]:
    """What differs from its prediction by more than it may."""
    failures = []
    for row in rows:
        for key in ("peak_gib", "after_gib"):
            found, wanted = row.get(key), row.get(f"predicted_{key}")
            if found is not None and wanted is not None:
                room = TOLERANCE * wanted + SLACK_BYTES / 2**30
                if abs(found - wanted) > room:
                    failures.append(f"{row['case']} {row['phase']}: {key} {found:.2f}, predicted {wanted:.2f}")
    return failures


def main() -> None:
    args = arguments(__doc__, cases="dense,shared,experts,fp8,adapters", predict=0)
    if args.predict:
        found = {case: predict(case) for case in args.cases.split(",")}
        PREDICTED.write_text(json.dumps(found, indent=1) + "\n")
        return
    predicted, rows = json.loads(PREDICTED.read_text()), Rows()
    with one_rank():
        for case in args.cases.split(","):
            measure(case, rows, predicted.get(case, {}))
    finish("traced", rows, judge(rows))


if __name__ == "__main__":
    main()
