"""The heartbeat of `gspo-mega serve` continues when the system clock is set back."""

import errno
import time
from pathlib import Path

import pytest

from gspo_mega.base.errors import ConfigError
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.config import load_config
from gspo_mega.rollout.registration import read_registrations
from gspo_mega.rollout.server import supervise
from gspo_mega.rollout.server.process import free_port

CONFIG = Path(__file__).parents[3] / "configs/quickstart.yaml"


def test_it_beats_on(tmp_path, monkeypatch):
    attempt = RunFolder(tmp_path / "run").new_attempt()
    server = supervise.ServerSupervisor(load_config(CONFIG).config, attempt, 0)
    monkeypatch.setattr(supervise, "_HEARTBEAT_SECONDS", 0.05)
    now = time.time()
    beats = []
    for clock in (now, now - 3600, now - 3599):
        monkeypatch.setattr(supervise.time, "time", lambda clock=clock: clock)
        time.sleep(0.06)
        server._write_heartbeat()
        (seen,) = read_registrations(attempt.servers_dir)
        beats.append(seen.heartbeat)
    assert beats == [now, now - 3600, now - 3599]


def test_a_heartbeat_that_cannot_be_written_leaves_the_server_alone(tmp_path, monkeypatch, caplog):
    attempt = RunFolder(tmp_path / "run").new_attempt()
    server = supervise.ServerSupervisor(load_config(CONFIG).config, attempt, 0)
    monkeypatch.setattr(supervise, "_HEARTBEAT_SECONDS", 0.0)
    server._write_heartbeat()
    (before,) = read_registrations(attempt.servers_dir)
    write = supervise.Registration.write

    def stale(self, folder):
        raise OSError(errno.ESTALE, "Stale file handle", str(folder))

    monkeypatch.setattr(supervise.Registration, "write", stale)
    assert server._write_heartbeat() and server._write_heartbeat()
    assert [r.getMessage() for r in caplog.records].count(
        "server-0: its heartbeat could not be written: [Errno 116] Stale file handle: "
        f"'{attempt.servers_dir}'; tried again until it can be"
    ) == 1
    monkeypatch.setattr(supervise.Registration, "write", write)
    server._write_heartbeat()
    (after,) = read_registrations(attempt.servers_dir)
    assert after.heartbeat > before.heartbeat


def test_a_name_of_the_wildcard_is_found_where_it_is_bound():
    """The configuration asks no name server; the process that binds the address checks it."""
    with pytest.raises(ConfigError, match="server.host: .*opens the server to every network"):
        free_port("0.0.0.0")
