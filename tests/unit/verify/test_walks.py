"""The walks of a budget: what is changed in which order, and that the parts are exactly d in every order."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_configs import make_config

from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.verify.mismatch.causes import (
    ALTERNATIVES,
    CAUSES,
    CHUNK,
    ENGINES,
    PACKING,
    R3,
    SAMPLING,
    Cause,
    Facts,
    Nothing,
    formats,
    left_between,
    units_of,
)
from gspo_mega.verify.mismatch.faults import UNITS
from gspo_mega.verify.mismatch.walks import Point, contributions, make_plan

DENSE, MOE = "configs/models/quickstart_dense.json", "configs/models/quickstart_moe.json"
DELTA = "configs/models/certify_qwen3_next.json"


def facts(model=DENSE, device="cpu", **sections):
    return Facts(make_config(**sections), read_model_spec(model), device)


def order(plan, name):
    return list(dict.fromkeys(link.cause for link in plan.walks[name]))


def test_in_fp32_little_is_left_to_change():
    plan = make_plan(facts())
    assert order(plan, "forward") == [
        SAMPLING,
        "prefix cache",
        "server batch",
        "server attention",
        ENGINES,
        "trainer packing",
    ]
    assert order(plan, "backward") == [
        SAMPLING,
        "prefix cache",
        "server attention",
        "server batch",
        ENGINES,
        "trainer packing",
    ]
    assert all(why.is_zero for why in plan.nothing.values())
    assert plan.nothing["trainer layout"].why == "one rank"
    assert plan.alternatives == {}


def test_every_cause_of_a_quantized_run_is_changed():
    run = facts(
        MOE,
        "gpu",
        precision="fp8",
        engine=dict(transformer_engine=True),
        server=dict(quantization="fp8", kv_cache="fp8", attention_backend="fa3"),
        rollout=dict(return_routed_experts=True, temperature=0.7),
        moe=dict(routing_replay="R3"),
        cluster=dict(ranks_per_node=2),
        parallel=dict(expert=2),
    )
    plan = make_plan(run)
    of_delta_nets = {"server states", "delta rule by chunks"}
    assert set(plan.nothing) == {"trainer LM head", *of_delta_nets} and not plan.nothing["trainer LM head"].is_zero
    assert all(plan.nothing[name].is_zero for name in of_delta_nets)
    forward, backward = order(plan, "forward"), order(plan, "backward")
    assert set(forward) == set(backward) == {cause.name for cause in CAUSES} - set(plan.nothing) | {ENGINES}
    # fp32 first, then bf16, then fp8, whatever the order; the LM head before the rest of its server.
    for names in (forward, backward):
        assert names.index("trainer precision") < names.index("trainer layers") < names.index("trainer FP8")
        assert names.index("server LM head") < names.index("server precision")
    free = ("server batch", "server KV cache", "server weights")
    assert [n for n in backward if n in free] == [n for n in forward if n in free][::-1]


def test_states_of_delta_nets_are_a_cause_where_servers_round_them():
    run = facts(
        DELTA, server=dict(options=dict(mamba_ssm_dtype="bfloat16", enable_fp32_lm_head=False)), precision="bf16"
    )
    plan = make_plan(run)
    for links in plan.walks.values():
        link = next(link for link in links if link.cause == "server states")
        key = "server.options.mamba_ssm_dtype"
        assert link.end.keys[key] == "float32" and key not in link.start.keys
        # The key is set after the options in which it lies, which the LM head's cause sets as a whole.
        assert all(sorted(one.end.keys).index("server.options") < sorted(one.end.keys).index(key)
                   for one in links if {"server.options", key} <= one.end.keys.keys())  # fmt: skip
    # What a token by token rule does is in the first row; nothing else contains it, and the engines do not.
    assert "64 tokens" in plan.nothing["delta rule by chunks"].why
    assert left_between({SAMPLING}, {"delta rule by chunks": plan.nothing["delta rule by chunks"]}) == []
    assert make_plan(facts(DELTA)).nothing["server states"].is_zero


def test_rounded_states_are_rounding_in_the_row_of_sampling():
    """A sampled token's state is rounded, that of a token scored again is not: 3e-5 of k3 beside fp32 products."""

    def units(**options):
        run = facts(DELTA, server=dict(dtype="fp32", options=options), precision="fp32")
        return units_of(run, {SAMPLING: "server"}, {}, UNITS)

    assert units()[SAMPLING] == units(mamba_ssm_dtype="float32")[SAMPLING] == UNITS["fp32"]
    assert units(mamba_ssm_dtype="bfloat16")[SAMPLING] == UNITS["bf16"]


