"""Connections that send no request end, and keep nobody out; what is no HTTP leaves no key in a log."""

import logging
import socket
import time
import urllib.parse

import pytest
from endpoint_support import Served, post_body, raw

from gspo_mega.agents import connection_gate


@pytest.fixture
def served():
    made = Served()
    yield made
    made.close()


def connect(served, data=b""):
    parts = urllib.parse.urlsplit(served.endpoint._address)
    made = socket.create_connection((parts.hostname, parts.port), timeout=30)
    if data:
        made.sendall(data)
    return made


def num_ended(connections):
    ended = 0
    for one in connections:
        one.settimeout(0.0)
        try:
            ended += one.recv(1) == b""
        except BlockingIOError:
            continue
        except OSError:
            ended += 1
    return ended


HALF = b"POST /sessions/x/v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bea"


def test_half_a_head_is_waited_for_and_no_longer(served, monkeypatch):
    monkeypatch.setattr(connection_gate, "HEAD_SECONDS", 1.0)
    half = [connect(served, data) for data in (HALF, b"", b"\r\n") for _ in range(20)]
    with served.visit(["4"]) as (_, visit):
        status, _, answer = raw(visit, post_body())
        assert status == 200 and answer["choices"][0]["message"]["content"] == "4"
    deadline = time.monotonic() + 30
    while (ended := num_ended(half)) < len(half) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ended == len(half)
    for one in half:
        one.close()


def test_a_flood_keeps_nobody_out(served, monkeypatch):
    monkeypatch.setattr(connection_gate, "MOST_WAITING_OF_PEER", 50)
    monkeypatch.setattr(connection_gate, "GRACE_SECONDS", 0.0)
    half = [connect(served, HALF) for _ in range(200)]
    with served.visit(["4"]) as (_, visit):
        status, _, answer = raw(visit, post_body())
        assert status == 200 and answer["choices"][0]["message"]["content"] == "4"
    deadline = time.monotonic() + 30
    while len(served.endpoint._gate.waiting) > 50 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(served.endpoint._gate.waiting) <= 50 and num_ended(half) >= 150
    for one in half:
        one.close()


def test_no_more_connections_than_there_is_room_for(served, monkeypatch):
    monkeypatch.setattr(served.endpoint._gate, "_most", 10)
    monkeypatch.setattr(connection_gate, "MOST_WAITING_OF_PEER", 0)
    many = [connect(served) for _ in range(30)]
    deadline = time.monotonic() + 30
    while num_ended(many) < 25 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sum(served.endpoint._gate._open.values()) <= 10
    for one in many:
        one.close()


@pytest.mark.parametrize(
    "data",
    [
        b"GET /sessions/x/v1/models HTTP/1.1\r\nAuthorization: Bearer sk-secret\0x\r\n\r\n",
        b"GET /sessions/x/v1/models HTTP/1.1\r\nAuthorization Bearer sk-secret\r\n\r\n",
        b"GET /sessions/sk-secret HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01sk-secret\r\n\r\n",
        b"GET /sessions/x/v1/models HTTP/1.1\r\nAuthorization: " + b"sk-secret" * 9000 + b"\r\n\r\n",
        b"POST /sessions/x/v1/models HTTP/1.1\r\nContent-Length: sk-secret\r\n\r\n",
    ],
)
def test_what_is_no_http_leaves_no_key_in_a_log(served, caplog, capfd, data):
    with caplog.at_level(logging.DEBUG):
        one = connect(served, data)
        one.settimeout(30)
        while one.recv(65536):
            pass
        one.close()
    said = caplog.text + "".join(capfd.readouterr())
    assert "sk-secret" not in said and "Traceback" not in said
    assert all("Authorization" not in str(record.__dict__) for record in caplog.records)


def test_connections_that_were_answered_are_kept_however_many(served, monkeypatch):
    monkeypatch.setattr(connection_gate, "MOST_WAITING_OF_PEER", 5)
    monkeypatch.setattr(connection_gate, "HEAD_SECONDS", 0.5)
    # At once: more than may wait, and none has waited long.
    kept = [connect(served, b"GET /nothing HTTP/1.1\r\nHost: a\r\n\r\n") for _ in range(20)]
    for one in kept:
        one.settimeout(30)
        assert b" 404 " in one.recv(65536)
    time.sleep(0.7)
    assert num_ended(kept) == 0 and not served.endpoint._gate.waiting
    for one in kept:
        one.close()
