"""Two steps of `gspo-mega train` for every family: `python tests/soak/families_trained.py [FAMILY ...] [key=value ...]`.

For example `families_trained.py minimax_m2 rollout.return_routed_experts=true moe.routing_replay=R3`. With `--wide` every
matrix consists of whole blocks, and the mismatch may be FP8's:
`families_trained.py qwen3_5 --wide precision=fp8 server.quantization=fp8_block`.

Each from a folder as published ones are: a tokenizer of the family's usual class, a chat template, both configurations.
One rank and a real SGLang server; nothing prepares the processes but the product. A line for each family; half a minute
each on two idle cores. Exit code 1 where one failed.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "integration"), str(ROOT / "tests" / "support")]

from family_runs import BLOCKS, FAMILIES, train

SHOWN = (
    "reward/mean",
    "optimizer/grad_norm",
    "mismatch/k3",
    "mismatch/abs_log_ratio_max",
    "rollout/truncated_fraction",
)


def main() -> int:
    failed = 0
    overrides = [argument for argument in sys.argv[1:] if "=" in argument]
    sizes = BLOCKS | dict(k3=0.1) if "--wide" in sys.argv else {}
    for variant in [argument for argument in sys.argv[1:] if "=" not in argument and argument != "--wide"] or FAMILIES:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="family") as folder:
            try:
                last = train(Path(folder), variant, *overrides, **sizes)[-1]
                found = " ".join(f"{key} {last[key]:.3g}" for key in SHOWN if key in last)
            except AssertionError as error:
                failed += 1
                found = f"FAILED {error}"
        print(f"{variant:12} {FAMILIES[variant][0]:24} {time.monotonic() - began:4.0f} s  {found}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
