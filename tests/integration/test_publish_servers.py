"""Publishing from two Megatron ranks to real SGLang servers: what arrives, what is caught, who goes on."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
from rank_pool import RankPool, RankPools
from servers import Serve, run_config

from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.tensors import hf_tensors
from gspo_mega.sync.verify import server_tensor_names

# --- fixtures -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rank_pools():
    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture
def ranks(rank_pools) -> RankPool:
    return rank_pools(2)


class Side:
    """The trainer's two ranks, opened against one attempt's servers; closed with the test."""

    def __init__(
        self, ranks: RankPool, config_path: Path, attempt: Path, weights_dir: Path, parallel: dict, **publish
    ) -> None:
        self.ranks, self.weights_dir = ranks, weights_dir
        publish = {"deadline_seconds": 60.0, "bucket_bytes": 100_000, "full_every": 1} | publish
        sizes = {"expert_tensor": 1, **parallel}
        self._run(
            "open_trainer",
            config_path=str(config_path),
            attempt=str(attempt),
            parallel=sizes,
            publish=publish,
            weights_dir=str(weights_dir),
        )

    def _run(self, job: str, **arguments) -> list:
        return self.ranks.run(f"publish_jobs:{job}", **arguments)

    def publish(self, version: int, change: str = "", **options) -> dict:
        """Both ranks publish; they must agree on what came of it."""
        first, second = self._run("publish", version=version, change=change, **options)
        assert first == second
        return first

    def current(self) -> dict | None:
        file = self.weights_dir / "current.json"
        return json.loads(file.read_text()) if file.exists() else None


@pytest.fixture
def moe(ranks, moe_server, tmp_path):
    """A trainer of two expert-parallel ranks before the session's MoE server; a function that opens it."""
    opened = []

    def open_side(**publish) -> Side:
        opened.append(
            Side(ranks, moe_server.config_path, moe_server.attempt.path, tmp_path / "weights", {"expert": 2}, **publish)
        )
        return opened[-1]

    yield open_side
    for side in opened:
        side._run("close_trainer")
    moe_server.restore_weights()


def make_tied_model(folder: Path) -> Path:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 300,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "max_position_embeddings": 256,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "eos_token_id": 2,
        "dtype": "float32",
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(5)
    tensors = {e.name: 0.1 * torch.randn(e.shape, generator=generator) for e in hf_tensors(read_model_spec(folder))}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def two_servers(tmp_path_factory):
    """Two servers of one dense model with tied embeddings and a vocabulary that both engines pad. They can take what
    changed, too.
    """
    folder = tmp_path_factory.mktemp("tied_run")
    model = make_tied_model(folder / "model")
    config_path = run_config(folder, model, publish={"full_every": 3})
    servers = [Serve(config_path, folder / "run", forked=True)]
    try:
        servers.append(Serve(config_path, folder / "run", index=1, attempt=servers[0].attempt, forked=True))
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda s: s.wait_for("ready"), servers))
        yield config_path, servers
    finally:
        for server in servers:
            server.stop()


@pytest.fixture
def tied(ranks, two_servers, tmp_path):
    config_path, servers = two_servers
    opened = []

    def open_side(axis: str = "tensor", **publish) -> Side:
        opened.append(Side(ranks, config_path, servers[0].attempt.path, tmp_path / "weights", {axis: 2}, **publish))
        return opened[-1]

    yield open_side
    for side in opened:
        side._run("close_trainer")


