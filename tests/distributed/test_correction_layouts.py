"""The mismatch correction keeps the same responses, with the same weights, in every layout and packing."""

from __future__ import annotations

import numpy as np
import pytest
from layout_models import make_folder

from gspo_mega.algorithm.objective import ObjectiveSettings

LAYOUTS = {
    "DP2": dict(world=2),
    "CP2": dict(world=2, context=2),
    "one-rank-packs-of-2-and-filler": dict(world=1, per_pack=2),
    "one-rank-one-pack": dict(world=1, per_pack=6),
}
RULES = {
    "mask": dict(mode="mask", bound_nats=0.45, token_veto_nats=1.65),
    "mask-ratio": dict(mode="mask", bound_nats=0.45, token_veto_nats=None, kept_weight="ratio"),
    "truncate": dict(mode="truncate", bound_nats=0.2, token_veto_nats=1.65),
}


def merged(results: list[dict], name: str) -> np.ndarray:
    """[12], each trajectory's value from the ranks that have it, which must agree to the bit."""
    values = np.stack([result[name] for result in results])
    first = np.nanmax(values, axis=0)
    assert np.array_equal(np.where(np.isnan(values), first, values), np.broadcast_to(first, values.shape))
    return first


@pytest.fixture(scope="module")
def one_rank(rank_pools):
    return rank_pools(1).run("correction_jobs:of_known_log_probs", rules=RULES)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_known_log_probs_are_decided_alike_to_the_bit(rank_pools, one_rank, layout):
    arguments = dict(LAYOUTS[layout])
    ranks = rank_pools(arguments.pop("world")).run("correction_jobs:of_known_log_probs", rules=RULES, **arguments)
    for rule, values in RULES.items():
        want, got = [rank[rule] for rank in one_rank], [rank[rule] for rank in ranks]
        for name in ("weights", "deviations"):
            assert merged(got, name).tobytes() == merged(want, name).tobytes(), (rule, name)
        assert {result["centre"] for result in got} == {want[0]["centre"]}
        # The case decides something: some are dropped or cut, some are not.
        changed = merged(want, "weights") == 0
        if values["mode"] == "truncate":
            changed |= merged(want, "deviations") > values["bound_nats"]
        assert 1 <= changed.sum() <= 7


NAMED = {
    "sequence_mis": dict(mode="sequence_mis", upper=1.5, token_veto_nats=None),
    "m2po": dict(mode="m2po", threshold=0.05, token_veto_nats=None),
    "token_tis": dict(mode="token_tis", token_veto_nats=None),
}


@pytest.mark.parametrize("layout", ["DP2", "CP2"])
def test_named_corrections_are_decided_alike(rank_pools, layout):
    """M2PO's bound is one number of the whole batch, and its mask the same to the bit; two versions change nothing."""
    arguments, job = dict(LAYOUTS[layout]), "correction_jobs:of_known_log_probs"
    ranks = rank_pools(arguments.pop("world")).run(job, rules=NAMED, num_versions=2, **arguments)
    one = rank_pools(1).run(job, rules=NAMED)
    for rule in NAMED:
        want, got = [rank[rule] for rank in one], [rank[rule] for rank in ranks]
        assert merged(got, "weights").tobytes() == merged(want, "weights").tobytes(), rule
        tokens = sum(result["tokens"] for result in got)
        if rule == "m2po":
            assert tokens.tobytes() == want[0]["tokens"].tobytes() and tokens.sum() % 1 == 0
        np.testing.assert_allclose(tokens, want[0]["tokens"], rtol=1e-12)
    dropped = merged([rank["sequence_mis"] for rank in one], "weights") == 0
    assert 1 <= dropped.sum() <= 11
    lengths = one[0]["token_tis"]["tokens"], one[0]["m2po"]["tokens"]
    assert 0 < lengths[1].sum() < 0.99 * lengths[0].sum()  # some tokens were masked


