"""From log-probs at every point to the numbers of a budget, without a server: every row has its share, bound and move."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from run_configs import make_config

from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.verify.mismatch.causes import Facts
from gspo_mega.verify.mismatch.findings import find
from gspo_mega.verify.mismatch.fixed_tokens import FixedTokens, Sampled
from gspo_mega.verify.mismatch.walks import make_plan

WIDE = "configs/models/quickstart_wide.json"
SIGNS = (-1, 1, 0, 0)
FIXED = FixedTokens(tuple(Sampled(i // 2, (1, 2, 3), (4, 5, 6, 7), (-1.0,) * 4, SIGNS[i % 4]) for i in range(12)))
UNSIGNED = FixedTokens(tuple(replace(sampled, sign=0) for sampled in FIXED.sequences))


def found(model=WIDE, both_orders=True, fixed=FIXED, **sections):
    facts = Facts(make_config(**sections), read_model_spec(model), "cpu")
    plan = make_plan(facts, both_orders)
    rng = np.random.default_rng(0)
    scored = {point: rng.normal(-1, 1e-3, 12 * 6) for point in plan.points}
    return find(facts, plan, fixed, scored, np.ones(12 * 6))


def test_every_row_has_a_share_with_its_error_a_bound_and_a_move():
    findings = found(precision="bf16", server=dict(kv_cache="fp8"))
    causes = set(findings.parts["forward"])
    assert set(findings.bounds) == causes == set(findings.moved)
    for parts in findings.parts.values():
        assert sum(part.share.value for part in parts.values()) == pytest.approx(1.0)
        assert all(part.share.error > 0 for part in parts.values())
    first, other = findings.parts["forward"], findings.parts["backward"]
    for name, moved in findings.moved.items():
        assert moved.value == pytest.approx(other[name].share.value - first[name].share.value, abs=1e-12)
    assert findings.bounds["server KV cache"] > 5 * findings.bounds["trainer precision"]
    assert found(both_orders=False).moved == {}


def test_responses_are_counted_by_the_sign_of_their_advantage():
    findings = found()
    assert (findings.num_negative, findings.num_positive, findings.unsigned) == (3, 3, None)


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        (dict(), "no prompt has two responses with different rewards"),
        (dict(budget=dict(samples_per_prompt=1)), "budget.samples_per_prompt is 1"),
        (dict(algorithm="ppo", critic=dict()), "a critic"),
        (dict(algorithm="gspo_token", advantage=dict(turns="return_to_go")), "advantages of their own"),
    ],
)
def test_without_a_sign_there_is_a_reason(sections, why):
    findings = found(fixed=UNSIGNED, **sections)
    assert (findings.num_negative, findings.num_positive) == (0, 0) and why in findings.unsigned


def test_blocks_are_compared_where_both_sides_have_them():
    fp8 = dict(precision="fp8", fp8=dict(recipe="blockwise"), server=dict(quantization="fp8_block"))
    assert found().blocks is None
    assert found(precision="fp8", server=dict(quantization="fp8")).blocks is None
    assert found(**fp8).blocks == {}
    # Megatron interleaves q, k and v of heads that are no whole blocks.
    differing = found("configs/models/quickstart_dense.json", **fp8).blocks
    assert differing and all("proj" in name for name in differing)