# --- what arrives -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["disk", "distributed"])
def test_moe_weights_arrive_and_every_tensor_is_checked(moe, moe_model, method):
    side = moe(method=method)
    for version in (1, 2):
        result = side.publish(version, change="")
        assert result["verified"] == [["server-0", 1]] and not result["failed"]
    assert side.publish(3, change="experts")["verified"]
    assert sum(result["bytes_sent_by_rank"].values()) == (0 if method == "disk" else result["num_bytes"])
    if method == "disk":
        assert side.current() == {"weight_version": 3, "path": str(side.weights_dir / "v00000003")}
        assert sorted(p.name for p in side.weights_dir.glob("v*")) == ["v00000002", "v00000003"]
    else:
        assert side.current() is None
        experts = [entry for entry in hf_tensors(read_model_spec(moe_model)) if entry.expert is not None]
        half = sum(math.prod(entry.shape) * 4 for entry in experts) // 2
        assert result["bytes_sent_by_rank"] == {0: result["num_bytes"] - half, 1: half}, "each its own experts"


@pytest.mark.parametrize("verify", ["tensors", "replicas"])
@pytest.mark.parametrize("method", ["disk", "distributed"])
def test_two_servers_of_a_tied_model_with_a_padded_vocabulary(tied, method, verify):
    side = tied(method=method, verify=verify)
    for version, change in ((1, "weight"), (2, "layers.1.mlp"), (3, ""), (4, "embedding")):
        result = side.publish(version, change=change)
        assert {server for server, _ in result["verified"]} == {"server-0", "server-1"}, result
        sends = 2 if version == 1 and verify == "replicas" else 1  # the first publish proves that all is reached
        if method == "disk":
            assert result["num_bytes_sent"] == 0
        elif version > 1:
            assert result["num_bytes_sent"] == sends * result["num_bytes"], "once, for two servers"


@pytest.mark.parametrize("verify", ["tensors", "replicas"])
def test_two_pipeline_stages_send_what_they_have_to_two_servers(tied, verify):
    side = tied("pipeline", method="distributed", verify=verify)
    for version, change in ((1, "weight"), (2, "layers"), (3, "embedding")):
        result = side.publish(version, change=change)
        assert {server for server, _ in result["verified"]} == {"server-0", "server-1"}, result
    sent, layer = result["bytes_sent_by_rank"], 4 * (64 * (64 + 32 + 32 + 64 + 3 * 128 + 2) + 2 * 16)
    assert sent == {0: 4 * 300 * 64 + layer, 1: layer + 4 * 64}, "the embedding's stage, and the last norm's"


def test_a_stage_that_may_not_send_brings_what_it_has_to_one_that_does(tied):
    side = tied("pipeline", method="distributed", verify="tensors", max_senders=1)
    for version, change in ((1, "weight"), (2, "layers")):
        result = side.publish(version, change=change)
        assert {server for server, _ in result["verified"]} == {"server-0", "server-1"}, result
    assert result["bytes_sent_by_rank"] == {0: result["num_bytes"]}


@pytest.mark.parametrize("method, axis", [("disk", "tensor"), ("distributed", "pipeline")])
def test_servers_that_are_sent_what_changed_hold_what_a_full_publish_gives_them(tied, method, axis):
    """Every tensor of both servers is compared with the trainer's whole weights, as after a full publish. What goes
    wrong with the changes on the way, or with their base, is found by the servers, and all is sent instead.
    """
    side = tied(axis, method=method, verify="tensors", full_every=4)
    found = [side.publish(version, change="weight" if version != 3 else "", every=50) for version in range(1, 6)]
    for result in found:
        assert len(result["verified"]) == 2 and not result["failed"] and result["fallback"] is None, result
        assert result["num_bytes_hashed"] == result["num_bytes"]
    assert [result["is_full"] for result in found] == [True, False, False, False, True]
    second, third = found[1:3]
    assert 0.015 < second["changed_share"] < 0.025 and 0 < second["num_delta_bytes"] < 0.06 * second["num_bytes"]
    assert third["changed_share"] == third["num_delta_bytes"] == 0, "nothing changed, and it is a version all the same"
    if method == "disk":
        assert side.current() == {"weight_version": 5, "path": str(side.weights_dir / "v00000005")}
    else:
        messages = second["num_bytes_sent"] - second["num_delta_bytes"]
        assert 0 < messages < 1000 and 0 < third["num_bytes_sent"] < 1000
    both = ["server-0", "server-1"]
    fault = {"servers": both, "kind": "renamed", "names": "change:model.layers.1.self_attn.q_proj"}
    result = side.publish(6, change="weight", every=50, fault=fault)
    assert len(result["verified"]) == 2 and result["is_full"] and "the change is damaged" in result["fallback"], result
    assert not side.publish(7, change="weight", every=50)["is_full"]
    result = side.publish(8, change="weight", every=50, base=5)
    assert len(result["verified"]) == 2 and result["is_full"], result
    assert "changes of version 5 to version 8, and holds version 7" in result["fallback"], result


