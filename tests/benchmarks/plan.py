"""How long `gspo-mega plan` takes for each shipped configuration of a real model: seconds of CPU, import included.

.venv/bin/python tests/benchmarks/plan.py
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path


def main() -> None:
    for path in sorted(Path("configs").glob("*node*.yaml")):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "gspo_mega", "plan", str(path)], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(f"{path.name:<36} {after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime:5.2f} s")


if __name__ == "__main__":
    main()
