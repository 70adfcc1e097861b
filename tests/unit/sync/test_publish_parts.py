"""The parts of a publish that need no server: versions on disk, checksums, comparison, the order of steps,
quarantine.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from gspo_mega.base.errors import PublishError
from gspo_mega.models.spec import ModelSpec, MoeSpec
from gspo_mega.sync.broadcast_group import buckets
from gspo_mega.sync.servers import Deadline, Fleet
from gspo_mega.sync.transaction import PublishContent, PublishMemory, Transaction
from gspo_mega.sync.verify import Baseline, check_replicas, server_tensor_names, server_tensors
from gspo_mega.sync.versions import PublishedVersions

SPEC = ModelSpec(
    family="qwen3_moe",
    num_layers=1,
    hidden_size=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    intermediate_size=16,
    vocab_size=70,
    max_position_embeddings=64,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    qk_norm=True,
    attention_bias=False,
    torch_dtype="float32",
    eos_token_ids=(1,),
    moe=MoeSpec(num_experts=2, experts_per_token=1, expert_intermediate_size=4),
)
NAMES = sorted(set(server_tensor_names(SPEC).values()))


class Server:
    """Holds one number a tensor. `refuse` names calls that fail, `drop` tensors that updates do not reach."""

    tensor_parallel = 1

    def __init__(
        self, server_id: str, refuse: tuple[str, ...] = (), drop: tuple[str, ...] = (), generation: int = 1
    ) -> None:
        self.server_id, self.refuse, self.drop, self.generation = server_id, refuse, drop, generation
        self.held = dict.fromkeys(NAMES, "0")
        self.version, self.reports_all = 0, False
        self.calls: list[str] = []

    def __getattr__(self, name: str):
        if name not in (
            "pause",
            "resume",
            "flush_cache",
            "weight_version",
            "checksums",
            "snapshot",
            "reset_tensors",
            "compare",
        ):
            raise AttributeError(name)

        def call(*, deadline_seconds: float, **more):
            assert 0 < deadline_seconds <= 5
            self.calls.append(name)
            if name in self.refuse:
                raise PublishError(f"{self.server_id}: {name}: refused")
            return getattr(self, f"do_{name}", lambda: None)(**more)

        return call

    def do_weight_version(self):
        return self.version

    def do_checksums(self, skip=()):
        left_out = () if self.reports_all else skip
        return [{name: value for name, value in self.held.items() if not any(piece in name for piece in left_out)}]

    def do_snapshot(self):
        self.kept = dict(self.held)

    def do_reset_tensors(self):
        self.held = dict.fromkeys(NAMES, "random")

    def do_compare(self):
        if self.kept != self.held:
            raise PublishError(f"{self.server_id}: compare: not as before")

    def update(self, weights: dict[str, str], version: int) -> None:
        self.calls.append("update")
        if "update" in self.refuse:
            raise PublishError(f"{self.server_id}: update: refused")
        self.held |= {n: w for n, w in weights.items() if n not in self.drop}
        self.version = version


def weights(version: int, *but: str) -> dict[str, str]:
    """Every tensor of a version; those in `but` are still as in version 1."""
    return {name: f"{1 if name in but else version}" for name in NAMES}


def run(
    servers: list[Server],
    memory: PublishMemory,
    version: int,
    now: dict[str, str],
    verify: str = "tensors",
    chosen: frozenset[str] | None = None,
):
    """One transaction; also the calls of `commit`."""
    if verify == "tensors":
        content = PublishContent(version, expected=now, chosen=chosen)
    else:
        digests = {n: now[server] for n, server in server_tensor_names(SPEC).items()}
        content = PublishContent(version, digests=digests, chosen=chosen)
    commits: list[list[str]] = []

    def send(fleet: Fleet, targets: list[Server]) -> None:
        fleet.each(lambda s, left: s.update(now, version), targets)

    transaction = Transaction(server_tensors(SPEC), memory, content, Deadline(10), send)
    verified, failed = transaction.run(servers, lambda: commits.append([c for s in servers for c in s.calls]))
    return verified, failed, commits


def test_steps_come_in_order_and_the_proof_once_a_start():
    server, memory = Server("a"), PublishMemory()
    verified, failed, commits = run([server], memory, 1, weights(1))
    assert verified == (("a", 1),) and not failed
    update = ["update", "flush_cache"]
    proof = ["snapshot", "reset_tensors", *update, "compare"]
    assert commits == [["pause", *update, *proof, "weight_version", "checksums"]], "committed after all is verified"
    assert server.calls[-1] == "resume"
    server.calls.clear()
    run([server], memory, 2, weights(2))
    assert server.calls == ["pause", *update, "weight_version", "checksums", "resume"]
    server.calls.clear()
    server.generation = 2
    run([server], memory, 3, weights(3))
    assert "reset_tensors" in server.calls


@pytest.mark.parametrize(
    "step", ["pause", "update", "flush_cache", "snapshot", "compare", "weight_version", "checksums", "resume"]
)
def test_a_server_that_fails_a_step_is_named_and_the_other_goes_on(step):
    bad, good = Server("bad", refuse=(step,)), Server("good")
    verified, failed, commits = run([bad, good], PublishMemory(), 1, weights(1))
    assert verified == (("good", 1),) and failed == {"bad": f"bad: {step}: refused"} and len(commits) == 1
    assert step == "resume" or "resume" not in bad.calls, "it stays paused"


def test_nothing_is_committed_when_no_server_is_left():
    memory = PublishMemory()
    verified, failed, commits = run([Server("a", refuse=("update",))], memory, 1, weights(1))
    assert not verified and set(failed) == {"a"} and not commits and memory.committed is None
    assert run([], memory, 1, weights(1)) == ((), {}, [])


def test_a_tensor_that_updates_do_not_reach_fails_the_proof():
    _, failed, _ = run([Server("a", drop=("model.norm.weight",))], PublishMemory(), 1, weights(1), verify="replicas")
    assert failed == {"a": "a: compare: not as before"}


@pytest.mark.parametrize("version", [7, 0])
def test_the_wrong_version_is_caught(version):
    """A later one, and the one that the server had before."""
    server = Server("a")
    server.do_weight_version = lambda: version
    _, failed, _ = run([server], PublishMemory(), 1, weights(1))
    assert f"holds weight_version {version} after version 1" in failed["a"]


@pytest.mark.parametrize("name", ["model.layers.0.mlp.experts.w13_weight", "lm_head.weight"])
def test_every_tensor_is_compared(name):
    server, memory = Server("a"), PublishMemory()
    run([server], memory, 1, weights(1))
    server.drop = (name,)
    _, failed, _ = run([server], memory, 2, weights(2))
    assert f"differ in value: {name}" in failed["a"] and memory.committed.weight_version == 1
    server.drop = ()
    verified, _, _ = run([server], memory, 2, weights(2))
    assert verified


def test_replicas_stale_and_stray_changes_are_named():
    server, memory = Server("a"), PublishMemory()
    assert run([server], memory, 1, weights(1), "replicas")[0]
    server.drop = ("model.norm.weight",)
    _, failed, _ = run([server], memory, 2, weights(2), "replicas")
    assert "changed in the trainer and not there: model.norm.weight" in failed["a"]
    server.drop = ()
    assert run([server], memory, 2, weights(2), "replicas")[0]
    # A third version in which the head is as it was, and a server whose head changes all the same.
    _, failed, _ = run([server], memory, 3, weights(3) | {"lm_head.weight": "2"}, "replicas")
    assert not failed
    server.drop = ("lm_head.weight",)
    server.held["lm_head.weight"] = "stray"
    _, failed, _ = run([server], memory, 4, weights(4) | {"lm_head.weight": "2"}, "replicas")
    assert "changed there and not in the trainer: lm_head.weight" in failed["a"]


def test_replicas_the_one_apart_fails_and_without_a_majority_all_do():
    memory = PublishMemory()
    three = [Server(name) for name in "abc"]
    assert len(run(three, memory, 1, weights(1), "replicas")[0]) == 3
    # Every tensor changes everywhere, in one of them to something else: only the others can tell.
    three[1].update = lambda now, version: Server.update(three[1], {**now, "model.norm.weight": "else"}, version)
    verified, failed, _ = run(three, memory, 2, weights(2), "replicas")
    assert [s for s, _ in verified] == ["a", "c"] and "other weights than 2 of 3 servers" in failed["b"]
    verified, failed, commits = run(three[:2], memory, 3, weights(3), "replicas")
    assert not verified and not commits and "no majority" in failed["a"] and "no majority" in failed["b"]


def test_replicas_a_server_that_came_back_is_held_against_the_committed_weights():
    memory = PublishMemory()
    first, back = Server("a"), Server("b", generation=2)
    run([first], memory, 1, weights(1), "replicas")
    assert run([back], memory, 1, weights(1), "replicas")[0] == (("b", 2),)
    back.drop, back.held["lm_head.weight"] = ("lm_head.weight",), "old"
    _, failed, _ = run([back], memory, 1, weights(1), "replicas")
    assert "changed there and not in the trainer: lm_head.weight" in failed["b"]


@pytest.mark.parametrize("verify", ["tensors", "replicas"])
@pytest.mark.parametrize("reports_all", [False, True])
def test_a_share_is_compared_whether_the_server_leaves_out_the_rest_or_not(verify, reports_all):
    """SGLang on a GPU reports weights in blocks all the same. What the model does not have is never left out."""
    server, memory, share = Server("a"), PublishMemory(), frozenset(["model.norm.weight"])
    server.reports_all = reports_all
    assert run([server], memory, 1, weights(1), verify)[0]
    server.drop = ("lm_head.weight",)
    assert run([server], memory, 2, weights(2), verify, share)[0], "it is not of the share"
    server.drop = ("model.norm.weight",)
    _, failed, _ = run([server], memory, 3, weights(3), verify, share)
    assert "model.norm.weight" in failed["a"]
    server.drop, server.held["surprise"] = (), "1"
    _, failed, _ = run([server], memory, 3, weights(3), verify, share)
    assert "surprise" in failed["a"]


def test_replicas_a_tensor_is_compared_with_what_it_was_when_it_was_read_last():
    server, memory = Server("a"), PublishMemory()
    head, norm = frozenset(["lm_head.weight"]), frozenset(["model.norm.weight"])
    for version, share in ((1, None), (2, head), (3, norm)):
        assert run([server], memory, version, weights(version), "replicas", share)[0]
    assert memory.baseline.reported[1][0]["lm_head.weight"] == "2"
    assert memory.baseline.reported[1][0]["model.norm.weight"] == "3"
    assert not run([server], memory, 4, weights(4) | {"lm_head.weight": "2"}, "replicas", head)[1], "as it was"
    server.held["lm_head.weight"] = "stray"
    server.drop = ("lm_head.weight",)
    _, failed, _ = run([server], memory, 5, weights(5) | {"lm_head.weight": "2"}, "replicas", head)
    assert "changed there and not in the trainer: lm_head.weight" in failed["a"]


def test_replicas_what_changed_without_servers_of_a_size_is_not_known_of_them():
    small, large = Server("small"), Server("large")
    large.tensor_parallel, memory = 2, PublishMemory()
    large.do_checksums = lambda skip=(): Server.do_checksums(large, skip) * 2
    assert len(run([small, large], memory, 1, weights(1), "replicas")[0]) == 2
    changed = weights(1) | {"model.norm.weight": "2"}
    assert run([small], memory, 2, changed, "replicas", frozenset(["model.norm.weight"]))[0]
    assert "model.norm.weight" not in memory.baseline.reported[2][0]
    assert memory.baseline.reported[2][0]["lm_head.weight"] == "1"
    large.held["lm_head.weight"], large.drop = "stray", ("lm_head.weight",)
    _, failed, _ = run([large], memory, 2, changed, "replicas")
    assert "changed there and not in the trainer: lm_head.weight" in failed["large"]


def test_replicas_with_several_ranks_a_tensor_may_change_on_some_only():
    fleet = Fleet([Server("a")], Deadline(5))
    digests = dict.fromkeys(server_tensor_names(SPEC), "1")
    before = [dict.fromkeys(NAMES, "1"), dict.fromkeys(NAMES, "1")]
    now = [before[0] | {"lm_head.weight": "2"}, before[1]]
    check_replicas(
        fleet, server_tensors(SPEC), {"a": now}, digests | {"lm_head.weight": "2"}, Baseline(digests, {1: before})
    )
    assert not fleet.failed
    check_replicas(fleet, server_tensors(SPEC), {"a": now}, digests, Baseline(digests, {1: before}))
    assert "changed there and not in the trainer" in fleet.failed["a"]


def test_a_hung_call_leaves_time_for_the_others_and_the_deadline_ends_all(monkeypatch):
    deadline, now, given = Deadline(0.5), [0.0], {}
    monkeypatch.setattr(deadline, "passed", lambda: now[0])
    fleet, both_begun = Fleet([Server("slow"), Server("quick")], deadline), threading.Barrier(2, timeout=60)

    def act(server: Server, seconds: float) -> None:
        given[server.server_id] = seconds
        if now[0] == 0.0:
            both_begun.wait()
        if server.server_id == "slow":
            now[0] += seconds
            raise PublishError("slow: no answer")

    assert list(fleet.each(act)) == ["quick"] and given == {"slow": 0.25, "quick": 0.25}
    assert list(fleet.each(act)) == ["quick"] and given["quick"] == 0.125, "half of the time is left"
    now[0] += 0.5
    assert not fleet.each(act) and "deadline of 0.5 s" in fleet.failed["quick"]


def test_servers_are_told_at_the_same_time():
    fleet = Fleet([Server(str(n)) for n in range(4)], Deadline(60))
    all_there = threading.Barrier(4, timeout=60)
    assert len(fleet.each(lambda s, left: all_there.wait())) == 4


def test_a_defect_is_not_taken_for_a_server_that_failed():
    with pytest.raises(ZeroDivisionError):
        Fleet([Server("a")], Deadline(5)).each(lambda s, left: 1 / 0)


def test_buckets_hold_what_fits_and_lose_nothing():
    tensors = [(str(n), torch.zeros(n)) for n in (10, 10, 30, 1, 1, 100, 2)]
    found = list(buckets(iter(tensors), bucket_bytes=100))
    assert [[name for name, _ in bucket] for bucket in found] == [["10", "10"], ["30"], ["1", "1"], ["100"], ["2"]]
    assert list(buckets(iter([]), 100)) == []


def test_what_a_server_loads_in_one_request_only_is_in_one_bucket():
    """SGLang forgets a lone down-projection of latent attention and says success."""
    names = [
        f"model.layers.{layer}.self_attn.{name}.weight"
        for layer in (0, 1)
        for name in ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj")
    ]
    found = [
        [name for name, _ in bucket]
        for bucket in buckets(iter((name, torch.zeros(10)) for name in names), bucket_bytes=60)
    ]
    assert found == [names[0:2], names[2:3], names[3:5], names[5:6]]
    without_query_latent = [names[1], names[4]]
    assert len(list(buckets(iter((name, torch.zeros(10)) for name in without_query_latent), bucket_bytes=60))) == 2


def make_versions(folder: Path, *numbers: int) -> PublishedVersions:
    versions = PublishedVersions(folder)
    for number in numbers:
        versions.path(number).mkdir(parents=True)
    return versions


def test_commit_names_the_current_version_and_prune_keeps_it(tmp_path):
    versions = make_versions(tmp_path, 1, 2, 3, 4)
    assert versions.current() is None
    versions.commit(1)
    (tmp_path / "v00000005.writing").mkdir()
    (tmp_path / "notes").mkdir()
    versions.prune(keep_last=2)
    left = {"current.json", "notes", "v00000001", "v00000003", "v00000004"}
    assert {p.name for p in tmp_path.iterdir()} == left
    assert versions.current().path == tmp_path / "v00000001" and versions.current().weight_version == 1
    versions.commit(4)
    versions.prune(keep_last=1, held={3, 7})
    assert {p.name for p in tmp_path.glob("v*")} == {"v00000003", "v00000004"}, "a server loads it"
    versions.prune(keep_last=1)
    assert [p.name for p in tmp_path.glob("v*")] == ["v00000004"]


def test_prune_keeps_the_last_whole_version_and_the_newest_changes(tmp_path):
    versions = make_versions(tmp_path, 1)
    versions.commit(1)
    for number in (2, 3, 4):
        versions.delta_path(number).mkdir()
    (tmp_path / "v00000005.delta.writing").mkdir()
    (tmp_path / ".v00000002.delta.removed").mkdir()
    versions.prune(keep_last=2)
    left = {"current.json", "v00000001", "v00000003.delta", "v00000004.delta"}
    assert {p.name for p in tmp_path.iterdir()} == left, "a server can start from whole weights only"


def test_a_version_that_is_not_there_cannot_be_committed(tmp_path):
    versions = make_versions(tmp_path, 1)
    versions.commit(1)
    with pytest.raises(PublishError, match="v00000002: cannot be committed"):
        versions.commit(2)
    assert versions.current().weight_version == 1
    (tmp_path / "current.json").write_text('{"weight_version": 1}')
    with pytest.raises(PublishError, match="current.json: cannot be read"):
        versions.current()
