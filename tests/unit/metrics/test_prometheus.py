"""The endpoint for Prometheus, read by its own client's parser."""

from __future__ import annotations

import contextlib
import socket
import threading
import urllib.error
import urllib.request
from collections import Counter

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gspo_mega.base import network
from gspo_mega.metrics.catalogue import CATALOGUE
from gspo_mega.metrics.prometheus import CONTENT_TYPE, PrometheusEndpoint, exposed_name, exposition
from gspo_mega.metrics.writer import MetricsWriter


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def read(port, path="/metrics"):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def samples(text):
    families = list(text_string_to_metric_families(text))
    return {(sample.name, *sorted(sample.labels.items())): sample.value for f in families for sample in f.samples}


def test_the_whole_catalogue_is_read_back_with_its_help_and_labels():
    names = {entry: entry.replace("<", "").replace(">", "") for entry in CATALOGUE}
    text = exposition("demo", 2, 7, 123.5, {name: number / 7 for number, name in enumerate(names.values())})
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert len(families) == len(CATALOGUE) + 3
    assert Counter(map(exposed_name, CATALOGUE)).most_common(1)[0][1] == 1, "two entries of one name"
    for number, (entry, metric) in enumerate(CATALOGUE.items()):
        family = families[exposed_name(entry)]
        assert family.type == "gauge" and family.documentation == f"{metric.description} ({metric.unit})"
        (sample,) = family.samples
        assert sample.value == number / 7 and sample.labels.pop("run") == "demo"
        assert sample.labels == {part.rstrip(">"): part.rstrip(">") for part in _placeholders(entry)}
    assert families["gspo_mega_step"].samples[0].value == 7 and families["gspo_mega_attempt"].samples[0].value == 2


def _placeholders(entry):
    return [part.split(">")[0] for part in entry.split("<")[1:]]


def test_it_serves_the_last_step_and_nothing_before_the_first(tmp_path):
    port, said = free_port(), []
    with PrometheusEndpoint("127.0.0.1", port, "demo", 1, said.append) as endpoint:
        kind, text = read(port)
        assert kind == CONTENT_TYPE and samples(text) == {("gspo_mega_attempt", ("run", "demo")): 1}
        writer = MetricsWriter(tmp_path, endpoint=endpoint)
        writer.write(1, {"reward/mean": 0.25})
        writer.write(2, {"reward/mean": 0.5, "reward/source/gsm8k-main": 1e-300, "policy/entropy": float("nan")})
        found = samples(read(port)[1])
        assert found[("gspo_mega_reward_mean", ("run", "demo"))] == 0.5
        assert found[("gspo_mega_reward_source", ("run", "demo"), ("source", "gsm8k-main"))] == 1e-300
        assert found[("gspo_mega_step", ("run", "demo"))] == 2
        assert found[("gspo_mega_metrics_num_non_finite", ("run", "demo"))] == 1
        assert not any(name.startswith("gspo_mega_policy_entropy") for name, *_ in found)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            read(port, "/")
        writer.close()
    with pytest.raises(urllib.error.URLError):
        read(port)
    assert said == []


def test_a_port_that_is_taken_is_told_once_and_tried_again():
    said = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with PrometheusEndpoint("127.0.0.1", port, "demo", 1, said.append) as endpoint:
            endpoint.update(1, {"reward/mean": 0.5})
            assert endpoint.port is None and len(said) == 1
            assert said[0].startswith(f"notice   metrics.prometheus: 127.0.0.1:{port} cannot be bound: ")
            listener.close()
            endpoint.update(2, {"reward/mean": 0.75})
            assert samples(read(port)[1])[("gspo_mega_step", ("run", "demo"))] == 2
    assert len(said) == 1


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:{port}", 200),
        ("localhost", 200),
        ("[::1]:{port}", 200),
        ("{name}:{port}", 200),
        ("evil.example", 403),
        ("evil.example:{port}", 403),
        ("127.0.0.1.evil.example:{port}", 403),
        ("{name}.evil.example", 403),
        ("10.255.255.254:{port}", 403),
        ("[fe80::1]", 403),
    ],
)
def test_it_answers_under_its_own_names_only(host, status):
    port = free_port()
    with PrometheusEndpoint("127.0.0.1", port, "demo", 1, print):
        given = host.format(port=port, name=socket.gethostname())
        with socket.create_connection(("127.0.0.1", port), timeout=30) as asks:
            asks.sendall(f"GET /metrics HTTP/1.1\r\nHost: {given}\r\nConnection: close\r\n\r\n".encode())
            answer = asks.recv(100)
    assert answer.startswith(f"HTTP/1.0 {status}".encode())


def test_half_a_request_is_not_waited_for_and_keeps_nobody_out(monkeypatch):
    monkeypatch.setattr(network, "HEAD_SECONDS", 1.0)
    monkeypatch.setattr(network, "MOST_WAITING", 20)
    port = free_port()
    with PrometheusEndpoint("127.0.0.1", port, "demo", 1, print):
        half = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(100)]
        for one in half:
            one.sendall(b"GET /metr")
        assert read(port)[0] == CONTENT_TYPE
        for one in half:  # each ends, by a byte that does not come or by an error
            with contextlib.suppress(OSError):
                assert one.recv(1) == b""
            one.close()


def test_connections_for_which_no_thread_could_start_leave_room_for_others(monkeypatch):
    monkeypatch.setattr(network, "MOST_CONNECTIONS", 4)
    port, start, refused = free_port(), threading.Thread.start, []

    def refuse_some(thread):
        if "process_request_thread" in thread.name and len(refused) < 8:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    with PrometheusEndpoint("127.0.0.1", port, "demo", 1, print):
        monkeypatch.setattr(threading.Thread, "start", refuse_some)
        for _ in range(8):
            with socket.create_connection(("127.0.0.1", port), timeout=30) as one, contextlib.suppress(OSError):
                assert one.recv(1) == b""
        assert len(refused) == 8 and read(port)[0] == CONTENT_TYPE
