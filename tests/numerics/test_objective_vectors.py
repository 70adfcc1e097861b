"""The hand-derived vectors of the objectives that others published, replayed by `tools/check_vectors.py`'s reader."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from gspo_mega.verify.certify.vector_file import ALGORITHMS
from gspo_mega.verify.certify.vectors import replay_file

VECTORS = Path(__file__).parent / "data" / "objective_vectors.json"
LOG = math.log


def case(name, rows, advantages, key, gradient, terms, high=0, low=0, flags=None, token_advantages=None):
    """`rows`: per response its tokens (pi, pi_old, mu). `terms`: J's, already weighted. One response has no tokens of
    the policy at all: its entries are garbage, and count nowhere.
    """
    columns = [[[LOG(token[k]) for token in row] for row in rows] for k in range(3)]
    objective, total = math.fsum(terms), sum(len(row) for row in rows)
    return {
        "name": name,
        "tags": ["hand"],
        "inputs": {
            "group_ids": [0] * len(rows) + [1],
            "logp": [*columns[0], [-7.0]],
            "old_logp": [*columns[1], [-3.0]],
            "rollout_logp": [*columns[2], [-1.0]],
            "mask": [*[[1] * len(row) for row in rows], [0]],
            "rewards": None,
            "advantages": None if token_advantages else [*advantages, 5.0],
            "token_advantages": [*token_advantages, [5.0]] if token_advantages else None,
            "adv_cfg": {"std_ddof": 0, "std_eps": 0.0, "norm_std": True},
            "clip": {name: {"eps_low": 3e-4, "eps_high": 4e-4} for name in ("gspo", "grpo")},
            "norm_const": 4.0,
            "dual_clip_c": None,
            "keep": None,
        },
        "expected": {
            key: {
                "objective": objective,
                "loss": -objective,
                "grad_objective_wrt_logp": [*gradient, [0.0]],
                "tokens_clipped_high": high,
                "tokens_clipped_low": low,
                "tokens_dual_clipped": 0,
                "tokens_total": total,
                "clip_fraction_tokens": (high + low) / total,
                "seq_flags": flags or {},
            }
        },
    }


def vectors():
    """Two responses, of one token with A = 2 and of two with A = -1, in each objective."""
    rows = [[(0.4, 0.2, 0.2)], [(0.1, 0.4, 0.05), (0.5, 0.5, 0.5)]]  # r = 2; 1/4 and 1; pi / mu = 2; 2 and 1
    a = (2.0, -1.0)
    logs = [[LOG(0.4)], [LOG(0.1), LOG(0.5)]]
    p, q = 1 / (1 + math.exp(-1.0)), 1 / (1 + math.exp(1.05 * 0.75))
    up, down = math.exp(0.4), math.exp(-0.2)  # exp of d cut at .4, and of the mean of d cut at -.4 and of 0
    phi_up, phi_down = (
        4 * math.exp(-3.0),
        math.exp(2 * 0.75) / 64,
    )  # W = 2: 2^2 e^(3 (1 - 2)); 1/4: 4^-3 e^(2 (1 - 1/4))
    return [
        case(
            "cispo",
            rows,
            a,
            "cispo/token_mean",
            [[4 / 3], [-0.25 / 3, -1 / 3]],
            [4 * logs[0][0] / 3, -0.25 * logs[1][0] / 3, -logs[1][1] / 3],
        ),
        case(
            "sapo",
            rows,
            a,
            "sapo/seq_mean_token_mean",
            [[2 * 2 * 4 * p * (1 - p) / 2], [-0.25 * 4 * q * (1 - q) / 4, -1 / 4]],
            [2 * 4 * p / 2, -4 / 1.05 * q / 4, -2 / 1.05 / 4],
        ),
        case(
            "dppo",
            rows,
            a,
            "dppo/seq_mean_token_sum_norm",
            [[0.0], [0.0, -1 / 8]],
            [-1 / 8],
            high=1,
            low=1,
            flags={"0": "high", "1": "low"},
        ),
        case(
            "dppo_kl",
            # D(.2, .4) = .0915 and D(.4, .1) = .311 are above .05; D(.1, .15) = .0123 is not, though r = 1.5.
            [[(0.4, 0.2, 0.2), (0.15, 0.1, 0.1)], [(0.1, 0.4, 0.05), (0.5, 0.5, 0.5)]],
            a,
            "dppo_kl/seq_mean_token_sum_norm",
            [[0.0, 2 * 1.5 / 8], [0.0, -1 / 8]],
            [2 * 1.5 / 8, -1 / 8],
            high=1,
            low=1,
            flags={"0": "high", "1": "low"},
        ),
        case(
            "minirl",
            rows,
            a,
            "minirl/seq_mean_token_sum",
            [[0.0], [0.0, -1 / 2]],
            [-logs[1][1] / 2],
            high=1,
            low=1,
            flags={"0": "high", "1": "low"},
        ),
        case(
            "minirl_inside",
            [
                [(0.22, 0.2, 0.1)],
                [(0.3, 0.2, 0.02)],
            ],  # r = 1.1 with pi / mu = 2.2; r = 1.5, which A < 0 does not clip, 15
            a,
            "minirl/seq_mean_token_sum",
            [[2.2], [-2.5]],
            [2.2 * LOG(0.22), -2.5 * LOG(0.3)],
        ),
        case(
            "vespo",
            rows,
            a,
            "vespo/token_mean",
            [[2 * phi_up / 3], [-phi_down / 3, -phi_down / 3]],
            [2 * phi_up * logs[0][0] / 3, -phi_down * (logs[1][0] + logs[1][1]) / 3],
        ),
        case(
            "gmpo",
            rows,
            a,
            "gmpo/seq_mean_token_mean",
            [[0.0], [0.0, -down / 4]],
            [2 * up / 2, -down / 2],
            high=1,
            low=1,
            flags={"0": "high", "1": "low"},
        ),
        case(
            "luspo",
            [[(0.4 * math.exp(1e-3), 0.4, 0.4)], [(0.4 * math.exp(-1e-4), 0.4, 0.4)] * 2],
            a,
            "luspo/seq_mean_token_sum",
            [[0.0], [-math.exp(-1e-4) / 2] * 2],
            [2 * 1.0004 / 2, -2 * math.exp(-1e-4) / 2],
            high=1,
            flags={"0": "high"},
        ),
        case(
            "dapo",
            rows,
            a,
            "dapo/token_mean",
            [[0.0], [0.0, -1 / 3]],
            [2 * 1.0004 / 3, -(1 - 3e-4) / 3, -1 / 3],
            high=1,
            low=1,
            flags={"0": "high", "1": "low"},
        ),
        case(
            "clip_cov",  # the term before tokens are chosen; tests/unit/algorithm/test_covariance.py has the choice
            rows,
            a,
            "clip_cov/token_mean",
            [[0.0], [0.0, -1 / 3]],
            [2 * 1.0004 / 3, -(1 - 3e-4) / 3, -1 / 3],
            high=1,
            low=1,
            flags={"0": "high", "1": "low"},
        ),
        case(
            "dr_grpo",
            rows,
            a,
            "dr_grpo/seq_mean_token_sum_norm",
            [[0.0], [0.0, -1 / 8]],
            [2 * 1.0004 / 8, -(1 - 3e-4) / 8, -1 / 8],
            high=1,
            low=1,
            flags={"0": "high", "1": "low"},
        ),
        case(
            "ppo",
            rows,
            a,
            "ppo/token_mean",
            [[0.0], [0.25 * 0.5 / 3, -1 / 3]],  # r = 1/4 with A = 1/2: the minimum is the term that is not clipped
            [2 * 1.0004 / 3, 0.25 * 0.5 / 3, -1 / 3],
            high=1,
            flags={"0": "high"},
            token_advantages=[[2.0], [0.5, -1.0]],
        ),
    ]


def test_the_file_has_the_vectors_derived_here():
    content = json.loads(VECTORS.read_text())
    assert content["cases"] == vectors()
    assert {key.partition("/")[0] for one in content["cases"] for key in one["expected"]} == set(ALGORITHMS) - {
        "gspo",
        "gspo_token",
        "grpo",
        "gspo_rawseq",
    }


def test_every_vector_agrees():
    assert replay_file(VECTORS) == (len(vectors()), [])


@pytest.mark.parametrize("place", range(len(vectors())))
def test_a_corrupted_vector_fails(tmp_path, place):
    content = json.loads(VECTORS.read_text())
    (expected,) = content["cases"][place]["expected"].values()
    expected["grad_objective_wrt_logp"][1][-1] *= 1 + 1e-10
    path = tmp_path / "vectors.json"
    path.write_text(json.dumps(content))
    passed, failures = replay_file(path)
    assert passed == len(vectors()) - 1 and len(failures) == 1 and "gradient[1]" in failures[0]