def test_clip_cov_leaves_out_the_same_tokens_in_every_layout(rank_pools):
    """Its means are of a whole mini-batch on all ranks, and its draws of a token's trajectory and position."""
    one = rank_pools(1).run("correction_jobs:chosen_by_covariance")[0]
    tokens, candidates = one["counts"]
    want = {place: sorted(found) for place, found in one["chosen"].items()}
    number = sum(map(len, want.values()))
    assert number < candidates < tokens and abs(number - 0.1 * tokens) <= 2, "a tenth of each mini-batch, at random"
    for arguments in LAYOUTS.values():
        ranks = rank_pools(arguments["world"]).run(
            "correction_jobs:chosen_by_covariance", **{k: v for k, v in arguments.items() if k != "world"}
        )
        got = {place: sorted(one for rank in ranks for one in rank["chosen"][place]) for place in want}
        assert got == want, arguments


SEGMENT_RULES = {
    "mask": dict(mode="mask", bound_nats=0.5, token_veto_nats=None, segment_tokens=4),
    "truncate": dict(mode="truncate", bound_nats=0.35, token_veto_nats=1.65, segment_tokens=4),
}


@pytest.mark.parametrize("layout", ["DP2", "CP2", "one-rank-packs-of-2-and-filler"])
def test_version_segments_are_decided_alike_to_the_bit(rank_pools, layout):
    arguments, job = dict(LAYOUTS[layout]), "correction_jobs:of_known_log_probs"
    ranks = rank_pools(arguments.pop("world")).run(job, rules=SEGMENT_RULES, num_versions=2, **arguments)
    one = rank_pools(1).run(job, rules=SEGMENT_RULES, num_versions=2)
    for rule in SEGMENT_RULES:
        want, got = [rank[rule] for rank in one], [rank[rule] for rank in ranks]
        for name in ("weights", "deviations", "judged", "by_segment"):
            assert merged(got, name).tobytes() == merged(want, name).tobytes(), (rule, name)
        assert {result["centre"] for result in got} == {want[0]["centre"]}
        assert merged(want, "judged").max() == 2 and merged(want, "by_segment").sum() >= 1


MODEL_RULE = dict(correction="mask", bound_nats=2.5, token_veto_nats=1.85)


@pytest.fixture(scope="module")
def model(rank_pools, tmp_path_factory):
    folder = str(make_folder(tmp_path_factory.mktemp("model") / "dense", moe=False))
    return folder, rank_pools(1).run("correction_jobs:of_a_model", folder=folder, rule=MODEL_RULE, parallel={})


@pytest.mark.parametrize("layout", ["DP2", "CP2", "PP2"])
def test_a_model_in_any_layout_trains_on_the_same_responses(rank_pools, model, layout):
    folder, want = model
    arguments = dict(LAYOUTS.get(layout, dict(world=2, pipeline=2)))
    pool = rank_pools(arguments.pop("world"))
    got = pool.run("correction_jobs:of_a_model", folder=folder, rule=MODEL_RULE, parallel=arguments)
    weights, deviations = merged(want, "weights"), merged(want, "deviations")
    assert np.abs(np.abs(deviations) - 2.5).min() > 1e-3, "rounding decides nothing"
    assert np.array_equal(merged(got, "weights"), weights) and 2 <= weights.sum() <= 10
    assert np.abs(merged(got, "deviations") - deviations).max() < 1e-4
    # The fully masked trajectory is in no sum; what is dropped stays in the denominator.
    for sums in (want[0]["sums"], got[0]["sums"]):
        assert sums["num_sequences"] == pytest.approx(11)
        assert sums["num_kept_sequences"] == pytest.approx(weights.sum() - 1)
    assert got[0]["sums"]["objective"] == pytest.approx(want[0]["sums"]["objective"], abs=1e-5)


