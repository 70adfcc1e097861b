"""torch.compile keeps compiling a function whose arguments vary, and says so when it gives up.

Each test has a process of its own: elsewhere on a CPU, torch.compile is switched off.
"""

import os
import subprocess

import pytest
from forked_workers import ForkedWorkers

CASES = {"ours": ["ours"], "torch's default": ["torch"], "ours, at most 8": ["ours", "8"]}


@pytest.fixture(scope="module")
def ended() -> dict[str, tuple[int, str, str]]:
    """Exit code, output and errors of each case; they run side by side."""
    switched_on = {"TORCHDYNAMO_DISABLE": "0"}  # for the forking process, and for each fork, which has its command's
    forks = ForkedWorkers(("gspo_mega.engine", "torch._dynamo", "compiled_variants"), **switched_on)
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | switched_on)
    try:
        running = {
            name: subprocess.Popen(forks.command("compiled_variants", *words), **pipes) for name, words in CASES.items()
        }
        outputs = {name: process.communicate(timeout=300) for name, process in running.items()}
        return {name: (running[name].returncode, *output) for name, output in outputs.items()}
    finally:
        forks.close()


def test_a_function_of_many_kinds_of_arguments_stays_compiled(ended):
    code, output, errors = ended["ours"]
    assert code == 0 and output.splitlines()[-1] == "uncompiled calls: 0", output + errors


def test_torch_alone_would_run_it_uncompiled_without_an_error(ended):
    code, output, errors = ended["torch's default"]
    assert code == 0, errors
    assert int(output.split()[-1]) > 0


def test_more_kinds_than_the_limit_are_an_error(ended):
    code, _, errors = ended["ours, at most 8"]
    assert code != 0 and "FailOnRecompileLimitHit" in errors
