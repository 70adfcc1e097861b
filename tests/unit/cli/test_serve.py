"""Which attempt a server that is started by hand belongs to, and as which server."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gspo_mega.base.run_folder import RunFolder
from gspo_mega.cli import main as command_line
from gspo_mega.cli import serve
from gspo_mega.launcher import attempt_state
from gspo_mega.launcher.attempt_state import SILENCE_SECONDS, StateKeeper

CONFIG = str(Path(__file__).parents[3] / "configs/quickstart.yaml")


@pytest.fixture
def served(tmp_path, monkeypatch):
    """served(*words): `gspo-mega serve` of the run in `tmp_path`/run; the (attempt, index) that the server was started
    with.
    """
    started = []

    class Supervisor:
        def __init__(self, config, attempt, index, start, orders, config_of):
            started.append((attempt.number, index))
            assert orders is None, "nobody writes orders to a server that was not told so"

        def run(self):
            return 0

    monkeypatch.setattr(serve, "ServerSupervisor", Supervisor)

    def call(*words):
        assert (
            command_line.main(["serve", CONFIG, f"run.dir={tmp_path}", "run.name=run", "server.num_servers=2", *words])
            == 0
        )
        return started[-1]

    return call


def test_it_joins_the_attempt_that_runs_behind_its_own_servers(served, tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.new_attempt()
    attempt = folder.new_attempt()
    with StateKeeper(attempt):
        assert [served(), served(), served("--index", "7")] == [(2, 2), (2, 3), (2, 7)]
    assert len(folder.attempts()) == 2


def test_where_none_runs_it_has_an_attempt_of_its_own(served, tmp_path):
    folder = RunFolder(tmp_path / "run")
    assert served() == (1, 0)
    with StateKeeper(folder.new_attempt()) as keeper:
        keeper.tell("finished")
        assert served() == (3, 0)
    with StateKeeper(folder.new_attempt()):
        assert serve.running_attempt(folder, time.time() + SILENCE_SECONDS + 1, 0.1) is None


def test_a_run_whose_clock_is_behind_is_told_by_its_heartbeat(tmp_path, monkeypatch):
    monkeypatch.setattr(attempt_state, "HEARTBEAT_SECONDS", 0.05)
    folder = RunFolder(tmp_path / "run")
    attempt = folder.new_attempt()
    with StateKeeper(attempt):
        assert serve.running_attempt(folder, time.time() + SILENCE_SECONDS + 1, 10.0).path == attempt.path


def test_the_launchers_servers_say_where_they_belong(served, tmp_path):
    folder = RunFolder(tmp_path / "run")
    first = folder.new_attempt()
    with StateKeeper(folder.new_attempt()):
        assert served("--attempt", str(first.path)) == (1, 0)
        assert served("--attempt", str(first.path), "--index", "1") == (1, 1)


OVER_TWO = ("server={tensor: 2, num_nodes: 2}", "cluster.num_rollout_nodes=2")


def test_each_node_of_a_server_over_several_has_its_part(served, tmp_path, monkeypatch):
    parts = []

    class Part:
        def __init__(self, server, attempt, index, part):
            parts.append((attempt.number, index, part, server.host))

        def run(self):
            return 0

    monkeypatch.setattr(serve, "PartSupervisor", Part)
    attempt = RunFolder(tmp_path / "run").new_attempt()
    here = (*OVER_TWO, "--attempt", str(attempt.path), "--index", "0")
    assert served(*here, "--part", "0", "--host", "127.0.0.1") == (1, 0) and not parts
    served(*here, "--part", "1", "--host", "127.0.0.2")
    monkeypatch.setattr(serve, "task_of_step", lambda: 1)
    served(*here, "--hosts", "127.0.0.1,127.0.0.3")
    assert parts == [(1, 0, 1, "127.0.0.2"), (1, 0, 1, "127.0.0.3")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            (*OVER_TWO,),
            "a server over 2 nodes (server.num_nodes) needs --part 0 to 1, one per node, and the same --index",
        ),
        ((*OVER_TWO, "--part", "1"), "needs --part 0 to 1, one per node, and the same --index for all"),
        ((*OVER_TWO, "--part", "2", "--index", "0"), "--part: 2 with server.num_nodes 2; valid: 0 to 1"),
        ((*OVER_TWO, "--part", "1", "--index", "0"), "--part: no attempt runs; start part 0 first, or name --attempt"),
        (
            (*OVER_TWO, "--index", "0", "--hosts", "a"),
            "--hosts: 1 addresses for server.num_nodes 2; valid: one per node",
        ),
        (
            (*OVER_TWO, "--index", "0", "--hosts", "a,b"),
            "SLURM_PROCID is not set, so that nothing says which of them this machine is; add --part",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused(served, capsys, monkeypatch, words, said):
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    with pytest.raises(AssertionError):
        served(*words)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("host", ["0.0.0.0", "::0", "0"])
def test_the_wildcard_is_refused_on_the_command_line_too(served, capsys, host):
    with pytest.raises(AssertionError):
        served("--host", host)
    assert f"gspo-mega serve: --host: {host} opens the server to every network" in capsys.readouterr().err