@pytest.mark.parametrize(("layout", "moe"), [("DP2", False), ("CP2", False), ("PP2", False), ("DP2", True)])
def test_a_training_pass_that_decides_the_correction_gives_what_an_old_pass_gives(
    rank_pools, tmp_path_factory, layout, moe
):
    """To the bit: gradients, every column of the report, totals and changed routes."""
    folder = str(make_folder(tmp_path_factory.mktemp("model") / "weights", moe=moe))
    arguments = dict(LAYOUTS.get(layout, dict(world=2, pipeline=2)))
    pool = rank_pools(arguments.pop("world"))
    ranks = pool.run("correction_jobs:in_training", folder=folder, rule=MODEL_RULE, parallel=arguments)
    assert all(rank["can"] and not rank["can_not"] for rank in ranks)
    assert any(rank["training"]["columns"] for rank in ranks)
    weights = np.concatenate([r["training"]["columns"].get("correction_weight", np.ones(0)) for r in ranks])
    assert 0 < weights.sum() < len(weights), "the case drops some"
    for rank in ranks:
        want, got = rank["old_pass"], rank["training"]
        assert got["routing"] == want["routing"]
        for part in ("columns", "totals"):
            assert got[part].keys() == want[part].keys()
            for name, values in got[part].items():
                assert np.array_equal(values, want[part][name]), (part, name)
        assert len(got["gradients"]) == len(want["gradients"]) > 0
        assert all(np.array_equal(g, w) for g, w in zip(got["gradients"], want["gradients"], strict=True))


TOKEN_RULES = {
    "m2po": dict(correction="m2po", threshold=0.5, token_veto_nats=None),
    "icepop": dict(correction="icepop", lower=0.6, upper=1.5, token_veto_nats=None),
}


@pytest.fixture(scope="module")
def of_tokens(rank_pools, tmp_path_factory):
    """For each rule its gradients on one rank, and those without a correction."""
    folder = str(make_folder(tmp_path_factory.mktemp("model") / "tokens", moe=False))
    arguments = dict(folder=folder, parallel={}, settings=TOKENS)
    rules = TOKEN_RULES | {"none": dict(correction="none")}
    job = "correction_jobs:in_training"
    return folder, {name: rank_pools(1).run(job, rule=rule, **arguments)[0] for name, rule in rules.items()}


TOKENS = ObjectiveSettings("token", 0.2, 0.2, entropy_coefficient=0.1)


def distance(got: list[np.ndarray], want: list[np.ndarray]) -> float:
    """Of all gradients, relative L2."""
    squares = sum(float(((g - w) ** 2).sum()) for g, w in zip(got, want, strict=True))
    return (squares / sum(float((w**2).sum()) for w in want)) ** 0.5


@pytest.mark.parametrize("layout", ["DP2", "CP2"])
@pytest.mark.parametrize("rule", TOKEN_RULES)
def test_weights_of_tokens_give_the_same_gradient_in_every_layout(rank_pools, of_tokens, rule, layout):
    """With an old pass and without one, and beside an entropy bonus."""
    folder, one = of_tokens
    arguments = dict(LAYOUTS[layout])
    ranks = rank_pools(arguments.pop("world")).run(
        "correction_jobs:in_training", folder=folder, rule=TOKEN_RULES[rule], parallel=arguments, settings=TOKENS
    )
    tokens = one[rule]["old_pass"]["columns"]["correction_tokens"].sum(0)
    assert 0 < tokens[1] < tokens[0] and tokens[2] == 0, "the case drops some"
    for way in ("old_pass", "training"):
        want = one[rule][way]["gradients"]
        assert distance(one["none"]["training"]["gradients"], want) > 1e-2
        for rank in ranks:
            assert distance(rank[way]["gradients"], want) < 1e-5
        dropped = sum(rank[way]["columns"]["correction_tokens"].sum(0) for rank in ranks)
        np.testing.assert_allclose(dropped, tokens, rtol=1e-5)
