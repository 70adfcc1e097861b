"""Publishing one version after the other to one server of ours: by disk, and with two GPUs through NCCL; seconds of each
phase and GB/s.

    python tests/gpu/publish_once.py [--device cpu --shape tiny]

The rank has the first GPU and the server the last: on one GPU both share it, and NCCL, which refuses that, is left out.
On a CPU the group is gloo's. Every publish is verified by the publisher itself; its failure is the bound.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from gpu_engine import ROOT, Rows, arguments, finish, one_rank
from gpu_model import devices, prepared, server_keys, server_python

sys.path.insert(0, str(ROOT / "tests/integration"))
from publish_jobs import Trainer
from servers import Serve, run_config

from gspo_mega.engine.process_groups import destroy_groups

START_SECONDS = 300.0
DEADLINE_SECONDS = 120.0


def measure(config: Path, attempt: Path, method: str, versions: range, weights: Path) -> list[dict]:
    publish = {"method": method, "deadline_seconds": DEADLINE_SECONDS}
    trainer = Trainer(str(config), str(attempt), {"expert_tensor": 1}, publish, str(weights))
    rows = Rows()
    try:
        for version in versions:
            trainer.change("weight")
            result = trainer.publisher.publish(version, trainer.servers(None))
            if result.failed:
                raise SystemExit(f"{method}: version {version} failed: {result.failed}")
            row = dict(method=method, version=version, gigabytes=result.num_bytes / 1e9, seconds=result.seconds)
            row["gb_per_second"] = result.num_bytes / result.seconds / 1e9
            rows.append(row | dict(result.phase_seconds))  # `Rows` prints it
    finally:
        trainer.publisher.close()
        if trainer.pool is not None:
            trainer.pool.close()
        destroy_groups()
    return rows


def main() -> None:
    args = arguments(__doc__, shape="large", times=3)
    count, python = devices(args.device), server_python()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = dict(word.split("=", 1) for word in prepared(folder, args.shape, experts=False))
        server = dict(memory_fraction=0.3, start_deadline_seconds=START_SECONDS, **server_keys())
        precision = "bf16" if count else "fp32"
        config = run_config(folder, Path(words["model.path"]), server=server, precision=precision)
        own = {"CUDA_VISIBLE_DEVICES": str(count - 1)} if count else {}
        serve = Serve(config, folder / "run", python=python, **own)
        try:
            serve.wait_for("ready", seconds=START_SECONDS)
            print("the server is ready", flush=True)
            rows = []
            methods = ["disk", *(["distributed"] if count != 1 else [])]
            with one_rank():
                for number, method in enumerate(methods):
                    versions = range(1 + number * args.times, 1 + (number + 1) * args.times)
                    rows += measure(config, serve.attempt.path, method, versions, folder / f"weights-{method}")
        finally:
            serve.stop()
        if count == 1:
            print("left out: NCCL: it needs two GPUs, one for the rank and one for the server; here is one")
    finish("publish", rows, [])


if __name__ == "__main__":
    main()
