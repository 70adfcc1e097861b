"""`gspo-mega certify`: the matrices hold, and a certificate is refused to a layout with a fault in it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gspo_mega.config import load_config
from gspo_mega.config.precision import megatron_folder
from gspo_mega.verify.certify.program import certify

TP2SP = "{name: TP2+SP, ranks: 2, set: {parallel.tensor: 2}}"
CP2 = "{name: CP2, ranks: 2, set: {parallel.context: 2}}"
UNEVEN = "{name: DP2 uneven, ranks: 2, packing: uneven}"


# Of each shipped matrix; all of them run in tests/soak/certify_matrices.sh, with larger batches. Layouts of one kind of
# ranks are in test_layouts.py, too.
SAMPLE = {
    "dense": [
        "PP2xVPP2",
        "DP2 uneven shards",
        "TP2+SPxPP2",
        "DP2xCP2 distributed",
        "packs shuffled",
        "bf16 TP2+SP",
        "TP3 of 4 heads",
    ],
    "moe": [
        "ETP2 allgather",
        "recompute EP2",
        "PP2xVPP2xEP2",
        "R3 PP2xEP2 with a lighter end",
        "CP2xEP2",
        "EP2 uneven shards",
        "TP2 with EP1 and ETP1",
        "shared prompts TP2+SPxEP2",
    ],
    "episodes": ["CP2", "DP2 uneven shards", "GSPO with advantages of turns", "shared full TP2+SP"],
    "families": ["gpt_oss TP2+SPxEP2", "qwen2 TP2", "gpt_oss shared prompts CP2xEP2"],
    "balanced": ["TP2+SPxEP2"],
    "masks": ["TP2+SP", "CP2", "PP2xVPP2"],
    "shared": ["one rank", "TP2+SPxPP2", "CP2", "recompute full"],
    "shared_balanced": ["TP2+SPxEP2"],
    "distill": ["TP2+SPxEP2"],
    "mla": [
        "TP2+SPxEP2",
        "PP2xVPP2",
        "CP2",
        "all in one pack",
        "shared prompts TP2+SPxEP2",
    ],
}


# Whose sample the command itself runs, with ranks that it starts as it always does; ranks of the others are forked.
BY_THE_COMMAND = "episodes"
# A third of a matrix's tokens, in half as many packs. Two matrices keep theirs: the tolerances of bf16 are for a batch of
# that size, and packs of one sequence are small.
SMALL = ("batch.prompts_per_step=4", "rollout.max_new_tokens=48")
AS_SHIPPED = ("dense", "balanced")


@pytest.mark.parametrize("model", SAMPLE)
def test_a_sample_of_the_matrix_holds(model, tmp_path, forked_workers):
    config = f"configs/certify_{model}.yaml"
    cases = {case.name: case.model_dump() for case in load_config(config, (), "certify").config.certify.cases}
    chosen = json.dumps([cases[name] for name in SAMPLE[model]])
    given = [f"run.dir={tmp_path}", f"certify.cases={chosen}", *(() if model in AS_SHIPPED else SMALL)]
    if model == BY_THE_COMMAND:
        command = [sys.executable, "-m", "gspo_mega", "certify", config, *given]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        code, shown = done.returncode, done.stdout
        assert code == 0, shown + done.stderr
    else:
        code, shown = certified(config, given, forked_workers.command("gspo_mega.train.worker"))
        assert code == 0, shown
    assert f"\n{len(SAMPLE[model])} of {len(SAMPLE[model])} cases hold" in shown
    # The recorded batch is worth comparing on: clipped on both sides, away from edges and ties.
    for above, below, margin in re.findall(r"(\d+) clipped above, (\d+) below.*?nearest clip edge (\S+) away", shown):
        assert int(above) > 0 and int(below) > 0 and float(margin) > 1e-5
    if model == "families":  # some of these have experts, others none
        return
    ties = [float(margin) for margin in re.findall(r"nearest tie (\S+) away", shown)]
    no_experts = model in ("dense", "episodes", "masks", "shared")
    assert ties == [] if no_experts else ties and min(ties) > 1e-4
    # On the edges, put there on purpose, rounding does decide otherwise.
    if model in ("balanced", "shared_balanced", "distill"):
        return
    flips = [(int(clip), int(route)) for clip, route in re.findall(r"0, 0 +(\d+), (\d+) +pass", shown)]
    assert max(clip for clip, _ in flips) > 0 and max(route for _, route in flips) > (-1 if no_experts else 0)


def test_the_gpus_megatron_forks_the_states_of_delta_nets(tmp_path):
    """Its layer takes packs by itself and keeps its states: here it computes the whole rows of the reference."""
    config, name = "configs/certify_delta.yaml", "shared prompts CP2xEP2 recomputed"
    cases = {case.name: case.model_dump() for case in load_config(config, (), "certify").config.certify.cases}
    given = [f"run.dir={tmp_path}", f"certify.cases={json.dumps([cases[name]])}", "certify.num_steps=1", *SMALL]
    path = os.pathsep.join([str(Path(__file__).parents[2]), str(megatron_folder())])
    command = [sys.executable, "-m", "gspo_mega", "certify", config, *given]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env=os.environ | {"PYTHONPATH": path}, check=False
    )
    assert done.returncode == 0 and "\n1 of 1 cases hold" in done.stdout, done.stdout + done.stderr
    logs = "".join(log.read_text() for log in tmp_path.rglob("*.log"))
    assert "Megatron-Core 0.19.2" in logs


# What each layout of the sample asks of a checkpoint: from shards of the optimizer to none of the layers, halves of
# matrices, and back.
CONTINUED = [
    "{name: DP2, ranks: 2}",
    "{name: TP2+SPxPP2 of DP2, ranks: 4, set: {parallel.tensor: 2, parallel.pipeline: 2}, continued_from: DP2}",
    "{name: one rank of DP2, continued_from: DP2}",
]


def test_a_run_that_stops_in_one_layout_goes_on_in_another(tmp_path, forked_workers):
    given = [f"run.dir={tmp_path}", f"certify.cases=[{', '.join(CONTINUED)}]", "certify.pairs=none"]
    code, shown = certified("configs/certify_continue.yaml", given, forked_workers.command("gspo_mega.train.worker"))
    assert code == 0, shown
    assert "\n3 of 3 cases hold" in shown
    for name in ("TP2\\+SPxPP2 of DP2", "one rank of DP2"):
        assert re.search(rf"^{name} +\d +0.0e\+00 .* pass", shown, re.M), shown


@pytest.mark.parametrize("fault", ["second_moments_stay_behind", "the_schedule_begins_again"])
def test_what_a_continued_run_loses_is_caught(tmp_path, forked_workers, fault):
    given = [f"run.dir={tmp_path}", "certify.pairs=none"]
    given.append(
        "certify.cases=[{name: DP2, ranks: 2}, {name: TP2, ranks: 2, set: {parallel.tensor: 2}, continued_from: DP2}]"
    )
    code, shown = certified("configs/certify_continue.yaml", given, forked_workers.command("certify_faults", fault))
    assert code == 1, shown
    assert re.search(r"^DP2 .* pass", shown, re.M) and re.search(r"^TP2 .* FAIL", shown, re.M), shown
    assert re.search(r"^TP2: carried differs by \d+, at most in .*(exp_avg_sq|schedule)", shown, re.M), shown


def certified(config, given, worker_command):
    """What the command ends with, and what it shows."""
    lines: list[str] = []
    code = certify(load_config(config, given, "certify"), given, lines.append, worker_command=worker_command)
    return code, "\n".join(lines)


@pytest.fixture
def run(tmp_path, forked_workers):
    def run(cases, fault, *overrides):
        given = [f"run.dir={tmp_path}", f"certify.cases=[{', '.join(cases)}]", "certify.edges=false", *overrides]
        return certified("configs/certify_dense.yaml", given, forked_workers.command("certify_faults", fault))

    return run


@pytest.mark.parametrize(
    ("fault", "caught_in", "unharmed"),
    [
        ("context_sums_not_shared", CP2, TP2SP),
        ("norms_not_marked_for_sequence_parallelism", TP2SP, CP2),
        ("mean_of_means", UNEVEN, TP2SP),
    ],
)
def test_a_fault_is_caught_in_the_layout_that_has_it(run, fault, caught_in, unharmed):
    code, shown = run([caught_in, unharmed], fault)
    assert code == 1, shown
    verdicts = dict(re.findall(r"^(\S+(?: \S+)*?) +2 .*?  (pass|FAIL)\b", shown, re.M))
    name = [re.search(r"name: ([^,]+),", case).group(1) for case in (caught_in, unharmed)]
    assert verdicts == {name[0]: "FAIL", name[1]: "pass"}, shown
    assert "1 of 2 cases hold" in shown


@pytest.mark.parametrize("fault", ["positions_from_zero_in_each_node", "responses_see_their_siblings"])
def test_a_fault_in_shared_prefixes_is_caught(run, fault):
    rows, shared = "{name: rows, ranks: 1}", "{name: shared, ranks: 1, set: {batch.share_prefixes: prompts}}"
    code, shown = run([rows, shared], fault)
    assert code == 1, shown
    assert re.search(r"^rows .*pass", shown, re.M) and re.search(r"^shared .*FAIL", shown, re.M), shown


def test_sets_of_other_tokens_are_caught(run):
    """With context parallelism a rank holds two parts of each sequence, and its tokens' sets must be those tokens'."""
    code, shown = run([CP2, TP2SP], "masks_of_the_first_tokens", "rollout.top_k=20")
    assert code == 1, shown
    assert re.search(r"^CP2 .*FAIL", shown, re.M) and re.search(r"^TP2\+SP .*pass", shown, re.M), shown


def test_what_rounding_does_is_measured_and_hides_no_fault(run):
    rounding = "{name: rounding, rounded: true}"
    code, shown = run([TP2SP, rounding, CP2], "norms_not_marked_for_sequence_parallelism")
    assert code == 1, shown
    row = re.search(r"^rounding +1 (.*?)  measured", shown, re.M).group(1).split()
    found = dict(zip(("log_prob", "loss", "gradient", "weights"), map(float, row), strict=False))
    assert 1e-8 < found["log_prob"] < 1e-5 and 1e-8 < found["gradient"] < 1e-4 and 1e-8 < found["weights"] < 1e-2
    assert re.search(r"^TP2\+SP .*FAIL", shown, re.M) and re.search(r"^CP2 .*pass", shown, re.M), shown


def test_a_fault_in_the_critic_is_caught_by_its_own_numbers(run):
    """And without one, in the other layout, values, value gradients and weights after three value steps hold."""
    code, shown = run([CP2, TP2SP], "value_gradient_summed_over_tensor_ranks", "algorithm=ppo")
    assert code == 1, shown
    assert re.search(r"^case .* values +v\. grad +v\. weight ", shown, re.M), shown
    rows = {name: numbers.split() for name, numbers in re.findall(r"^(CP2|TP2\+SP) +2 (.*?)  0, 0", shown, re.M)}
    steps = (1e-5, 3e-5, 0.0)  # norm, steps and state
    limits = (1e-5, 1e-5, 1e-5, 1e-4, *steps, 1e-5, 1e-5, 1e-4, *steps)
    within = {
        name: [float(number) <= limit for number, limit in zip(row, limits, strict=True)] for name, row in rows.items()
    }
    # The policy is as before, and values are; what follows from the gradient is not. All ranks of a policy step alike.
    assert within == {"CP2": [True] * 13, "TP2+SP": [True] * 8 + [False] * 4 + [True]}, shown
    assert "TP2+SP: value_gradient differs by" in shown


def test_a_case_that_fails_is_named_and_the_others_go_on(run):
    broken = "{name: broken, ranks: 2, set: {parallel.context: 2, batch.log_prob_chunk_tokens: 31}}"
    code, shown = run([TP2SP, broken, CP2], "second_rank_dies_in_one_case")
    assert code == 1
    assert re.search(r"^broken .*FAILED", shown, re.M) and "a rank's own trouble" in shown
    assert re.search(r"^TP2\+SP .*pass", shown, re.M) and re.search(r"^CP2 .*pass", shown, re.M), shown
    assert "2 of 3 cases hold" in shown
