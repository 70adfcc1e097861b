"""The reference vectors, and many further cases of the same schema from an independent 60-digit implementation."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from reference_objective import diagnostics_of, expected_of

from gspo_mega.verify.certify.vectors import replay_file

ROOT = Path(__file__).resolve().parents[2]
VECTORS = Path(__file__).parent / "data" / "gspo_vectors.json"
ALGORITHMS = ("gspo", "gspo_token", "grpo", "gspo_rawseq")
AGGREGATIONS = (
    "seq_mean_token_mean",
    "token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_sum_norm",
    "group_mean_token_mean",
)
KEYS = [
    f"{algorithm}/{aggregation}{suffix}"
    for algorithm in ALGORITHMS
    for aggregation in AGGREGATIONS
    for suffix in ("", "/dual", "__denom_all")
    if not (suffix == "__denom_all" and aggregation == "token_mean")
]


def write(folder, cases, mismatch=()):
    header = json.loads(VECTORS.read_text())["header"]
    path = folder / "vectors.json"
    path.write_text(json.dumps({"header": header, "cases": list(cases), "mismatch_metrics": list(mismatch)}))
    return path


def random_case(seed):
    rng = random.Random(seed)
    rows = rng.randint(1, 7)
    scale = rng.choice([1e-4, 1e-3, 0.01, 0.3, 3.0, 40.0])
    lengths = [rng.choice([1, 2, 3, 9, 40]) for _ in range(rows)]
    old = [[-rng.expovariate(1.0) for _ in range(n)] for n in lengths]
    inputs = {
        "group_ids": [rng.randint(0, 2) for _ in range(rows)],
        "old_logp": old,
        "logp": [[o + rng.gauss(0, scale) for o in row] for row in old],
        "mask": [[int(rng.random() < 0.8) for _ in range(n)] for n in lengths],
        "rewards": [rng.choice([0.0, 1.0, 0.1]) for _ in range(rows)],
        "advantages": None,
        "token_advantages": None,
        "adv_cfg": {"std_ddof": rng.choice([0, 1]), "std_eps": rng.choice([0.0, 1e-6]), "norm_std": rng.random() < 0.8},
        "clip": {"gspo": {"eps_low": 3e-4, "eps_high": 4e-4}, "grpo": {"eps_low": 0.2, "eps_high": 0.27}},
        "norm_const": 16.0,
        "dual_clip_c": rng.choice([1.5, 3.0]),
        "keep": [int(rng.random() < 0.7) for _ in range(rows)] if rng.random() < 0.5 else None,
    }
    if rng.random() < 0.3:
        inputs["token_advantages"] = [[rng.gauss(0, 1) for _ in range(n)] for n in lengths]
    if rng.random() < 0.5:
        inputs["advantages"], inputs["rewards"] = [rng.gauss(0, 1) for _ in range(rows)], None
    return case_of(f"R{seed}", inputs)


def case_of(name, inputs, keys=KEYS):
    return {
        "name": name,
        "inputs": inputs,
        "expected": {key: expected_of(inputs, key) for key in keys},
        "diagnostics": diagnostics_of(inputs),
    }


def first_case(name="A09_paper_clip_both_sides"):
    return next(case for case in json.loads(VECTORS.read_text())["cases"] if case["name"] == name)


def command(path):
    result = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "check_vectors.py"), str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return result.returncode, result.stdout, result.stderr


def test_every_reference_vector_agrees():
    passed, failures = replay_file(VECTORS)
    assert failures == []
    assert passed == 38


@pytest.mark.parametrize("seed", range(12))
def test_random_cases_of_every_algorithm_and_aggregation_agree(tmp_path, seed):
    passed, failures = replay_file(write(tmp_path, [random_case(1000 + seed)]))
    assert failures == [] and passed == 1


@pytest.mark.parametrize("offset", [50.0, -50.0, 150.0, -150.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_ratios_are_neither_clamped_nor_lost(tmp_path, offset, advantage):
    inputs = first_case()["inputs"] | {
        "group_ids": [0],
        "old_logp": [[-1.0, -2.0, -3.0]],
        "logp": [[-1.0 + offset, -2.0 + offset, -3.0 + offset]],
        "mask": [[1, 1, 1]],
        "rewards": None,
        "advantages": [advantage],
        "dual_clip_c": 3.0,
    }
    keys = [key for key in KEYS if not key.startswith("gspo_rawseq") or abs(offset) <= 50]
    _, failures = replay_file(write(tmp_path, [case_of("extreme", inputs, keys)]))
    assert failures == []


def test_a_case_without_any_active_token_is_zero(tmp_path):
    inputs = first_case()["inputs"] | {"mask": [[0, 0, 0]] * 4, "norm_const": 16.0, "dual_clip_c": 3.0}
    keys = [key for key in KEYS if not key.endswith("__denom_all")]
    _, failures = replay_file(write(tmp_path, [case_of("masked", inputs, keys)]))
    assert failures == []


def test_tiles_are_decoded(tmp_path):
    case = first_case("D08_len10000_const")
    case["inputs"]["logp"][0] = {"tile": [-0.9998779296875], "times": 10000}
    assert replay_file(write(tmp_path, [case])) == (1, [])


CORRUPTIONS = [
    ("objective", lambda e: e.update(objective=e["objective"] + 1e-11)),
    ("loss", lambda e: e.update(loss=-e["loss"] + 1e-3)),
    (
        "gradient",
        lambda e: e["grad_objective_wrt_logp"][2].__setitem__(1, e["grad_objective_wrt_logp"][2][1] * (1 + 1e-11)),
    ),
    ("gradient", lambda e: e["grad_objective_wrt_logp"][0].__setitem__(1, 1e-14)),
    ("tokens_clipped_high", lambda e: e.update(tokens_clipped_high=2)),
    ("tokens_clipped_low", lambda e: e.update(tokens_clipped_low=0)),
    ("tokens_dual_clipped", lambda e: e.update(tokens_dual_clipped=1)),
    ("tokens_total", lambda e: e.update(tokens_total=13)),
    ("clip_fraction_tokens", lambda e: e.update(clip_fraction_tokens=0.25)),
    ("seq_flags", lambda e: e.update(seq_flags={"0": "low", "1": "low"})),
]


@pytest.mark.parametrize("what, corrupt", CORRUPTIONS)
def test_a_corrupted_expectation_fails(tmp_path, what, corrupt):
    case = first_case()
    corrupt(case["expected"]["gspo/seq_mean_token_mean"])
    passed, failures = replay_file(write(tmp_path, [case]))
    assert passed == 0 and len(failures) == 1
    assert failures[0].startswith("FAIL A09_paper_clip_both_sides: ") and what in failures[0]


@pytest.mark.parametrize("key", sorted(first_case()["diagnostics"]))
def test_every_diagnostic_is_compared(tmp_path, key):
    case = first_case("D01_variable_lengths")
    value = case["diagnostics"][key]
    case["diagnostics"][key] = (
        [value[0] * 1.001 + 1e-09, *value[1:]] if isinstance(value, list) else value * 1.001 + 1e-9
    )
    _, failures = replay_file(write(tmp_path, [case]))
    assert len(failures) == 1 and key in failures[0]


@pytest.mark.parametrize("key", sorted(json.loads(VECTORS.read_text())["mismatch_metrics"][3]["expected"]))
def test_every_mismatch_metric_is_compared(tmp_path, key):
    case = json.loads(VECTORS.read_text())["mismatch_metrics"][3]
    value = case["expected"][key]
    changed = (
        (lambda v: 1 - v)
        if ("keep" in key and "frac" not in key) or key == "veto_reject"
        else (lambda v: v * 1.0001 + 1e-9)
    )
    case["expected"][key] = [changed(value[0]), *value[1:]] if isinstance(value, list) else changed(value)
    _, failures = replay_file(write(tmp_path, [], [case]))
    assert len(failures) == 1 and key in failures[0]


def test_the_command_reports_and_exits(tmp_path):
    code, out, _ = command(VECTORS)
    assert (code, out.splitlines()[-1]) == (0, "38 passed, 0 failed")
    content = json.loads(VECTORS.read_text())
    content["cases"][3]["expected"]["grpo/token_mean"]["objective"] += 1e-6
    (tmp_path / "wrong.json").write_text(json.dumps(content))
    code, out, _ = command(tmp_path / "wrong.json")
    lines = out.splitlines()
    assert code == 1 and lines[-1] == "37 passed, 1 failed"
    assert len(lines) == 2 and lines[0].startswith("FAIL A04_single_neg_clipped_low: grpo/token_mean objective")


MALFORMED = [
    ("not json", lambda: "{", "is not JSON"),
    ("no header", lambda: json.dumps({"cases": []}), "header"),
    ("empty", lambda: json.dumps({"header": {"version": 1}, "cases": []}), "no case"),
    ("version", lambda: json.dumps({"header": {"version": 2}, "cases": [first_case()]}), "version"),
    ("algorithm", lambda: one(expected={"reinforce/token_mean": {}}), "unknown algorithm 'reinforce'"),
    ("aggregation", lambda: one(expected={"gspo/token_median": {}}), "unknown aggregation 'token_median'"),
    ("missing field", lambda: one(expected={"gspo/token_mean": {"objective": 0}}), "must have exactly"),
    ("nothing expected", lambda: one(expected={}), "nothing to check"),
    ("row lengths", lambda: one(inputs=first_case()["inputs"] | {"logp": [[-1.0]] * 4}), "`logp` has rows of"),
    ("keep length", lambda: one(inputs=first_case()["inputs"] | {"keep": [1]}), "`keep` has 1 entries for 4 rows"),
    ("not a number", lambda: one(inputs=first_case()["inputs"] | {"rewards": [1, 0, "1", 0]}), "rewards[2]"),
    ("unknown diagnostic", lambda: one(diagnostics={"k4": 0.0}), "unknown key 'k4'"),
    ("twice", lambda: json.dumps({"header": {"version": 1}, "cases": [first_case(), first_case()]}), "more than once"),
]


def one(**changes):
    return json.dumps({"header": {"version": 1}, "cases": [first_case() | changes]})


@pytest.mark.parametrize(
    "text, message", [(make, message) for _, make, message in MALFORMED], ids=[name for name, _, _ in MALFORMED]
)
def test_a_malformed_file_is_refused_with_its_reason(tmp_path, capsys, text, message):
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import check_vectors
    finally:
        sys.path.pop(0)
    path = tmp_path / "malformed.json"
    path.write_text(text())
    assert check_vectors.main([str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error and str(path) in error


def test_a_missing_file_is_refused(tmp_path):
    code, _, err = command(tmp_path / "absent.json")
    assert code == 2 and "absent.json: cannot be read" in err