def test_other_chunks_of_the_delta_rule_are_evaluated_where_no_kernel_fixes_them():
    plan = make_plan(facts(DELTA))
    chunks = {name: point.values.get(CHUNK) for name, point in plan.alternatives.items() if name != R3}
    assert chunks == {"chunks of 16": 16, "chunks of 1": 1}
    # The same ranks as the run's, with the same configuration.
    assert all(plan.alternatives[name].keys == plan.trained.keys for name in chunks)
    assert set(make_plan(facts(DELTA, "gpu")).alternatives) == {R3}


def test_a_models_own_type_of_states_counts(tmp_path):
    shape = json.loads(Path(DELTA).read_text()) | {"mamba_ssm_dtype": "bfloat16"}
    (tmp_path / "shape.json").write_text(json.dumps(shape))
    assert "server states" in order(make_plan(facts(tmp_path / "shape.json")), "forward")
    own = dict(options=dict(mamba_ssm_dtype="float32"))
    assert "server states" not in order(make_plan(facts(tmp_path / "shape.json", server=own)), "forward")


def test_precisions_of_the_trainer_come_one_after_the_other():
    plan = make_plan(facts(precision="fp8"))
    for links in plan.walks.values():
        by_cause = {link.cause: link for link in links}
        chain = [by_cause[name] for name in ("trainer precision", "trainer layers", "trainer FP8")]
        states = [(link.start.keys["precision"], link.start.keys["engine.transformer_engine"]) for link in chain]
        assert states == [("fp32", None), ("bf16", False), ("bf16", True)]
        assert "precision" not in chain[-1].end.keys and "engine.transformer_engine" not in chain[-1].end.keys


def test_a_walk_begins_with_the_samples_and_ends_with_the_run():
    plan = make_plan(facts(precision="bf16", rollout=dict(temperature=0.7)))
    for links in plan.walks.values():
        assert links[0].start == plan.sampled and links[-1].end == plan.trained
        assert all(one.end == other.start for one, other in itertools.pairwise(links))
        assert [link.cause for link in links].count(SAMPLING) == 2
        # SGLang scores at temperature 1 only, so everything between is compared at 1.
        bridge = next(link for link in links if link.cause == ENGINES)
        assert bridge.end.keys["rollout.temperature"] == 1.0


def test_the_other_order_needs_more_starts_of_servers_and_quick_does_not():
    run = facts(precision="bf16", server=dict(kv_cache="fp8"))

    def starts(plan):
        return len({json.dumps(p.keys, sort_keys=True) for p in plan.points if p.side == "server"})

    # As in the run; attention; + KV cache; + LM head; + precision. Backward: + KV cache, LM head, precision before it.
    assert starts(make_plan(run, both_orders=False)) == 5
    assert starts(make_plan(run)) > 5


def test_a_chosen_cause_is_changed_alone_and_the_others_are_named():
    run = facts(precision="bf16", budget=dict(causes=("trainer precision",)))
    plan = make_plan(run)
    assert order(plan, "forward") == [SAMPLING, "prefix cache", ENGINES, "trainer precision"]
    assert plan.nothing["server attention"] == Nothing("left out by budget.causes", False)
    assert plan.nothing["server weights"].is_zero


def test_a_refused_cause_is_named_with_its_reason():
    plan = make_plan(facts(), refused={"server attention": "no such backend"})
    assert plan.nothing["server attention"] == Nothing("no such backend", False)
    assert "server attention" not in order(plan, "forward")


def test_which_cause_a_point_is_for():
    run = facts(MOE, precision="bf16")
    plan = make_plan(run)
    attention = next(link.end for link in plan.walks["forward"] if link.cause == "server attention")
    assert plan.origin([attention]) == "server attention"
    assert plan.origin([plan.trained]) is None
    assert plan.origin([plan.alternatives[R3]]) == R3


