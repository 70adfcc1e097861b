"""Adapters and the critic in layouts that the distributed tier leaves out, each against one rank by that tier's own rule.

python tests/soak/role_layouts.py [--only WORD]        some minutes on two cores; exit code 1 with a failure
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent / "distributed"), str(HERE.parent / "support")]
warnings.filterwarnings("ignore")

import test_critic_layouts as critic
import test_lora_layouts as lora
from layout_models import make_folder
from rank_pool import RankPools

ADAPTERS = {
    "dense TP4": dict(world=4, tensor=4, sequence=False),  # two ranks a key-value head
    "dense DP2-distributed": dict(world=2, distributed=True),
    "dense CP2": dict(world=2, context=2),
    "moe TP2+SP-EP2": dict(world=2, tensor=2, expert=2),
    "moe EP2-distributed": dict(world=2, expert=2, distributed=True),
}
CRITIC = {
    "dense TP2": dict(world=2, tensor=2, sequence=False),
    "dense TP2+SP": dict(world=2, tensor=2),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD", help="cases whose title contains it")
    only, failures, pools = parser.parse_args().only, 0, RankPools()
    with tempfile.TemporaryDirectory() as name:
        folders = {kind: make_folder(Path(name) / kind, moe=kind == "moe", layers=2) for kind in ("dense", "moe")}
        tied = make_folder(Path(name) / "tied", moe=False, layers=2, tied=True)
        cases = [(f"adapters {title}", lora, folders[title.split()[0]], way) for title, way in ADAPTERS.items()]
        cases += [(f"critic {title}", critic, tied, way) for title, way in CRITIC.items()]
        wanted: dict[Path, dict] = {}
        try:
            for title, test, folder, layout in cases:
                if only not in title:
                    continue
                started, said = time.monotonic(), "equals one rank"
                try:
                    if folder not in wanted:
                        wanted[folder] = test.run(pools, folder, dict(world=1))
                    parts = (test.run(pools, folder, layout), wanted[folder])
                    lora.check(*parts, folder) if test is lora else critic.check(*parts)
                except (AssertionError, TimeoutError) as error:
                    failures, said = failures + 1, f"FAILED {str(error).strip().splitlines()[-1][:200]}"
                print(f"{title:32} {said}  {time.monotonic() - started:.1f} s", flush=True)
        finally:
            pools.close()
    print(f"{failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
