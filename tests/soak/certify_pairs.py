"""Runs that stop in one layout and go on in another, for every pair of the layouts named here: `gspo-mega certify` with
`certify.pairs=all`. On two idle cores about a quarter of an hour.

    .venv/bin/python tests/soak/certify_pairs.py [PART ...]

Ends with 0 when every pair holds, and says how many there were. tests/distributed/test_certify.py runs a sample.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from gspo_mega.config import load_config

# From a part's name to (file, names of its cases or none for all of them, overrides). A name `A -> B` is only that pair;
# of other names every case continues every other one.
PARTS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "models": ("continue", (), ()),
    # Each kind of transition once: data, tensor, pipeline and context ranks, more of them and fewer.
    "bf16": (
        "continue",
        ("one rank -> DP2", "DP2 -> TP2+SP", "TP2+SP -> TP2xPP2", "TP2xPP2 -> CP2", "CP2 -> one rank"),
        ("precision=bf16",),
    ),
    "bf16 sharded": (
        "continue",
        ("DP2 -> TP2+SP", "TP2+SP -> DP2"),
        ("precision=bf16", "optimizer.distributed=false"),
    ),
    "bf16 gradients": (
        "continue",
        ("DP2 -> TP2xPP2", "TP2xPP2 -> DP2"),
        ("precision=bf16", "optimizer.gradients_dtype=bf16"),
    ),
    "bias": ("mla", ("EP2", "TP2+SPxEP2", "CP2xEP2 on DP2"), ("optimizer.distributed=true",)),
    "adapters": (
        "lora",
        ("EP2", "TP2+SPxEP2", "PP2xTP2+SPxEP2"),
        ("optimizer.distributed=true",),
    ),
    "adapters of experts": ("lora", ("EP2 -> CP2", "CP2 -> EP2"), ("optimizer.distributed=true",)),
    "critic": (
        "ppo",
        ("TP2+SPxEP2", "CP2", "PP2xTP2+SPxEP2", "TP2+SP dense", "TP2 dense"),
        ("optimizer={lr: 3e-4, weight_decay: 0.1, schedule: linear, min_lr: 1e-5}",),
    ),
    # Replayed experts belong to the weights that sampled: one step before the stop and one after it.
    "replay": (
        "moe",
        ("R3 EP2", "R3 PP2xEP2 with a lighter end", "R3 PP2xVPP2xEP2"),
        ("certify.num_steps=1", "optimizer.distributed=true"),
    ),
    # In bf16 routers decide by rounding, so experts are replayed there, too.
    "bf16 replay": (
        "moe",
        ("bf16 -> bf16 EP2", "bf16 EP2 -> bf16", "bf16 EP2 -> R3 PP2xEP2 with a lighter end"),
        ("precision=bf16", "certify.num_steps=1", "optimizer.distributed=true"),
    ),
    "bf16 replay sharded": (
        "moe",
        ("bf16 -> bf16 EP2", "bf16 EP2 -> bf16"),
        # The reference in bf16, too: against one in fp32, one step's change of a norm's weights is less than bf16 resolves.
        ("precision=bf16", "certify.num_steps=1"),
    ),
    "sharded": (  # without the distributed optimizer, whose state has a form of its own
        "dense",
        ("TP2+SP", "PP2xVPP2", "CP2xTP2+SP", "DP2", "PP4"),
        (),
    ),
    "fp8 blocks": ("fp8", ("TP2+SPxEP2", "EP2", "dense PP2", "dense TP2+SP", "dense CP2"), ()),
    "fp8 delayed": (  # whose scales go along
        "fp8",
        (
            *("dense PP2 -> dense CP2", "dense PP2 -> dense TP2+SP", "dense TP2+SP -> dense PP2"),
            *("PP2 -> PP2xVPP2", "PP2 -> EP2", "EP2 -> PP2"),
        ),
        ("fp8.recipe=delayed",),
    ),
}


def main(chosen: list[str]) -> int:
    failed, rows, held = [], 0, 0
    with tempfile.TemporaryDirectory() as folder:
        for part in chosen or PARTS:
            file, names, overrides = PARTS[part]
            config = f"configs/certify_{file}.yaml"
            pairs = "none" if any(" -> " in name for name in names) else "all"
            given = [f"run.dir={folder}", f"certify.pairs={pairs}", "certify.edges=false", *overrides]
            if names:
                cases = {one.name: one.model_dump() for one in load_config(config, (), "certify").config.certify.cases}
                given.append(f"certify.cases={json.dumps([*_chosen(cases, names)])}")
            command = [sys.executable, "-m", "gspo_mega", "certify", config, *given]
            done = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
            print(f"== {part}\n{done.stdout}", flush=True)
            shown = re.findall(r"^.+ -> .+ +\d+ .*  (pass|FAIL|FAILED|refused|REFUSED)\b", done.stdout, re.M)
            rows, held = rows + len(shown), held + shown.count("pass")
            if done.returncode != 0:
                failed.append(part)
    print(f"{held} of {rows} pairs hold" + (f"; not all of {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


def _chosen(cases: dict[str, dict[str, Any]], names: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield the cases that `names` names, each after the one that it continues."""
    for name in dict.fromkeys(one for pair in names for one in (pair.partition(" -> ")[0], pair)):
        source, arrow, case = name.rpartition(" -> ")
        continued = {"name": name, "continued_from": source} if arrow else {}
        yield cases[case] | {"exact": []} | continued


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
