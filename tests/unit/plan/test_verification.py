"""How a publish is verified: what `auto` comes to, that the plan says so, and that the impossible is refused before a
start.
"""

import json
import re

import pytest

from gspo_mega.base.errors import PlanError
from gspo_mega.config.derived import resolve_verification
from gspo_mega.plan import estimate, plan_run, render_report
from gspo_mega.plan.report import plan_json

TWO = ["server.tensor=2"]


@pytest.mark.parametrize(
    ("overrides", "on_gpu", "becomes"),
    [
        ([], False, "tensors"),
        ([], True, "replicas"),
        (TWO, False, "replicas"),
        (TWO, True, "replicas"),
        (["publish.verify=replicas"], False, "replicas"),
        (["publish.verify=tensors"], False, "tensors"),
    ],
)
def test_auto_is_the_strictest_that_works(load, overrides, on_gpu, becomes):
    config = load(*overrides).config
    assert resolve_verification(config.publish.verify, config.server.tensor, on_gpu) == becomes


@pytest.mark.parametrize(
    ("overrides", "device", "line"),
    [
        ([], "cpu", r"weights verified by tensors \(publish.verify: auto\): every server tensor's checksum"),
        ([], "gpu", r"weights verified by replicas \(publish.verify: auto\): all servers agree"),
        ([], None, r"weights verified by tensors without GPUs, by replicas with them \(publish.verify: auto\)"),
        (["cluster.gpu=H100"], None, r"weights verified by replicas \(publish.verify: auto\)"),
        (["cluster.gpu=H100"], "cpu", r"weights verified by tensors"),
        (TWO, None, r"weights verified by replicas \(publish.verify: auto\)"),
        (["publish.verify=replicas"], None, r"weights verified by replicas: all"),
    ],
)
def test_the_plan_says_how(load, shape, overrides, device, line):
    plan = plan_run(load(*overrides), device, shape("dense"))
    assert re.search(line, render_report(plan))
    assert json.loads(plan_json(plan, estimate(plan)))["servers"]["weights"] == plan.verification


@pytest.mark.parametrize(
    ("overrides", "device"), [([], "gpu"), (["cluster.gpu=H100"], None), (["cluster.gpu=H100"], "gpu")]
)
def test_foretold_checksums_are_refused_where_there_are_gpus(load, shape, overrides, device):
    with pytest.raises(PlanError) as caught:
        plan_run(load("publish.verify=tensors", *overrides), device, shape("dense"))
    said = str(caught.value)
    assert "publish.verify: tensors: servers on GPUs report other checksums" in said and said.endswith(
        "nearest valid: auto, or replicas"
    )
    assert plan_run(load("publish.verify=tensors", *overrides), "cpu", shape("dense"))
