"""Every fault of tests/distributed/step_faults.py, each in a case of `gspo-mega certify`; a sample is in the tier.

    .venv/bin/python tests/soak/every_step_fault.py

Prints what was shown of each fault that was not found, and ends with 1 where there is one.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "distributed")]

import step_faults
from test_step_faults import missed

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        lost = missed("configs/certify_families.yaml", step_faults.FAULTS, Path(folder))
        lost |= missed("configs/certify_mla.yaml", step_faults.BIAS_FAULTS, Path(folder))
        lost |= missed("configs/certify_balanced.yaml", step_faults.BALANCED_FAULTS, Path(folder), packing="one_each")
    for name, shown in lost.items():
        print(f"NOT FOUND {name}\n{shown}")
    total = sum(map(len, (step_faults.FAULTS, step_faults.BIAS_FAULTS, step_faults.BALANCED_FAULTS)))
    print(f"{total - len(lost)} of {total} faults are found")
    sys.exit(1 if lost else 0)