def test_a_server_that_missed_what_changed_gets_all_of_it(tied):
    side = tied(method="distributed", verify="replicas", full_every=10)
    assert len(side.publish(1, change="weight")["verified"]) == 2
    fault = {"servers": ["server-1"], "kind": "renamed", "names": "change:model.layers.1.self_attn.q_proj"}
    result = side.publish(2, change="weight", every=50, fault=fault)
    assert result["verified"] == [["server-0", 1]] and "the change is damaged" in result["failed"]["server-1"], result
    again = side.publish(2, again=True)
    assert len(again["verified"]) == 2 and again["is_full"], again
    result = side.publish(3, change="weight", every=50)
    assert len(result["verified"]) == 2 and not result["is_full"], result


def test_phases_account_for_the_time_of_a_publish(tied):
    side, began = tied(method="disk"), time.monotonic()
    result = side.publish(1, change="weight")
    assert list(result["phases"]) == ["prepare", "pause", "send", "prove", "verify", "commit", "resume"]
    assert all(seconds > 0 for seconds in result["phases"].values())
    assert sum(result["phases"].values()) == pytest.approx(result["seconds"])
    assert result["seconds"] < time.monotonic() - began


# --- what is caught -----------------------------------------------------------------------------------------------

FAULTS = {
    "renamed": ("layers.1.self_attn.q_proj", "model.layers.1.self_attn.qkv_proj.weight"),
    "missing": ("layers.2.mlp.experts.5.", "model.layers.2.mlp.experts.w"),
    "stale": ("layers.1.", "model.layers.1."),
}


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("method", ["disk", "distributed"])
def test_a_fault_on_the_way_fails_the_publish_and_names_the_tensor(moe, method, kind):
    """Every weight changes, and one tensor is renamed, one expert not sent, or one layer is that of the last
    version.
    """
    side = moe(method=method)
    assert side.publish(1, change="weight")["verified"]
    names, named = FAULTS[kind]
    fault = {"servers": ["server-0"], "kind": kind, "names": names, "old": str(side.weights_dir / "v00000001")}
    result = side.publish(2, change="weight", fault=fault)
    assert "no server holds weight version 2" in result["error"] and named in result["error"], result
    if method == "disk":
        assert side.current()["weight_version"] == 1
    # The trainer goes on, and the server is as good as new once it holds a version in full.
    assert side.publish(3, change="weight")["verified"] == [["server-0", 1]]


@pytest.mark.parametrize("verify", ["tensors", "replicas"])
@pytest.mark.parametrize("method", ["disk", "distributed"])
def test_with_a_period_a_server_hashes_a_share_and_a_stale_tensor_is_found_in_time(moe, moe_model, method, verify):
    """The server leaves out what it is told to skip, or names would be missing or too many. One tensor stays old from
    some publish on; the publish that finds it fails, and the one after it compares all of them.
    """
    every, whole = 3, len(set(server_tensor_names(read_model_spec(moe_model)).values()))
    side = moe(method=method, verify=verify, verify_all_every=every, keep_last=20)
    found = [side.publish(version, change="weight") for version in range(1, every + 2)]
    assert all(result["verified"] for result in found), found
    assert found[0]["num_compared"] == whole and all(0 < result["num_compared"] < whole for result in found[1:])
    times = 2 if verify == "replicas" else 1  # in two publishes in a row
    assert sum(result["num_compared"] for result in found[1:]) == times * whole
    assert sum(result["num_bytes_hashed"] for result in found[1:]) == times * found[0]["num_bytes"]
    names, named = "layers.1.self_attn.o_proj", "model.layers.1.self_attn.o_proj.weight"
    last_right = str(side.weights_dir / f"v{every + 1:08d}")
    fault = {"servers": ["server-0"], "kind": "stale", "names": names, "old": last_right}
    for version in range(every + 2, 2 * every + 2):
        result = side.publish(version, change="weight", fault=fault)
        if "error" in result:
            break
    assert named in result["error"], result
    mended = side.publish(2 * every + 2, change="weight")
    assert mended["verified"] and mended["num_compared"] == whole


