"""Does the plan refuse exactly what dies? Generated configurations of up to four ranks, each planned and each trained
one step.

    .venv/bin/python tests/soak/plan_verdicts.py --count 300 --seed 1

Prints every disagreement and a line of figures; exit code 1 where there is a disagreement. With seed 5, in 453 s on two
busy
cores: 159 planned and trained, 141 refused (113 died in the engine, 6 trained wrong, 22 deliberate), 0 disagreements.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from itertools import islice
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("distributed", "support")]


def main() -> int:
    from verdict_cases import generate
    from verdicts import Engine, figures, verdicts

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--start", type=int, default=0, help="first case to try, to go on with a soak that was cut off")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    found, started = [], time.monotonic()
    engine = Engine()
    with tempfile.TemporaryDirectory() as folder:
        try:
            cases = islice(generate(arguments.count, arguments.seed), arguments.start, None)
            for verdict in verdicts(cases, Path(folder), engine):
                found.append(verdict)
                if not verdict.agree:
                    print(f"DISAGREE {verdict.described}", flush=True)
                if len(found) % 10 == 0:
                    print(f"{time.monotonic() - started:5.0f} s  {figures(found)}", flush=True)
        finally:
            engine.close()
    print(
        "changes: "
        + ", ".join(f"{name} {count}" for name, count in sorted(Counter(v.case.change for v in found).items()))
    )
    print(f"seed {arguments.seed}, {time.monotonic() - started:.0f} s: {figures(found)}")
    return int(any(not verdict.agree for verdict in found))


if __name__ == "__main__":
    raise SystemExit(main())
