"""What a certificate runs: cases as configurations, refusals with a reason, ranks that are started for them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_mega.base.errors import ConfigError, PlanError
from gspo_mega.config import load_config
from gspo_mega.config.schema import CertifyCase
from gspo_mega.models.families import FAMILIES
from gspo_mega.models.huggingface import read_model_spec, spec_from_config
from gspo_mega.models.tensors import hf_tensors
from gspo_mega.verify.certify.cases import Case, case_config, own_layout, resolve_cases, starts

DENSE = "configs/certify_dense.yaml"
MOE = "configs/certify_moe.yaml"
PPO = "configs/certify_ppo.yaml"
FAMILY_CASES = "configs/certify_families.yaml"
DELTA = "configs/certify_delta.yaml"
BALANCED = "configs/certify_balanced.yaml"


def load(file, *overrides):
    return load_config(file, overrides, "certify"), list(overrides)


@pytest.mark.parametrize(
    ("file", "refused"), [(DENSE, 2), (MOE, 4), (PPO, 1), (FAMILY_CASES, 0), (DELTA, 0), (BALANCED, 0)]
)
def test_the_shipped_matrices_refuse_what_they_say_they_refuse(file, refused):
    references, cases = resolve_cases(*load(file), "cpu")
    assert [case.name for case in cases if case.refusal is not None] == [
        case.name for case in cases if case.spec.refused
    ]
    assert sum(case.refusal is not None for case in cases) == refused
    assert {case.model for case in cases} == {case.model for case in references}
    assert {case.spec.ranks for case in references} == {1}


def parameter_forms(spec):
    """Megatron's parameters of the model, without numbers of layers and experts, and how each is cut."""
    return {(re.sub(r"\d+", "N", entry.parameter), entry.role, entry.sharding) for entry in hf_tensors(spec)}


def test_every_form_of_parameter_has_cases_with_tensor_ranks_and_with_stages():
    """So a family needs cases of its own only for parameters that no other family has."""
    from family_models import VARIANTS, variant_config

    cases = [case for file in (FAMILY_CASES, DELTA) for case in resolve_cases(*load(file), "cpu")[1]]
    tried = {case.model: read_model_spec(case.model) for case in cases}
    others = {name: config for name, config in VARIANTS.items() if config[0] not in {s.family for s in tried.values()}}
    specs = {
        name: spec_from_config(variant_config(name).to_dict() | {"architectures": [FAMILIES[family].architecture]})
        for name, (family, _) in others.items()
    }
    assert {spec.family for spec in (*tried.values(), *specs.values())} == FAMILIES.keys()
    for key in ("parallel.tensor", "parallel.pipeline", "parallel.context", "optimizer.distributed"):
        certified = [tried[case.model] for case in cases if key in case.spec.set]
        forms = {form for spec in certified for form in parameter_forms(spec)}
        for name, spec in (*tried.items(), *specs.items()):
            assert parameter_forms(spec) <= forms, f"{name} has no case with {key}"


def test_the_norm_acts_in_what_is_measured_also_of_a_critic_with_an_optimizer_of_its_own():
    loaded, overrides = load(PPO, "critic.optimizer={lr: 1e-4, clip_grad: 3.0}", "optimizer.clip_grad=2.0")
    config = case_config(loaded.path, own_layout(loaded.config.parallel, loaded.config.cluster), overrides).config
    assert config.optimizer.clip_grad == config.critic.optimizer.clip_grad == 0.1


def test_the_layout_known_to_train_wrong_is_refused_with_its_reason():
    _, cases = resolve_cases(*load(MOE), "cpu")
    (wrong,) = [case for case in cases if case.name == "TP2 with EP1 and ETP1"]
    assert "trains wrong: experts would not be reduced over their data-parallel group" in wrong.refusal


def test_a_case_cannot_have_block_scales_of_its_own():
    own = "{name: powers, set: {precision: fp8, fp8.block_scales: power_of_two}}"
    other = "{name: other, set: {precision: fp8, fp8.recipe: tensorwise, fp8.block_scales: power_of_two}}"
    _, cases = resolve_cases(*load(DENSE, f"certify.cases=[{own}, {other}]"), "cpu")
    assert "reads the rule once when it starts; set it outside the cases" in cases[0].refusal
    assert cases[1].refusal is None
    _, (case,) = resolve_cases(*load(DENSE, f"certify.cases=[{own}]", "fp8.block_scales=power_of_two"), "cpu")
    assert case.refusal is None


def test_without_cases_the_files_own_layout_is_the_case():
    overrides = [
        "certify.cases=[]",
        "cluster.ranks_per_node=4",
        "parallel.tensor=2",
        "parallel.expert=2",
        "optimizer.distributed=true",
    ]
    loaded, overrides = load(MOE, *overrides)
    references, (case,) = resolve_cases(loaded, overrides, "cpu")
    assert (
        case.refusal is None
        and case.spec == own_layout(loaded.config.parallel, loaded.config.cluster)
        and case.spec.ranks == 4
    )
    config = case_config(loaded.path, case.spec, overrides).config
    assert (config.parallel.tensor, config.parallel.expert, config.cluster.ranks_per_node) == (2, 2, 4)
    reference = case_config(loaded.path, references[0].spec, overrides).config
    assert (reference.parallel.tensor, reference.parallel.expert, reference.cluster.ranks_per_node) == (1, 1, 1)
    # What is measured: one mini-batch, the recorded old log-probs, no KL term.
    for measured in (config, reference):
        assert (measured.batch.num_mini_batches, measured.old_log_probs, measured.kl.coefficient) == (1, "rollout", 0)
        assert measured.optimizer.distributed


