"""Kills a replayed run at random times, again and again, and compares its end with an uninterrupted run's, to the bit.

    python tests/soak/random_kills.py [--kills 200] [--seed 1] [--folder DIR]

Each kill is SIGKILL to one rank of a run, at a time drawn uniformly from a run's length; the run is then continued by the same
command and killed again, until it comes to its end, is compared, and another begins. Not part of the test suite; prints its
figures, and exits with 1 at the first difference.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "recovery"))

from recovery_support import KILLED, Ranks, leftovers, make_recording, outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--asynchronous", action="store_true", help="write checkpoints beside the training")
    parser.add_argument("--folder", type=Path, help="where the runs are kept; a temporary folder by default")
    args = parser.parse_args()
    draw = random.Random(args.seed)
    overrides = ["checkpoint.asynchronous=true"] if args.asynchronous else []
    with tempfile.TemporaryDirectory() as temporary:
        ranks = Ranks(make_recording(args.folder or Path(temporary)))
        try:
            return soak(ranks, args.kills, draw, overrides)
        finally:
            ranks.close()


def soak(ranks: Ranks, num_kills: int, draw: random.Random, overrides: list[str]) -> int:
    """Make `num_kills` kills. Returns the exit code."""
    assert ranks.train("straight", "", *overrides) == [0], ranks.log("straight")
    started = time.monotonic()
    assert ranks.train("timed", "", *overrides) == [0]
    length_seconds = time.monotonic() - started
    want = outcome(ranks.folder("straight"))
    killed = num_runs = 0
    begun = time.monotonic()
    while killed < num_kills:
        num_runs += 1
        name = f"killed-{num_runs}"
        while True:
            after = draw.uniform(0, length_seconds) if killed < num_kills else None
            (code,) = ranks.train(name, "", *overrides, kill_after=after)
            if code == 0:
                break
            if code != KILLED:
                print(f"{name} ended with {code}\n{ranks.log(name)}")
                return 1
            killed += 1
        found = outcome(ranks.folder(name))
        different = sorted(key for key in found.keys() | want.keys() if found.get(key) != want.get(key))
        if different or leftovers(ranks.folder(name)):
            print(f"{name} differs after its kills: {different} {leftovers(ranks.folder(name))}")
            return 1
        print(f"run {num_runs}: {killed} kills so far, its end is the uninterrupted one's", flush=True)
    print(f"{killed} kills in {num_runs} runs of {length_seconds:.1f} s, {time.monotonic() - begun:.0f} s in all: every end is bit-identical")
    return 0


if __name__ == "__main__":
    sys.exit(main())
