"""A publish gathers once and hashes once, and faults of the gather and of servers are found when they should be."""

from __future__ import annotations

import pytest
from family_models import make_family_folder
from test_weights_layouts import write_checkpoint

from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.sync.verify import server_tensor_names

TENSOR, EXPERT = {"tensor": 2}, {"expert": 2}
NAMES = {"dense": "model.layers.2.self_attn.o_proj.weight", "moe": "model.layers.2.mlp.experts.3.down_proj.weight"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for kind in ("dense", "moe"):
        write_checkpoint(root / kind, kind)
    make_family_folder(root / "gpt_oss", "gpt_oss")
    return root


@pytest.fixture
def publish(models, rank_pools, tmp_path):
    def run(kind: str, parallel: dict, rounds: list[dict], **settings) -> list[dict]:
        first, other = rank_pools(2).run(
            "publish_ranks:publish_rounds",
            source=str(models / kind),
            parallel=parallel,
            publish=settings,
            rounds=rounds,
            weights_dir=str(tmp_path / "weights"),
        )
        said = ("error", "verified", "failed", "num_bytes", "num_bytes_hashed", "compared")
        for here, there in zip(first, other, strict=True):
            assert {k: here.get(k) for k in said} == {k: there.get(k) for k in said}, "all ranks know it"
        return first

    (tmp_path / "weights").mkdir()
    return run


def num_tensors(models, kind: str) -> int:
    return len(set(server_tensor_names(read_model_spec(models / kind)).values()))


@pytest.mark.parametrize("verify", ["tensors", "replicas"])
@pytest.mark.parametrize(
    "kind, parallel, method",
    [
        ("dense", TENSOR, "disk"),
        ("dense", TENSOR, "distributed"),
        ("moe", EXPERT, "disk"),
        ("moe", EXPERT, "distributed"),
        ("moe", {"tensor": 2, "expert": 2}, "disk"),
        ("gpt_oss", EXPERT, "disk"),
    ],
)
def test_a_publish_gathers_once_and_hashes_once(publish, models, kind, parallel, method, verify):
    rounds = [{"change": "weight"}, {"change": "weight"}]
    found = publish(kind, parallel, rounds, method=method, verify=verify, max_senders=1)
    for number, result in enumerate(found):
        assert result["verified"] and not result["failed"], result
        # At a server's start the weights are sent twice, to prove that they reach every tensor.
        assert result["gathers"] == (2 if method == "distributed" and number == 0 else 1)
        assert result["num_bytes_hashed"] == result["num_bytes"]
        assert result["compared"] == num_tensors(models, kind) and result["skips"] == 0


@pytest.mark.parametrize("verify", ["tensors", "replicas"])
@pytest.mark.parametrize("method", ["disk", "distributed"])
def test_with_a_period_a_publish_hashes_and_reads_back_its_share(publish, models, method, verify):
    rounds = [{"change": "weight"}] * 5 + [{"change": "weight", "restart": 1}, {"change": "weight"}]
    found = publish("dense", TENSOR, rounds, method=method, verify=verify, verify_all_every=4)
    assert all(result["verified"] for result in found), found
    whole, shares = num_tensors(models, "dense"), found[1:5]
    assert found[0]["compared"] == found[5]["compared"] == whole, "the run's start, and the server's"
    assert found[0]["num_bytes_hashed"] == found[5]["num_bytes_hashed"] == found[0]["num_bytes"]
    times = 2 if verify == "replicas" else 1  # in two publishes in a row
    assert sum(result["compared"] for result in shares) == times * whole
    assert sum(result["num_bytes_hashed"] for result in shares) == times * found[0]["num_bytes"]
    assert all(0 < result["compared"] < whole and result["skips"] for result in [*shares, found[6]])


@pytest.mark.parametrize("verify", ["tensors", "replicas"])
@pytest.mark.parametrize("fault", ["stale", "altered"])
def test_a_tensor_that_goes_wrong_on_the_server_is_found_in_time(publish, fault, verify):
    """It goes wrong at each place of the turns. With `replicas`, a tensor of the only server that changes when it
    should, but to other values, is found by nothing; so there it changes while the trainer's stays as it is.
    """
    change = "nothing" if fault == "altered" and verify == "replicas" else "weight"
    wrong = {"change": change, fault: "layers.2.mlp.down_proj"}
    for every, num_right in [(1, 1), *((4, count) for count in range(1, 6))]:
        right = [{"change": "weight"}, *[{"change": change}] * (num_right - 1)]
        found = publish("dense", TENSOR, right + [wrong] * every, method="disk", verify=verify, verify_all_every=every)
        assert all(result.get("verified") for result in found[:num_right])
        (error, *_) = [result["error"] for result in found[num_right:] if "error" in result]
        assert "model.layers.2.mlp.down_proj.weight" in error


@pytest.mark.parametrize("verify", ["tensors", "replicas"])
@pytest.mark.parametrize("method", ["disk", "distributed"])
@pytest.mark.parametrize("kind", ["swapped", "flipped"])
def test_a_fault_of_the_gather_is_found_at_the_first_publish(publish, kind, method, verify):
    """What is sent and hashed is wrong, and servers hold just that: they cannot tell."""
    rounds = [{"change": "weight", "gather": (kind, NAMES["dense"])}]
    (found,) = publish("dense", TENSOR, rounds, method=method, verify=verify, verify_all_every=8)
    assert f"what was gathered is not what the ranks hold: {NAMES['dense']}" in found["error"], found


@pytest.mark.parametrize("period", [1, 4])
def test_a_later_fault_of_the_gather_is_found_in_time(publish, period):
    wrong = {"change": "weight", "gather": ("swapped", NAMES["dense"])}
    rounds = [{"change": "weight"}] + [wrong] * 4
    found = publish("dense", TENSOR, rounds, method="disk", verify="replicas", verify_all_every=period)
    first = next(number for number, result in enumerate(found) if "error" in result)
    assert first == 1 if period == 1 else 1 <= first <= 4
    assert NAMES["dense"] in found[first]["error"]


@pytest.mark.parametrize("kind, name", [("moe", NAMES["moe"]), ("gpt_oss", None)])
def test_a_fault_on_another_owner_is_told_to_all_ranks(publish, models, kind, name):
    """Experts of the second rank: its own, and a stack's that the first rank puts together."""
    name = name or "model.layers.1.mlp.experts.3.down_proj.weight"
    rounds = [{"change": "weight", "gather": ("flipped", name)}]
    (found,) = publish(kind, EXPERT, rounds, method="disk", verify="tensors")
    stack = name.replace("experts.3.down_proj.weight", "experts.down_proj")
    assert "what was gathered is not what the ranks hold" in found["error"]
    assert (name if kind == "moe" else stack) in found["error"], found


@pytest.mark.parametrize("verify", ["tensors", "replicas"])
def test_a_fault_on_an_owner_that_does_not_send_ends_that_publish_only(publish, verify):
    rounds = [{"change": "weight"}, {"change": "weight", "gather": ("flipped", NAMES["moe"])}, {"change": "weight"}]
    found = publish("moe", EXPERT, rounds, method="distributed", verify=verify, max_senders=1)
    assert found[0]["verified"] and found[2]["verified"], found
    assert f"what was gathered is not what the ranks hold: {NAMES['moe']}" in found[1]["error"]


@pytest.mark.parametrize("verify", ["tensors", "replicas"])
@pytest.mark.parametrize("method", ["disk", "distributed"])
def test_a_server_that_comes_back_is_compared_in_full(publish, models, method, verify):
    """The last publish hashed a share only."""
    rounds = [{"change": "weight"}, {"change": "weight"}, {"again": 2, "restart": 1}, {"change": "weight"}]
    found = publish("dense", TENSOR, rounds, method=method, verify=verify, verify_all_every=4)
    assert all(result["verified"] for result in found), found
    whole = num_tensors(models, "dense")
    assert found[1]["compared"] < whole and found[2]["compared"] == whole and found[3]["compared"] < whole
    wrong = {"again": 2, "restart": 1, "stale": "layers.2.mlp.down_proj"}
    rounds = [{"change": "weight"}, {"change": "weight"}, wrong]
    if verify == "tensors":  # stale against the version before: here it holds the right values already
        wrong["altered"] = wrong.pop("stale")
        found = publish("dense", TENSOR, rounds, method=method, verify=verify, verify_all_every=4)
        assert "model.layers.2.mlp.down_proj.weight" in found[2]["failed"]["server-0"], found