def test_a_smaller_layout_than_the_files_may_be_the_reference():
    overrides = [
        "certify.cases=[]",
        "cluster.ranks_per_node=4",
        "parallel.pipeline=4",
        "certify.reference={name: smaller, ranks: 2, set: {parallel.pipeline: 2}}",
    ]
    loaded, overrides = load(DENSE, *overrides)
    (reference,), _ = resolve_cases(loaded, overrides, "cpu")
    assert (reference.name, reference.spec.ranks, reference.spec.set["parallel.pipeline"]) == ("smaller", 2, 2)


@pytest.mark.parametrize(
    ("cases", "error", "text"),
    [
        ("[{name: a}, {name: a, ranks: 2}]", ConfigError, r"2 cases are named 'a'; names must differ"),
        ("[{name: reference 2}]", ConfigError, "begins like the reference's name 'reference'; give the case another"),
    ],
)
def test_names_that_cannot_be_told_apart_are_refused(cases, error, text):
    with pytest.raises(error, match=text) as raised:
        resolve_cases(*load(DENSE, f"certify.cases={cases}"), "cpu")
    assert "certify.cases" in str(raised.value)


def test_an_unknown_key_of_a_case_is_its_refusal():
    _, (case,) = resolve_cases(*load(DENSE, "certify.cases=[{name: a, set: {parallel.tensr: 2}}]"), "cpu")
    assert "did you mean 'tensor'" in case.refusal


def test_a_reference_that_cannot_run_ends_it_before_anything_starts():
    with pytest.raises(PlanError, match="(?s)reference that all cases are compared with cannot run.*does not divide"):
        resolve_cases(*load(DENSE, "certify.reference={name: smaller, ranks: 3, set: {parallel.tensor: 3}}"), "cpu")


@given(st.lists(st.integers(1, 4), max_size=40), st.integers(1, 9))
def test_starts_cover_every_case_once_with_ranks_of_one_number(ranks, cases_a_start):
    cases = [Case(CertifyCase(name=str(i), ranks=r), "m", "fp32", None) for i, r in enumerate(ranks)]
    groups = list(starts(cases, cases_a_start))
    assert sorted(case.name for group in groups for case in group) == sorted(case.name for case in cases)
    for group in groups:
        assert 1 <= len(group) <= cases_a_start and len({case.spec.ranks for case in group}) == 1


def test_a_critic_is_measured_like_the_policy():
    """Its penalty needs log-probs that no recorded batch has, and its Adam the same eps."""
    overrides = ["critic.kl_coefficient=0.1", "critic.optimizer={lr: 1e-3}"]
    own = case_config(PPO, CertifyCase(name="one"), overrides).config
    assert own.critic is not None and own.critic.kl_coefficient == 0.0 and own.critic.optimizer is not None
    assert own.critic.optimizer.eps == own.optimizer.eps == 1e-6 and own.critic.optimizer.lr == 1e-3


CONTINUE = "configs/certify_continue.yaml"


def test_every_layout_continues_every_other_of_its_model():
    references, cases = resolve_cases(*load(CONTINUE), "cpu")
    pairs = [case for case in cases if case.spec.continued_from is not None]
    alone = [case for case in cases if case.spec.continued_from is None]
    by_model = [sum(case.model == one.model for case in alone) for one in references]
    assert len(pairs) == sum(n * (n - 1) for n in by_model) == 88
    assert all(case.refusal is None and not case.spec.refused for case in cases)
    assert all(case.spec.stops for case in (*alone, *references))
    by_name = {case.name: case for case in alone}
    for case in pairs:
        source, _, goal = case.name.partition(" -> ")
        assert case.spec.continued_from == source and case.spec.set == by_name[goal].spec.set


def test_a_pair_that_train_would_not_continue_is_shown_as_refused():
    cases = (
        "certify.cases=[{name: EP1}, {name: EP2, ranks: 2, set: {parallel.expert: 2}},"
        " {name: whole, set: {optimizer.distributed: true}}]"
    )
    _, found = resolve_cases(*load(MOE, cases, "certify.pairs=all"), "cpu")
    refused = {case.name: case.refusal for case in found if case.refusal is not None}
    assert all(case.spec.refused == (case.name in refused) for case in found)
    assert len(found) == 9 and len(refused) == 4 and not any("EP1" in name and "EP2" in name for name in refused)
    assert refused["EP1 -> whole"].endswith("optimizer.distributed: now true, the run has false")


@pytest.mark.parametrize(
    ("cases", "text"),
    [
        ("[{name: a, continued_from: b}]", "valid: a case that runs and begins by itself: none"),
        ("[{name: a}, {name: b, continued_from: a}, {name: c, continued_from: b}]", "by itself: a$"),
        ("[{name: a, refused: true}, {name: b, continued_from: a}]", "by itself: none"),
    ],
)
def test_what_cannot_be_continued_is_named(cases, text):
    with pytest.raises(ConfigError, match=text):
        resolve_cases(*load(DENSE, f"certify.cases={cases}"), "cpu")


def test_replayed_experts_are_continued_after_one_step_only():
    replay = "moe.routing_replay: R3, rollout.return_routed_experts: true"
    cases = f"certify.cases=[{{name: a, set: {{{replay}}}}}, {{name: b, set: {{{replay}}}, continued_from: a}}]"
    assert "set certify.num_steps to 1" in resolve_cases(*load(MOE, cases), "cpu")[1][1].refusal
    assert resolve_cases(*load(MOE, cases, "certify.num_steps=1"), "cpu")[1][1].refusal is None


def test_another_model_is_not_continued():
    other = "{name: b, continued_from: a, set: {model.path: configs/models/certify_dense_tied.json}}"
    _, cases = resolve_cases(*load(DENSE, f"certify.cases=[{{name: a}}, {other}]"), "cpu")
    assert "which it continues, is of another model" in cases[1].refusal
