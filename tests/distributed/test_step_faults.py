"""A certificate is refused to each fault in what an optimizer step reads, by the numbers that the fault is in."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import step_faults

from gspo_mega.config import load_config
from gspo_mega.verify.certify.program import certify

FAULTS = Path(step_faults.__file__)
# One of each way to be wrong; tests/soak/every_step_fault.py runs all of them.
SAMPLE = (
    *("sinks without a mark", "biases of experts counted by the tensor group", "norms marked as cut"),
    *("clipped by another norm", "one gradient scaled after clipping", "a rate of one group", "a copy that drifts"),
)


def missed(
    config: str,
    faults: dict[str, step_faults.Fault],
    run_dir: Path,
    worker_command: Sequence[str] = (sys.executable, str(FAULTS)),
    overrides: Sequence[str] = (),
    **more,
) -> dict[str, str]:
    """Of each fault that was not found as it says: what was shown of it. Every fault runs in a case of its own."""
    given = [f"run.dir={run_dir}", f"certify.cases={json.dumps([*step_faults.cases(faults, **more)])}", *overrides]
    shown: list[str] = []
    loaded = load_config(config, given, "certify")
    code = certify(loaded, given, shown.append, worker_command=worker_command)
    text = "\n".join(shown)
    assert code == (1 if faults else 0), text
    found = {name: set(re.findall(rf"^{re.escape(name)}: (\w+) differs by", text, re.M)) for name in faults}
    return {
        name: "\n".join(re.findall(rf"^{re.escape(name)}.*", text, re.M))
        for name, fault in faults.items()
        if not set(fault.seen) <= found[name]
    }


def test_faults_of_optimizer_steps_are_found(tmp_path, forked_workers):
    chosen = {name: step_faults.FAULTS[name] for name in SAMPLE}
    command = forked_workers.command("step_faults")
    assert missed("configs/certify_families.yaml", chosen, tmp_path, command) == {}


def test_a_padding_mask_doubles_the_gradient_of_router_losses_and_is_found(tmp_path, forked_workers):
    name = "a padding mask under tensor ranks"
    chosen = {name: step_faults.BALANCED_FAULTS[name]}
    command = forked_workers.command("step_faults")
    few = ("batch.prompts_per_step=2", "certify.num_steps=1")  # it is in the gradient of each pack
    assert missed("configs/certify_balanced.yaml", chosen, tmp_path, command, few, packing="one_each") == {}


@pytest.mark.parametrize("faults", [step_faults.FAULTS, step_faults.BIAS_FAULTS, step_faults.BALANCED_FAULTS])
def test_every_fault_says_where_it_shows(faults):
    kinds = {"gradient", "norm", "steps", "state", "weights"}
    assert all(fault.seen and set(fault.seen) <= kinds for fault in faults.values())
