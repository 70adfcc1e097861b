"""`gspo-mega mismatch` of a small model: where the mismatch of trainer and server comes from, cause by cause.

    python tests/gpu/budget_run.py [--device cpu --shape tiny]

It needs two GPUs, one for a rank and one for a server. The command's own verdict is the bound: it ends with 1 where
something is found that is no precision effect.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from gpu_engine import arguments, finish
from gpu_model import CONFIG, devices, gspo_mega, placement, prepared, server_python


def main() -> None:
    args = arguments(__doc__, shape="small")
    count = devices(args.device)
    if count == 1:
        print("skipped: gspo-mega mismatch needs two GPUs, one for a rank and one for a server; here is one")
        raise SystemExit(77)
    server_python()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = [*prepared(folder, args.shape, experts=False), *placement(count), f"run.dir={folder}"]
        words += ["budget.num_prompts=8", "budget.samples_per_prompt=4"]
        if args.device == "cpu":
            words += ["budget.causes=[server batch, trainer packing]"]
        numbers = folder / "budget.json"
        gspo_mega(folder, "budget", str(CONFIG), *words, "--quick", "--json", str(numbers))
        found = json.loads(numbers.read_text())
    (parts,) = found["parts"].values()
    rows = [
        dict(cause=cause, k3=part["row"]["k3"]["value"], most=part["row"]["maximum"], share=part["share"]["value"])
        for cause, part in parts.items()
    ]
    total = found["total"]
    rows.append(dict(cause="all together", k3=total["k3"]["value"], most=total["maximum"], share=1.0))
    finish("budget", rows, [])


if __name__ == "__main__":
    main()