def test_r3_is_an_alternative_or_a_cause():
    plan = make_plan(facts(MOE))
    assert plan.alternatives[R3].keys == {"moe.routing_replay": "R3"}
    with_r3 = facts(MOE, moe=dict(routing_replay="R3"), rollout=dict(return_routed_experts=True))
    plan = make_plan(with_r3)
    assert "routing replay" in order(plan, "forward")
    assert plan.alternatives[R3].keys == {"moe.routing_replay": "none"}
    assert ALTERNATIVES[0].name == R3


def test_a_point_that_is_no_configuration_key_shares_a_start():
    point = Point.of("trainer", {PACKING: "one_each", "precision": "fp32"})
    assert point.keys == {"precision": "fp32"} and point.values[PACKING] == "one_each"
    assert point.name != Point.of("trainer", {"precision": "fp32"}).name


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_the_parts_add_up_to_d_in_both_orders(data):
    """Any causes, any log-probs: telescoping is exact to the rounding of a float64 sum."""
    count = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 5))
    causes = [
        synthetic(side, index, pinned=data.draw(st.booleans()))
        for side, number in zip(("server", "trainer"), count)
        for index in range(number)
    ]
    plan = make_plan(facts(), causes=causes)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    log_probs = {point: rng.normal(scale=5.0, size=20) for point in plan.points}
    d = log_probs[plan.trained] - log_probs[plan.sampled]
    for name, links in plan.walks.items():
        added = contributions(links, log_probs)
        assert sorted(added) == sorted([ENGINES, *(cause.name for cause in causes)]), name
        np.testing.assert_allclose(sum(added.values()), d, rtol=0, atol=1e-13)


def synthetic(side, index, pinned=False):
    return Cause(f"{side} {index}", side, "", lambda _facts: {f"@{side}{index}": 1}, pinned)


def test_causes_that_do_not_act_on_each_other_are_the_same_in_both_orders():
    causes = [synthetic("server", 0), synthetic("server", 1), synthetic("trainer", 2), synthetic("trainer", 3)]
    size = {cause.name: 0.01 * (index + 1) for index, cause in enumerate(causes)}
    plan = make_plan(facts(), causes=causes)

    def value(point):
        """A server's cause lowers its log-probs while it is not neutral, a trainer's raises them."""
        acting = [c for c in causes if c.side == point.side and f"@{c.name.replace(' ', '')}" not in point.values]
        return np.full(3, sum((-1 if c.side == "server" else 1) * size[c.name] for c in acting))

    log_probs = {point: value(point) for point in plan.points}
    for links in plan.walks.values():
        for name, part in contributions(links, log_probs).items():
            assert part == pytest.approx(np.full(3, size.get(name, 0.0)), abs=1e-12), name


def test_units_are_the_coarsest_of_an_engine():
    run = facts(precision="bf16", server=dict(quantization="int8", kv_cache="fp8"))
    assert formats(run) == {"server": ["bf16", "int8", "fp8"], "trainer": ["bf16"]}
    units = units_of(run, {"server batch": "server", "trainer packing": "trainer"}, {}, UNITS)
    assert units == {"server batch": 2.0**-4, "trainer packing": 2.0**-9, ENGINES: 2.0**-24}
    # What cannot be changed stays between the engines, with its rounding.
    left = {"server KV cache": Nothing("left out", False), "trainer FP8": Nothing("bf16", True)}
    assert units_of(run, {}, left, UNITS)[ENGINES] == 2.0**-4


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_the_engines_are_compared_in_fp32_although_no_key_changes_the_trainer_s_lm_head_alone(precision):
    """It follows `precision`, so it is fp32 at the reference, and in the row that changes `precision`."""

    def between(**sections):
        run = facts(precision=precision, **sections)
        plan = make_plan(run)
        assert not plan.nothing["trainer LM head"].is_zero
        links = plan.walks["forward"]
        return units_of(run, {link.cause: link.end.side for link in links}, plan.nothing, UNITS)[ENGINES]

    assert between() == UNITS["fp32"]
    assert between(budget=dict(reference="bf16")) == UNITS["bf16"]
    # What changes it is left out, and so it is where the engines meet.
    assert between(budget=dict(causes=("server batch",))) == UNITS[precision]
