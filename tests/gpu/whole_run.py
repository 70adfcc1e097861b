"""`gspo-mega train` with one rank and one server of ours, whose routes the trainer replays (R3): tokens/s, GB/s of the
publishes, and the mismatch of the engines.

    python tests/gpu/whole_run.py [--device cpu --shape tiny --steps 2]

With two GPUs rank and server have one each and weights go through NCCL; with one they take turns (cluster.colocated)
and weights go through the disk. Bound: the mean difference of a token's log-prob between trainer and server, in nats.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from gpu_engine import arguments, finish
from gpu_model import CONFIG, devices, gspo_mega, placement, prepared, server_python

from gspo_mega.base.run_folder import RunFolder
from gspo_mega.metrics.writer import read_metrics

MOST_MISMATCH = 0.05


def main() -> None:
    args = arguments(__doc__, shape="small", steps=4)
    server_python()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        where = placement(devices(args.device))
        words = [*prepared(folder, args.shape, experts=True), *where, f"run.dir={folder}"]
        words += [f"train.num_steps={args.steps}", "moe.routing_replay=R3", "rollout.return_routed_experts=true"]
        if args.device == "cpu":
            words += ["batch.prompts_per_step=8", "batch.group_size=4"]
        output = gspo_mega(folder, "train", str(CONFIG), *words)
        lines = read_metrics(RunFolder(folder / "run").metrics_file)
    method = next(word.split("=")[1] for word in where if word.startswith("publish.method"))
    rows = [
        dict(
            step=line["step"],
            publish=method,
            tokens_per_second=line["speed/tokens_per_second"],
            generated_per_second=line["speed/generated_tokens_per_second"],
            publish_seconds=line["time/publish_seconds"],
            publish_gb_per_second=line["publish/num_bytes"] / line["time/publish_seconds"] / 1e9,
            mismatch_mean=line["mismatch/abs_log_ratio_mean"],
            mismatch_max=line["mismatch/abs_log_ratio_max"],
        )
        for line in lines
    ]
    failures = [] if "routing replay R3" in output else ["the run does not say that it replays routes (R3)"]
    failures += [
        f"step {row['step']}: a token's log-prob is {row['mismatch_mean']:.3g} nats apart on average; at most"
        f" {MOST_MISMATCH}"
        for row in rows
        if not row["mismatch_mean"] <= MOST_MISMATCH
    ]
    finish("run_r3", rows, failures)


if __name__ == "__main__":
    main()