@pytest.mark.parametrize(
    "kind, names, named", [("renamed", "layers.1.self_attn.o_proj", "o_proj"), ("stale", "layers.1.", "layers.1.")]
)
def test_a_stale_tensor_is_caught_without_foretold_checksums(moe, kind, names, named):
    side = moe(method="distributed", verify="replicas")
    assert side.publish(1, change="weight")["verified"]
    result = side.publish(2, change="weight", fault={"servers": ["server-0"], "kind": kind, "names": names})
    assert "changed in the trainer and not there" in result["error"] and named in result["error"], result


@pytest.mark.parametrize("kind", ["renamed", "missing"])
def test_the_first_publish_to_a_server_proves_that_every_tensor_is_reached(moe, kind):
    side = moe(method="distributed", verify="replicas")
    names, named = FAULTS[kind]
    result = side.publish(1, change="weight", fault={"servers": ["server-0"], "kind": kind, "names": names})
    assert "check tensor equality failed" in result["error"] and named in result["error"], result


# --- who goes on --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", ["tensors", "replicas"])
@pytest.mark.parametrize("method", ["disk", "distributed"])
def test_one_server_fails_and_the_other_goes_on(tied, method, verify):
    side = tied(method=method, verify=verify)
    assert len(side.publish(1, change="weight")["verified"]) == 2
    fault = {"servers": ["server-1"], "kind": "renamed", "names": "layers.1.self_attn.o_proj"}
    if method == "disk":
        # Both read one folder, and only one of them meets the fault: not while the other reads.
        fault["servers"] = ["server-0", "server-1"]
        assert "error" in side.publish(2, change="weight", fault=fault)
        return
    result = side.publish(2, change="weight", fault=fault)
    assert result["verified"] == [["server-0", 1]] and "o_proj" in result["failed"]["server-1"], result
    again = side.publish(2, again=True)
    assert len(again["verified"]) == 2 and not again["failed"], again


def test_a_server_that_refuses_a_bucket_holds_up_nobody(tied):
    """It answers 400 and never enters the broadcast, which then cannot end."""
    side = tied(method="distributed")
    assert len(side.publish(1, change="weight")["verified"]) == 2
    result = side.publish(
        2, change="weight", fault={"servers": ["server-1"], "kind": "refused", "names": "layers.1.mlp.gate_proj"}
    )
    assert (
        result["verified"] == [["server-0", 1]] and "a group that the server is not in" in result["failed"]["server-1"]
    )
    assert result["seconds"] < 30
    assert len(side.publish(2, again=True)["verified"]) == 2


@pytest.mark.parametrize("method", ["disk", "distributed"])
def test_a_server_that_hangs_fails_at_the_deadline_and_the_other_goes_on(tied, two_servers, method):
    side = tied(method=method, deadline_seconds=40.0)
    assert len(side.publish(1, change="weight")["verified"]) == 2
    stopped = [
        pid
        for pid, command in two_servers[1][1].processes().items()
        if "sglang" in command or "rollout.server.entry" in command
    ]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        result = side.publish(2, change="weight")
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    assert result["verified"] == [["server-0", 1]] and "server-1" in result["failed"], result
    assert 20 <= result["seconds"] < 60, "it takes half of the time at most"
