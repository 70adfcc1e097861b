"""Which ends of servers end the run: a server that left in order is no failure, and one that joined may still serve."""

import sys
import time

import pytest

from gspo_mega.base.run_folder import Attempt
from gspo_mega.launcher.children import ChildSpec, ProcessFamily
from gspo_mega.launcher.local import RemainingServers
from gspo_mega.rollout.registration import Registration, read_registrations


@pytest.fixture
def ended(tmp_path):
    """ended(*servers): real processes that have ended, each given by its registered state and its exit code."""
    attempt = Attempt(tmp_path)
    for folder in (attempt.servers_dir, attempt.logs_dir):
        folder.mkdir(parents=True)
    family, said = ProcessFamily(), []

    def start(*servers):
        for index, (state, code) in enumerate(servers):
            register(attempt, f"server-{index}", state)
            command = [sys.executable, "-c", f"raise SystemExit({code})"]
            family.start(ChildSpec("server", index, command, tmp_path / f"server_{index}.log"))
        deadline = time.monotonic() + 30
        while any(child.exit_code is None for child in family.children) and time.monotonic() < deadline:
            family.reap()
            time.sleep(0.02)
        return attempt, RemainingServers(attempt, family.children, said.append), said

    yield start
    family.close(1.0)


def register(attempt, server_id, state):
    error = "refused" if state == "failed" else None
    Registration(server_id, "http://127.0.0.1:1", 1, state, 0, None, time.time(), error=error).write(
        attempt.servers_dir
    )


def states(attempt):
    return {r.server_id: r.state for r in read_registrations(attempt.servers_dir)}


def test_a_server_that_drained_has_left_and_nothing_failed(ended):
    attempt, servers, said = ended(("stopped", 0))
    assert servers.lost() == [] and servers.lost() == []
    assert states(attempt) == {"server-0": "stopped"}
    assert len(said) == 1 and said[0].startswith("server 0 has left, as it was asked to; no server of 1 is left")


@pytest.mark.parametrize(("state", "code"), [("stopped", 3), ("ready", 0), ("draining", 0)])
def test_a_server_that_did_not_end_in_order_is_given_up(ended, state, code):
    attempt, servers, said = ended((state, code))
    assert [child.spec.index for child in servers.lost()] == [0]
    assert states(attempt) == {"server-0": "failed"} and said[0].startswith(
        "warning  server 0 is given up: its process"
    )


@pytest.mark.parametrize("joined", ["starting", "ready", "restarting", "draining", "stopped"])
def test_a_server_that_joined_leaves_the_end_to_the_pool(ended, joined):
    attempt, servers, said = ended(("failed", 1))
    register(attempt, "beside", joined)
    assert servers.lost() == [] and "server 0 is given up: refused" in said[0]
    register(attempt, "beside", "failed")
    assert [child.spec.index for child in servers.lost()] == [0] and len(said) == 1
    register(attempt, "too-late", "ready")
    assert [child.spec.index for child in servers.lost()] == [0], "an end that has begun has a reason until it is over"


def test_one_left_and_one_failed_leaves_the_end_to_the_pool(ended):
    _, servers, said = ended(("stopped", 0), ("failed", 1))
    assert servers.lost() == []
    assert "1 of 2 servers is left" in said[0] and "no server of 2 is left" in said[1]


def test_a_registration_that_cannot_be_read_or_written_for_a_moment_ends_nothing(ended, monkeypatch):
    _, servers, said = ended(("ready", 0))

    def fails(*_, **__):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("gspo_mega.launcher.local.read_json", fails)
    monkeypatch.setattr(Registration, "write", fails)
    assert [child.spec.index for child in servers.lost()] == [0], "its process has ended, which needs no file"
    assert said[0].startswith("warning  server 0 is given up: its process exited with code 0")
