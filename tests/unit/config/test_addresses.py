"""Which addresses a server may bind, and how one is written with its port."""

import pytest

from gspo_mega.base.network import address_problem, is_loopback, with_port


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "10.0.0.7", "::1", "fd00::2", "fe80::1%eth0", "localhost", "node1", "gpu-07.cluster.example", "a_b"],
)
def test_a_machines_own_address_or_name_may_be_bound(host):
    assert address_problem(host) is None


@pytest.mark.parametrize("host", ["a b", "-x", "node:80", "a/b", "::1 ", " ", "ﬀ"])
def test_what_is_neither_is_refused(host):
    assert "neither an IP address nor the name of a machine" in address_problem(host)


def test_loopback():
    assert [
        host
        for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost", "10.0.0.1", "node1", "fd00::2")
        if is_loopback(host)
    ] == [
        "127.0.0.1",
        "127.9.9.9",
        "::1",
        "localhost",
    ]


def test_a_port_behind_an_ipv6_address_is_told_apart():
    assert [with_port(host, 80) for host in ("10.0.0.1", "::1", "node1")] == ["10.0.0.1:80", "[::1]:80", "node1:80"]
