"""The job's own addresses are asked directly, whatever the proxy variables and `no_proxy` say; what is outside is not."""

import os
import subprocess
import sys
import urllib.request

import pytest

from gspo_mega.base import network
from gspo_mega.base.errors import RewardError
from gspo_mega.rewards.guarded_process import ProcessKind, environment_of
from gspo_mega.rollout.server.process import RunningServer

ALL = {
    spelled: "http://127.0.0.1:9"
    for name in ("http_proxy", "https_proxy", "all_proxy", "ftp_proxy", "ws_proxy", "grpc_proxy")
    for spelled in (name, name.upper())
}


@pytest.fixture
def proxied(monkeypatch):
    """The environment of a cluster with a proxy."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    for name, value in ALL.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.mark.parametrize(
    ("lower", "upper", "kept"),
    [
        (None, None, []),
        ("", "", []),
        ("intern.example", None, ["intern.example"]),
        ("intern.example,10.0.0.0/8", "OTHER.example , .z", ["intern.example", "10.0.0.0/8", "OTHER.example", ".z"]),
        ("localhost", None, ["localhost"]),
    ],
)
def test_own_addresses_are_added_to_what_no_proxy_was(proxied, lower, upper, kept):
    for name, value in (("no_proxy", lower), ("NO_PROXY", upper)):
        if value is not None:
            proxied.setenv(name, value)
    made = network.no_proxy_variables(["node17", "10.1.2.3"])
    assert made["no_proxy"] == made["NO_PROXY"]
    listed = made["no_proxy"].split(",")
    assert listed[: len(kept)] == kept and {"localhost", "127.0.0.1", "::1", "node17", "10.1.2.3"} <= set(listed)
    assert set(network.own_hosts()) <= set(listed) and len(set(listed)) == len(listed)
    proxied.setenv("no_proxy", made["no_proxy"])
    for own in ("localhost", "127.0.0.1", "[::1]", "node17", "10.1.2.3"):
        assert urllib.request.proxy_bypass_environment(own.strip("[]")), own
    assert not urllib.request.proxy_bypass_environment("judge.example.org")


def test_a_star_stays_a_star(proxied):
    proxied.setenv("NO_PROXY", "*")
    assert network.no_proxy_variables(["node17"]) == {"no_proxy": "*", "NO_PROXY": "*"}


def test_addresses_come_from_the_kernels_tables(tmp_path):
    (tmp_path / "fib_trie").write_text(
        "Main:\n  |-- 127.0.0.1\n     /32 host LOCAL\n  |-- 10.0.0.7\n     /32 host LOCAL\n  |-- 10.0.0.255\n"
        "     /32 link BROADCAST\nLocal:\n  |-- 10.0.0.7\n     /32 host LOCAL\n"
    )
    (tmp_path / "if_inet6").write_text(
        "00000000000000000000000000000001 01 80 10 80       lo\nfe800000000000000000000000000001 02 40 20 80 eth0\n"
        "20010db8000000000000000000000007 02 40 00 80     eth0\n"
    )
    assert network.own_hosts(tmp_path)[-2:] == ["10.0.0.7", "2001:db8::7"]
    assert network.own_hosts(tmp_path / "none")[:3] == ["localhost", "127.0.0.1", "::1"]


def test_a_servers_processes_have_no_proxy_at_all(proxied, tmp_path):
    shown = "import os; print({k: v for k, v in os.environ.items() if k.lower().endswith('proxy')}, flush=True)"
    log = tmp_path / "log"

    class Spec:
        model_path = "model"

        def write(self, file):
            file.write_text("{}")

    running = RunningServer.start([sys.executable, "-c", shown], log, lambda scratch: Spec())
    running.process.wait(30)
    running.end()
    assert eval(log.read_text()) == {"no_proxy": "*", "NO_PROXY": "*"}


def test_users_code_keeps_the_way_out_and_asks_the_job_directly(proxied):
    given = environment_of(ProcessKind("module", "reward", "reward", RewardError), [])
    assert given["http_proxy"] == given["HTTPS_PROXY"] == "http://127.0.0.1:9"
    assert "127.0.0.1" in given["no_proxy"].split(",")
    proxied.setenv("https_proxy", "http://me:secret@proxy:3128")
    assert "https_proxy" not in environment_of(ProcessKind("module", "reward", "reward", RewardError), [])
    named = environment_of(ProcessKind("module", "reward", "reward", RewardError), ["https_proxy"])
    assert named["https_proxy"].endswith("@proxy:3128")


@pytest.mark.parametrize(
    ("url", "environment", "expected"),
    [
        ("http://judge.example/v1", {"http_proxy": "http://p:1"}, "http://p:1"),
        ("https://judge.example/v1", {"http_proxy": "http://p:1"}, None),
        ("https://judge.example/v1", {"HTTPS_PROXY": "p:1"}, "http://p:1"),
        ("https://judge.example/v1", {"all_proxy": "http://p:1"}, "http://p:1"),
        ("https://judge.example/v1", {"all_proxy": "socks5://p:1"}, None),
        ("http://judge.example/v1", {"http_proxy": "", "HTTP_PROXY": "http://p:1"}, None),
        ("http://judge.example/v1", {"http_proxy": "http://p:1", "no_proxy": "judge.example"}, None),
        ("http://judge.example/v1", {"http_proxy": "http://p:1", "NO_PROXY": ".example"}, None),
        ("http://judge.example/v1", {"http_proxy": "http://p:1", "no_proxy": "*"}, None),
        ("http://127.0.0.1:8000/v1", {"http_proxy": "http://p:1"}, None),
        ("http://[::1]:8000/v1", {"http_proxy": "http://p:1"}, None),
        ("http://localhost:8000/v1", {"HTTP_PROXY": "http://p:1"}, None),
    ],
)
def test_the_proxy_of_a_service(url, environment, expected):
    assert network.proxy_for(url, environment) == expected


def test_every_command_and_what_it_starts_asks_the_job_directly(proxied, tmp_path):
    """Through the product's own command: an alert's command is a process that `main` starts."""
    code = (
        "import os, sys; from gspo_mega.cli.main import main; main(['--version']);"
        " print(os.environ['no_proxy'] == os.environ['NO_PROXY'], '127.0.0.1' in os.environ['no_proxy'])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.splitlines()[-1] == "True True"
